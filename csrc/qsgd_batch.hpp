// QSGD of whole blocks whose size is a power of two, at the speed of memory. Included inside a level's namespace.
// A unit is 128 elements whose random words come from 16 hashes in four groups: a part of a block, or several small ones.
// The scales and the hashes of a batch of units come first: a block's own are long chains of dependent instructions.
// Values are computed twice rather than kept: the maxima of the next batch are found between the units of this one, so
// that their way from memory hides behind arithmetic.

constexpr i64 kUnit = 128;                   // elements
constexpr i64 kBatch = 1024;                 // elements, or one block if that is larger
constexpr i64 kAhead = 1024;                 // elements that decoding prefetches ahead
constexpr i64 kEncodeAhead = 4 * kBatch;     // and encoding
constexpr i64 kCells = kBatch / 32;          // blocks of a batch, at most; a multiple of 16

// Blocks of less than a unit, of exactly one, of one or more.
constexpr int kSmall = 0, kUsual = 1, kLarge = 2;

// Keeps gcc from taking a short loop apart before it can become vectors.
#define GW_ROLLED _Pragma("GCC unroll 1")

GW_INLINE bool batches(i64 block) { return block >= 32 && (block & (block - 1)) == 0; }

// The grids of the blocks of a batch, as in Grid.
struct Cells {
  alignas(64) float inverse[kCells];
  alignas(64) float base[kCells];
  alignas(64) float step[kCells];
};

// The grids of 16 blocks from their scales as 32-bit words, each a bfloat16 in its low half.
template <bool Shifted>
GW_INLINE void make_cells(const u32* __restrict scale, int bits, i64 at, Cells& cells) {
  const float top = float(Shifted ? (1 << bits) - 1 : (1 << (bits - 1)) - 1);
  const float scaled = top * (0x1p16f * kShort);
  float* __restrict inverse = cells.inverse + at;
  float* __restrict base = cells.base + at;
  float* __restrict step = cells.step + at;
GW_ROLLED
  for (int c = 0; c < 16; ++c) {
    const float low = Shifted ? float_of(scale[2 * c] << 16) : 0.0f;
    const float span = Shifted ? float_of(scale[2 * c + 1] << 16) - low : float_of(scale[c] << 16);
    const float quotient = scaled / span;
    inverse[c] = span >= kTiny ? quotient : 0.0f;
    if (Shifted) base[c] = low;
    step[c] = span / top;
  }
}

// The scales of 16 blocks by their maxima; returns the largest.
GW_INLINE i32 bound_by_maximum(const i32* __restrict largest, u32* __restrict scale) {
  i32 all = 0;
GW_ROLLED
  for (int c = 0; c < 16; ++c) {
    all = largest[c] > all ? largest[c] : all;
    const u32 rounded = (u32(largest[c]) + 0xffffu) >> 16, capped = rounded < 0x7f7fu ? rounded : 0x7f7fu;
    scale[c] = u32(largest[c]) >= kTinyBits ? capped : 0u;
  }
  return all;
}

GW_INLINE void narrow_scales(const u32* __restrict scale, i64 count, u8* __restrict scales) {
  alignas(64) u16 raw[2 * kCells];
  for (i64 c = 0; c < count; c += 16)
    for (int j = 0; j < 16; ++j) raw[c + j] = u16(scale[c + j]);
  GW_SETTLE(raw);
  if (count == 8) __builtin_memcpy(scales, raw, 16);  // the usual number of blocks of a batch, without a call
  else __builtin_memcpy(scales, raw, size_t(2 * count));
}

// The maxima of the unit that begins at `from`, into those of its blocks.
template <bool Residual, bool Whole>
GW_INLINE void largest_of_unit(const float* from, const float* left, i64 block, i32* largest) {
  if (Whole) {
    const i32 here = largest_of<kUnit, float, Residual>(from, left);
    *largest = here > *largest ? here : *largest;
    return;
  }
  for (i64 at = 0; at < kUnit; at += block, ++largest) {
    const float* const block_left = left + (Residual ? at : 0);
    *largest = block == 64 ? largest_of<64, float, Residual>(from + at, block_left)
                           : largest_of<32, float, Residual>(from + at, block_left);
  }
}

