// Whole blocks whose size is a power of two, at the speed of memory. Included inside a level's namespace.
// A unit is 128 elements whose random words come from 16 hashes in four groups: a part of a block, or several small ones.
// The scales and the hashes of a batch of units come first: a block's own are long chains of dependent instructions.
// Values are computed twice rather than kept: the maxima of the next batch are found between the units of this one, so
// that their way from memory hides behind arithmetic.

constexpr i64 kAhead = 1024;              // elements that decoding prefetches ahead
constexpr i64 kEncodeAhead = 4 * kBatch;  // and encoding

// Blocks of less than a unit, of exactly one, of one or more.
constexpr int kSmall = 0, kUsual = 1, kLarge = 2;

GW_INLINE bool batches(i64 block) { return block >= 32 && (block & (block - 1)) == 0; }

// The scales of 16 blocks by their maxima, each a bfloat16 in the low half of a word; returns the largest maximum.
template <class Levels>
GW_INLINE i32 bound_by_maximum(const i32* __restrict largest, u32* __restrict scale) {
  i32 all = 0;
GW_ROLLED
  for (int c = 0; c < 16; ++c) {
    all = largest[c] > all ? largest[c] : all;
    scale[c] = Levels::bound(u32(largest[c]));
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
    const i32 here = largest_of<kUnit, Residual>(from, left);
    *largest = here > *largest ? here : *largest;
    return;
  }
  for (i64 at = 0; at < kUnit; at += block, ++largest) {
    const float* const block_left = left + (Residual ? at : 0);
    *largest = block == 64 ? largest_of<64, Residual>(from + at, block_left)
                           : largest_of<32, Residual>(from + at, block_left);
  }
}

// The 64 pairs of a unit, which begins at x. Without Whole a unit is several blocks, which take one group each (32 elements)
// or two (64).
template <class Levels, bool Residual, bool Stochastic, bool Pairs, bool Whole>
GW_INLINE void quantise_unit(const float* x, float* left, i64 block, const u32* hashes, const Cells& cells, i64 cell, int bits,
                             u32* both) {
  const i64 half = block / 2, second = Whole ? 16 : block == 32 ? 32 : 16, third = Whole ? 32 : 64;
  const i64 next = !Whole && block == 32, other = Whole ? 0 : block == 32 ? 2 : 1;
  const auto at = [&](i64 offset) { return left + (Residual ? offset : 0); };
  const i64 fourth = third + second, c = cell;
  Levels::template group<Residual, Stochastic, Pairs, 0>(x, left, half, hashes, cells, c, bits, both);
  Levels::template group<Residual, Stochastic, Pairs, 1>(x + second, at(second), half, hashes, cells, c + next, bits, both + 16);
  Levels::template group<Residual, Stochastic, Pairs, 2>(x + third, at(third), half, hashes, cells, c + other, bits, both + 32);
  Levels::template group<Residual, Stochastic, Pairs, 3>(x + fourth, at(fourth), half, hashes, cells, c + other + next, bits,
                                                         both + 48);
}

static __attribute__((noinline)) void pack_batch(const u8* first, const u8* second, i64 block, i64 blocks, int bits, bool ternary,
                                                 u8* out) {
  if (in_base_3(block, block, bits, ternary)) {
    if (block == 128) pack_blocks_base_3<128>(first, block, blocks, out);
    else pack_blocks_base_3<0>(first, block, blocks, out);
  } else if (block == 128) pack_width<128>(first, second, block, blocks, bits, out);
  else if (block == 32) pack_width<32>(first, second, block, blocks, bits, out);
  else if (block == 64) pack_width<64>(first, second, block, blocks, bits, out);
  else pack_width<0>(first, second, block, blocks, bits, out);
}

static __attribute__((noinline)) void unpack_batch(const u8* in, i64 block, i64 blocks, int bits, bool ternary, u8* codes) {
  if (in_base_3(block, block, bits, ternary)) {
    if (block == 128) unpack_blocks_base_3<128>(in, block, blocks, codes);
    else unpack_blocks_base_3<0>(in, block, blocks, codes);
  } else if (block == 128) unpack_width<128>(in, block, blocks, bits, codes);
  else if (block == 32) unpack_width<32>(in, block, blocks, bits, codes);
  else if (block == 64) unpack_width<64>(in, block, blocks, bits, codes);
  else unpack_width<0>(in, block, blocks, bits, codes);
}