// 16 pairs of values, x[l] and x[l + half], to codes: two nibbles of a byte with Pairs, else two bytes. Residuals become
// what is lost.
template <bool Residual, bool Stochastic, bool Pairs, bool Shifted, int Group>
GW_INLINE void quantise_group(const float* x, float* left, i64 half, const u32* hashes, const Cells& cells, i64 cell, i32 zero,
                              u32* both) {
  const float origin = float(zero) * 0x1p16f, inverse = cells.inverse[cell], step = cells.step[cell];
  const float base = Shifted ? cells.base[cell] : 0.0f;
  const float* const y = x + half;
  float* const y_left = left + (Residual ? half : 0);
#pragma GCC ivdep
  for (int l = 0; l < 16; ++l) {
    const u32 word = Stochastic ? random_fold(hashes[l], Group) : 0x80008000u;
    const float p = Residual ? x[l] + left[l] : x[l], q = Residual ? y[l] + y_left[l] : y[l];
    const i32 a = i32((Shifted ? p - base : p) * inverse + origin) + i32(word & 0xffffu);
    const i32 b = i32((Shifted ? q - base : q) * inverse + origin) + i32(word >> 16);
    both[l] = Pairs ? u32(a >> 16) | ((u32(b) >> 12) & 0xf0u) : (u32(a >> 16) & 0xffu) | ((u32(b) >> 8) & ~0xffu);
    if (Residual) {
      const float sent_p = float((a >> 16) - zero) * step, sent_q = float((b >> 16) - zero) * step;
      left[l] = p - (Shifted ? sent_p + base : sent_p);
      y_left[l] = q - (Shifted ? sent_q + base : sent_q);
    }
  }
}

// The 64 pairs of a unit, which begins at x. Without Whole a unit is several blocks, which take one group each (32 elements)
// or two (64).
template <bool Residual, bool Stochastic, bool Pairs, bool Shifted, bool Whole>
GW_INLINE void quantise_unit(const float* x, float* left, i64 block, const u32* hashes, const Cells& cells, i64 cell, i32 zero,
                             u32* both) {
  const i64 half = block / 2, second = Whole ? 16 : block == 32 ? 32 : 16, third = Whole ? 32 : 64;
  const i64 next = !Whole && block == 32, other = Whole ? 0 : block == 32 ? 2 : 1;
  const auto at = [&](i64 offset) { return left + (Residual ? offset : 0); };
  const i64 fourth = third + second, c = cell;
  quantise_group<Residual, Stochastic, Pairs, Shifted, 0>(x, left, half, hashes, cells, c, zero, both);
  quantise_group<Residual, Stochastic, Pairs, Shifted, 1>(x + second, at(second), half, hashes, cells, c + next, zero, both + 16);
  quantise_group<Residual, Stochastic, Pairs, Shifted, 2>(x + third, at(third), half, hashes, cells, c + other, zero, both + 32);
  quantise_group<Residual, Stochastic, Pairs, Shifted, 3>(x + fourth, at(fourth), half, hashes, cells, c + other + next, zero, both + 48);
}

GW_INLINE void pack_batch(const u8* first, const u8* second, i64 block, i64 blocks, int bits, u8* out) {
  if (block == 128) pack_width<128>(first, second, block, blocks, bits, out);
  else if (block == 32) pack_width<32>(first, second, block, blocks, bits, out);
  else if (block == 64) pack_width<64>(first, second, block, blocks, bits, out);
  else pack_width<0>(first, second, block, blocks, bits, out);
}

GW_INLINE void unpack_batch(const u8* in, i64 block, i64 blocks, int bits, u8* codes) {
  if (block == 128) unpack_width<128>(in, block, blocks, bits, codes);
  else if (block == 32) unpack_width<32>(in, block, blocks, bits, codes);
  else if (block == 64) unpack_width<64>(in, block, blocks, bits, codes);
  else unpack_width<0>(in, block, blocks, bits, codes);
}

// Writes the scales of a batch of `count` blocks and fills its cells. Without `largest` the blocks are read for it. False:
// something in it is not finite.
template <bool Residual, bool Shifted>
GW_INLINE bool bound_batch(const float* from, const float* left, i64 count, const Quantiser& q, int bits, i32* largest,
                           u8* scales, Cells& cells) {
  constexpr i64 words = Shifted ? 2 : 1;
  alignas(64) u32 scale[words * kCells];
  if (q.scale == Scale::max) {
    i32 all = 0;
    for (i64 c = 0; c < count; c += 16) {
      const i32 of_these = bound_by_maximum(largest + c, scale + c);
      all = of_these > all ? of_these : all;
    }
    if (u32(all) >= kHuge) return false;
    for (i64 c = 0; c < kCells; ++c) largest[c] = 0;
  } else {
    u16 found[2] = {};
    for (i64 c = 0; c < words * kCells; ++c) scale[c] = 0;
    for (i64 c = 0; c < count; ++c) {
      const i64 at = c * q.block;
      const float* const block_left = left + (Residual ? at : 0);
      if (!find_scale<float, Residual>(q.scale, from + at, block_left, q.block, found)) return false;
      for (i64 w = 0; w < words; ++w) scale[words * c + w] = found[w];
    }
  }
  GW_SETTLE(scale);
  for (i64 c = 0; c < count; c += 16) make_cells<Shifted>(scale + words * c, bits, c, cells);
  narrow_scales(scale, words * count, scales);
  return true;
}