// The scales of `count` blocks that need more than the maximum.
template <i64 Words, bool Residual>
static __attribute__((noinline)) bool search_scales(const float* from, const float* left, i64 count, const Quantiser& q, u32* scale) {
  u16 found[2] = {};
  for (i64 c = 0; c < count; ++c) {
    const i64 at = c * q.block;
    if (!find_scale<Residual>(q.scale, from + at, left + (Residual ? at : 0), q.block, found)) return false;
    for (i64 w = 0; w < Words; ++w) scale[Words * c + w] = found[w];
  }
  return true;
}

// Writes the scales of a batch of `count` blocks and fills its cells. Without `largest` the blocks are read for it. False:
// something in it is not finite.
template <class Levels, bool Residual>
GW_INLINE bool bound_batch(const float* from, const float* left, i64 count, const Quantiser& q, int bits, i32* largest,
                           u8* scales, Cells& cells) {
  constexpr i64 words = Levels::words;
  alignas(64) u32 scale[words * kCells];
  if (Levels::by_maximum || q.scale == Scale::max) {
    i32 all = 0;
    for (i64 c = 0; c < count; c += 16) {
      const i32 of_these = bound_by_maximum<Levels>(largest + c, scale + c);
      all = of_these > all ? of_these : all;
    }
    if (u32(all) >= kHuge) return false;
    for (i64 c = 0; c < kCells; ++c) largest[c] = 0;
  } else {
    for (i64 c = 0; c < words * kCells; ++c) scale[c] = 0;
    if (!search_scales<words, Residual>(from, left, count, q, scale)) return false;
  }
  GW_SETTLE(scale);
  for (i64 c = 0; c < count; c += 16) Levels::cells_of(scale + words * c, bits, c, cells);
  narrow_scales(scale, words * count, scales);
  return true;
}

// Encodes `blocks` blocks, which fill whole units. Returns how many it wrote: all, or those
// before a batch that holds something not finite. While one batch is quantised, the scales of the next are made of maxima
// found before, and the maxima of the one after that are found: so nothing waits for anything.
template <class Levels, bool Residual, bool Stochastic, bool Pairs, int Kind>
static __attribute__((noinline)) i64 encode_batches(const float* __restrict from, float* __restrict left, i64 blocks,
                                                    const Quantiser& q, int bits, u64 key, u32 counter, u8* __restrict scales,
                                                    u8* __restrict out) {
  constexpr bool Whole = Kind != kSmall;  // each block fills one or more units
  alignas(64) i32 largest[2][kCells] = {};
  alignas(64) u32 hashes[kMaxBlock / kUnit * 16];
  alignas(64) u8 buffer[2][kMaxBlock / 2];
  Cells cells[2];
  const i64 block = Kind == kUsual ? 128 : q.block, most = block < kBatch ? kBatch / block : 1, stride = most * block;
  const i64 several = Whole ? 1 : kUnit / block;                       // blocks of a unit
  const int parts = Whole ? __builtin_ctzll(u64(block / kUnit)) : 0;   // units of a block, as a power of two
  const u32 key_low = u32(key), key_high = u32(key >> 32);
  const bool by_maximum = Levels::by_maximum || q.scale == Scale::max;
  const bool packed = bits == 4 || (bits == 8 && Whole);
  const auto size_of = [&](i64 first) { const i64 rest = blocks - first; return rest < 0 ? 0 : rest < most ? rest : most; };
  const auto find_largest = [&](i64 at, i64 u, i32* of_blocks) {
    at += u * kUnit;
    largest_of_unit<Residual, Whole>(from + at, left + (Residual ? at : 0), block, of_blocks + (u >> parts) * several);
  };
  if (by_maximum)
    for (i64 b = 0; b < 2; ++b)
      for (i64 u = 0; u < size_of(b * most) * block / kUnit; ++u) find_largest(b * stride, u, largest[b]);
  if (!bound_batch<Levels, Residual>(from, left, size_of(0), q, bits, largest[0], scales, cells[0])) return 0;
  i64 done = 0;
  for (int turn = 0; done < blocks; turn ^= 1) {
    const i64 batch = size_of(done), next = size_of(done + most), units = batch * block / kUnit;
    scales += 2 * Levels::words * batch;
    const bool good = !next || bound_batch<Levels, Residual>(from + stride, left + (Residual ? stride : 0), next, q, bits,
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
      quantise_unit<Levels, Residual, Stochastic, Pairs, Whole>(from + at, left + (Residual ? at : 0), block, hashes + 16 * u,
                                                                cells[turn], cell, bits, both);
      GW_SETTLE(both);
      const i64 to = packed && !Pairs ? at : u * (kUnit / 2);
      for (int j = 0; j < kUnit / 2; ++j) first[to + j] = u8(both[j]);
      if (!Pairs) for (int j = 0; j < kUnit / 2; ++j) second[to + j] = u8(both[j] >> 8);
      if (u < units_after) find_largest(2 * stride, u, largest[turn]);
    }
    if (!packed) {
      GW_SETTLE(buffer);
      pack_batch(first, second, block, batch, bits, Levels::ternary, out);
    }
    counter += u32(64 * units);
    from += stride;
    left += Residual ? stride : 0;
    out += batch * code_bytes(block, block, bits, Levels::ternary);
    if (q.summing) q.summing->along(*q.summing, out);
    done += batch;
    if (!good) break;
  }
  return done;
}