// Encodes `blocks` blocks, which fill whole units. Returns how many it wrote: all, or those
// before a batch that holds something not finite. While one batch is quantised, the scales of the next are made of maxima
// found before, and the maxima of the one after that are found: so nothing waits for anything.
template <bool Residual, bool Stochastic, bool Pairs, bool Shifted, int Kind>
static i64 encode_batches(const float* __restrict from, float* __restrict left, i64 blocks, const Quantiser& q, int bits,
                          u64 key, u32 counter, u8* __restrict scales, u8* __restrict out) {
  constexpr bool Whole = Kind != kSmall;  // each block fills one or more units
  alignas(64) i32 largest[2][kCells] = {};
  alignas(64) u32 hashes[kMaxBlock / kUnit * 16];
  alignas(64) u8 buffer[2][kMaxBlock / 2];
  Cells cells[2];
  const i64 block = Kind == kUsual ? 128 : q.block, most = block < kBatch ? kBatch / block : 1, stride = most * block;
  const i64 several = Whole ? 1 : kUnit / block;                       // blocks of a unit
  const int parts = Whole ? __builtin_ctzll(u64(block / kUnit)) : 0;   // units of a block, as a power of two
  const i32 zero = Shifted ? 0 : (1 << (bits - 1)) - 1;
  const u32 key_low = u32(key), key_high = u32(key >> 32);
  const bool by_maximum = q.scale == Scale::max;
  const bool packed = bits == 4 || (bits == 8 && Whole);
  const auto size_of = [&](i64 first) { const i64 rest = blocks - first; return rest < 0 ? 0 : rest < most ? rest : most; };
  const auto find_largest = [&](i64 at, i64 u, i32* of_blocks) {
    at += u * kUnit;
    largest_of_unit<Residual, Whole>(from + at, left + (Residual ? at : 0), block, of_blocks + (u >> parts) * several);
  };
  if (by_maximum)
    for (i64 b = 0; b < 2; ++b)
      for (i64 u = 0; u < size_of(b * most) * block / kUnit; ++u) find_largest(b * stride, u, largest[b]);
  if (!bound_batch<Residual, Shifted>(from, left, size_of(0), q, bits, largest[0], scales, cells[0])) return 0;
  i64 done = 0;
  for (int turn = 0; done < blocks; turn ^= 1) {
    const i64 batch = size_of(done), next = size_of(done + most), units = batch * block / kUnit;
    scales += (Shifted ? 4 : 2) * batch;
    const bool good = !next || bound_batch<Residual, Shifted>(from + stride, left + (Residual ? stride : 0), next, q, bits,
                                                              largest[turn ^ 1], scales, cells[turn ^ 1]);
    const i64 units_after = by_maximum && good ? size_of(done + 2 * most) * block / kUnit : 0;
    if (Stochastic)
      for (u32 i = 0; i < u32(16 * units); ++i) hashes[i] = random_hash(counter + i / 16 * 64 + i % 16, key_low, key_high);
    GW_SETTLE(hashes);
    u8* const first = packed ? out : buffer[0];
    u8* const second = packed ? out + block / 2 : buffer[1];
    for (i64 u = 0; u < units; ++u) {
      for (int line = 0; line < 8; ++line) __builtin_prefetch(from + kEncodeAhead + u * kUnit + line * 16);
      if (Residual) for (int line = 0; line < 8; ++line) __builtin_prefetch(left + kEncodeAhead + u * kUnit + line * 16, 1);
      const i64 cell = (u >> parts) * several;
      const i64 at = Whole ? cell * block + (u - (cell << parts)) * (kUnit / 2) : u * kUnit;
      alignas(64) u32 both[kUnit / 2];
      quantise_unit<Residual, Stochastic, Pairs, Shifted, Whole>(from + at, left + (Residual ? at : 0), block, hashes + 16 * u,
                                                                 cells[turn], cell, zero, both);
      GW_SETTLE(both);
      const i64 to = packed && !Pairs ? at : u * (kUnit / 2);
      for (int j = 0; j < kUnit / 2; ++j) first[to + j] = u8(both[j]);
      if (!Pairs) for (int j = 0; j < kUnit / 2; ++j) second[to + j] = u8(both[j] >> 8);
      if (u < units_after) find_largest(2 * stride, u, largest[turn]);
    }
    if (!packed) {
      GW_SETTLE(buffer);
      pack_batch(first, second, block, batch, bits, out);
    }
    counter += u32(64 * units);
    from += stride;
    left += Residual ? stride : 0;
    out += batch * block / 8 * bits;
    done += batch;
    if (!good) break;
  }
  return done;
}

// What encode_batches is asked for, beside the values.
struct Task {
  i64 blocks;
  const Quantiser& q;
  int bits;
  u64 key;
  u32 counter;
  u8 *scales, *out;
};

template <bool Residual, bool Stochastic, bool Shifted, int Kind>
static i64 encode_kind(const float* from, float* left, const Task& t) {
  if (t.bits <= 4)
    return encode_batches<Residual, Stochastic, true, Shifted, Kind>(from, left, t.blocks, t.q, t.bits, t.key, t.counter,
                                                                     t.scales, t.out);
  return encode_batches<Residual, Stochastic, false, Shifted, Kind>(from, left, t.blocks, t.q, t.bits, t.key, t.counter, t.scales,
                                                                    t.out);
}

template <bool Residual, bool Stochastic>
static i64 encode_rounded(const float* from, float* left, const Task& t) {
  constexpr int usual = Stochastic ? kUsual : kLarge;  // the default is 10 % faster when its block is known
  if (t.q.scale == Scale::minmax) {
    if (t.q.block < kUnit) return encode_kind<Residual, Stochastic, true, kSmall>(from, left, t);
    return encode_kind<Residual, Stochastic, true, kLarge>(from, left, t);
  }
  if (t.q.block < kUnit) return encode_kind<Residual, Stochastic, false, kSmall>(from, left, t);
  if (t.q.block == kUnit) return encode_kind<Residual, Stochastic, false, usual>(from, left, t);
  return encode_kind<Residual, Stochastic, false, kLarge>(from, left, t);
}

template <bool Residual>
static i64 encode_blocks(const float* from, float* left, const Task& t) {
  if (t.q.rounding == Rounding::stochastic) return encode_rounded<Residual, true>(from, left, t);
  return encode_rounded<Residual, false>(from, left, t);
}

// Of other types a tile at a time is made float32 first.
template <bool Residual, class T>
static i64 encode_blocks(const T* from, float* left, const Task& t) {
  alignas(64) float tile[kMaxBlock];
  const i64 most = kMaxBlock / t.q.block;
  i64 done = 0;
  while (done < t.blocks) {
    const i64 here = t.blocks - done < most ? t.blocks - done : most, at = done * t.q.block;
    for (i64 i = 0; i < here * t.q.block; ++i) tile[i] = to_float(from[at + i]);
    const Task part{here, t.q, t.bits, t.key, t.counter + u32(at / 2), t.scales + (t.q.scale == Scale::minmax ? 4 : 2) * done,
                    t.out + at / 8 * t.bits};
    const i64 written = encode_blocks<Residual>(static_cast<const float*>(tile), left + (Residual ? at : 0), part);
    done += written;
    if (written < here) break;
  }
  return done;
}

// N elements of one block.
template <class T, bool Add, bool Shifted, int N>
GW_INLINE void dequantise(const u8* __restrict codes, float step, float base, i32 zero, T* __restrict to) {
  for (int line = 0; line < N; line += 16) __builtin_prefetch(to + kAhead + line, 1);
  for (int j = 0; j < N; ++j) {
    const float sent = float(i32(codes[j]) - zero) * step, value = Shifted ? sent + base : sent;
    from_float(Add ? to_float(to[j]) + value : value, to[j]);
  }
}

// Decodes `blocks` blocks.
template <class T, bool Add, bool Shifted>
static void decode_batches(const u8* scales, const u8* in, T* to, i64 blocks, i64 block, int bits) {
  constexpr i64 words = Shifted ? 2 : 1;
  alignas(64) u16 raw[2 * kCells] = {};
  alignas(64) u32 scale[2 * kCells];
  alignas(64) u8 buffer[kMaxBlock];
  Cells cells;
  const i64 most = block < kBatch ? kBatch / block : 1, chunk = block < kUnit ? block : kUnit;
  const int chunks = __builtin_ctzll(u64(block / chunk));  // of a block, as a power of two
  const i32 zero = Shifted ? 0 : (1 << (bits - 1)) - 1;
  while (blocks) {
    const i64 batch = blocks < most ? blocks : most;
    if (batch == 8) __builtin_memcpy(raw, scales, 16 * words);  // the usual number, without a call
    else __builtin_memcpy(raw, scales, size_t(2 * words * batch));
    scales += 2 * words * batch;
    for (i64 c = 0; c < words * batch; c += 16)
      for (i64 w = c; w < c + 16; ++w) scale[w] = raw[w];
    GW_SETTLE(scale);
    for (i64 c = 0; c < batch; c += 16) make_cells<Shifted>(scale + words * c, bits, c, cells);
    const u8* codes = in;
    if (bits != 8) {
      unpack_batch(in, block, batch, bits, buffer);
      GW_SETTLE(buffer);
      codes = buffer;
    }
    for (i64 c = 0; c < batch << chunks; ++c, codes += chunk, to += chunk) {
      const float step = cells.step[c >> chunks], base = Shifted ? cells.base[c >> chunks] : 0.0f;
      if (chunk == 128) dequantise<T, Add, Shifted, 128>(codes, step, base, zero, to);
      else if (chunk == 64) dequantise<T, Add, Shifted, 64>(codes, step, base, zero, to);
      else dequantise<T, Add, Shifted, 32>(codes, step, base, zero, to);
    }
    in += batch * block / 8 * bits;
    blocks -= batch;
  }
}