// Blocks to encode: everything but their values.
struct Task {
  i64 blocks;
  const Quantiser& q;
  int bits;
  u64 key;
  u32 counter;
  u8 *scales, *out;
};

template <class Levels, bool Residual, bool Stochastic, int Kind>
static i64 encode_kind(const float* from, float* left, const Task& t) {
  if (Levels::nibbles && t.bits <= 4)
    return encode_batches<Levels, Residual, Stochastic, Levels::nibbles, Kind>(from, left, t.blocks, t.q, t.bits, t.key,
                                                                               t.counter, t.scales, t.out);
  return encode_batches<Levels, Residual, Stochastic, false, Kind>(from, left, t.blocks, t.q, t.bits, t.key, t.counter, t.scales,
                                                                   t.out);
}

template <class Levels, bool Residual, bool Stochastic>
static i64 encode_rounded(const float* from, float* left, const Task& t) {
  constexpr int usual = Levels::usual && (Stochastic || !Levels::stochastic) ? kUsual : kLarge;  // the default is 10 % faster when its block is known
  if (t.q.block < kUnit) return encode_kind<Levels, Residual, Stochastic, Levels::small ? kSmall : kLarge>(from, left, t);
  if (t.q.block == kUnit) return encode_kind<Levels, Residual, Stochastic, usual>(from, left, t);
  return encode_kind<Levels, Residual, Stochastic, kLarge>(from, left, t);
}

template <class Levels, bool Residual>
static i64 encode_blocks(const float* from, float* left, const Task& t) {
  if (Levels::stochastic && t.q.rounding == Rounding::stochastic)
    return encode_rounded<Levels, Residual, Levels::stochastic>(from, left, t);
  return encode_rounded<Levels, Residual, !Levels::nearest>(from, left, t);
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
    for (i64 c = 0; c < batch; c += 16) Uniform<Shifted>::cells_of(scale + words * c, bits, c, cells);
    const u8* codes = in;
    if (bits != 8) {
      unpack_batch(in, block, batch, bits, !Shifted, buffer);
      GW_SETTLE(buffer);
      codes = buffer;
    }
    for (i64 c = 0; c < batch << chunks; ++c, codes += chunk, to += chunk) {
      const float step = cells.step[c >> chunks], base = Shifted ? cells.base[c >> chunks] : 0.0f;
      if (chunk == 128) dequantise<T, Add, Shifted, 128>(codes, step, base, zero, to);
      else if (chunk == 64) dequantise<T, Add, Shifted, 64>(codes, step, base, zero, to);
      else dequantise<T, Add, Shifted, 32>(codes, step, base, zero, to);
    }
    in += batch * code_bytes(block, block, bits, !Shifted);
    blocks -= batch;
  }
}
