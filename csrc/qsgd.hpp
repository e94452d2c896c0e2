// QSGD, block by block: load, bound, quantise, pack. Included inside a level's namespace.
// The meaning is src/gradwire/kernels/reference.py; this file only has to give the same bytes.

// Below kTiny a block's range counts as zero: 2^24 times its reciprocal would overflow. From kHuge on its values count as not
// finite: the range or the rounded scale would overflow.
constexpr float kTiny = 0x1p-100f;
constexpr u32 kHuge = 0x7e800000u;  // bits of 2^126

// How a block's values map to codes. Codes are found in fixed point with 16 fractional bits:
//   code = (int((x - base) * inverse + origin) + u) >> 16, u uniform in 0..65535 (or 32768 to round to nearest)
//   value = base + (code - zero) * step
// `inverse` is 2^-22 short of the exact quotient, so that no rounding error can lift a code over the largest one.
struct Grid {
  bool finite;
  float inverse, origin, base, step;
  i32 zero;
};

constexpr float kShort = 1.0f - 0x1p-22f;

GW_INLINE Grid make_grid(Scale kind, int bits, bool finite, const u16* scale) {
  Grid g;
  if (kind == Scale::minmax) {
    const float low = bf16_value(scale[0]), range = bf16_value(scale[1]) - low, top = float((1 << bits) - 1);
    g = {finite, range >= kTiny ? top * (0x1p16f * kShort) / range : 0.0f, 0.0f, low, range / top, 0};
  } else {
    const i32 levels = (1 << (bits - 1)) - 1;
    const float bound = bf16_value(scale[0]);
    g = {finite, bound >= kTiny ? float(levels) * (0x1p16f * kShort) / bound : 0.0f, float(levels) * 0x1p16f, 0.0f,
         bound / float(levels), levels};
  }
  return g;
}

// The scale of n values. A block that holds a NaN or an Inf (or a value of 2^126 or more) gets
// a NaN scale: it decodes to NaN throughout, so nothing non-finite ever becomes a finite number.
GW_INLINE bool find_scale(Scale kind, const float* __restrict v, i64 n, u16* scale) {
  i32 largest = 0;
  for (i64 i = 0; i < n; ++i) {
    const i32 magnitude = i32(bits_of(v[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool finite = u32(largest) < kHuge;
  if (!finite) {
    scale[0] = 0x7fc0u;
    if (kind == Scale::minmax) scale[1] = 0x7fc0u;
    return false;
  }
  if (kind == Scale::max) {
    const float bound = float_of(u32(largest));
    scale[0] = bound >= kTiny ? bf16_up(bound) : u16(0);
  } else if (kind == Scale::l2) {
    double lane[16] = {};
    for (i64 i = 0; i < n / 16 * 16; i += 16)
      for (int j = 0; j < 16; ++j) lane[j] += double(v[i + j]) * double(v[i + j]);
    for (i64 i = n / 16 * 16; i < n; ++i) lane[i % 16] += double(v[i]) * double(v[i]);
    for (int width = 8; width > 0; width /= 2)
      for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    const double norm = __builtin_sqrt(lane[0]);
    const float bound = norm < 0x1.fep127 ? float(norm) : 0x1.fep127f;
    scale[0] = bound >= kTiny ? bf16_up(bound) : u16(0);
  } else {
    // the order of floats as integers: flip the magnitude bits of negatives
    i32 low = 0x7fffffff, high = -0x7fffffff - 1;
    for (i64 i = 0; i < n; ++i) {
      const i32 b = i32(bits_of(v[i]));
      const i32 ordered = b ^ ((b >> 31) & 0x7fffffff);
      low = ordered < low ? ordered : low;
      high = ordered > high ? ordered : high;
    }
    scale[0] = bf16_towards(float_of(u32(low ^ ((low >> 31) & 0x7fffffff))), false);
    scale[1] = bf16_towards(float_of(u32(high ^ ((high >> 31) & 0x7fffffff))), true);
  }
  return true;
}

GW_INLINE float code_value(i32 code, bool shifted, const Grid& g) {
  const float x = float(code - g.zero) * g.step;
  return shifted ? x + g.base : x;
}

// `count` pairs of values (x[l], y[l]) to codes, one to a byte, and what they lost. All share a random group.
template <bool Residual>
GW_INLINE void quantise_run(const float* __restrict x, const float* __restrict y, i64 count, bool stochastic, bool shifted,
                            const Grid& grid, u64 key, u32 counter, u8* __restrict first, u8* __restrict second,
                            float* __restrict first_lost, float* __restrict second_lost) {
  const Grid g = grid;
  const u32 key_low = u32(key), key_high = u32(key >> 32);
  const u32 mask = stochastic ? 0xffffu : 0u, rest = stochastic ? 0u : 0x8000u;
  const u32 group = counter / 16 % 4, base = counter - 16 * group;
  const u32 multiply = kMultiply[group], add = kAdd[group], fold = group ? 0xffffffffu : 0u;
  const float from = shifted ? g.base : 0.0f;  // x - 0 is x
  for (i64 l = 0; l < count; ++l) {
    const u32 linear = random_hash(base + u32(l), key_low, key_high) * multiply + add;
    const u32 word = linear ^ ((linear >> 16) & fold);
    const i32 a = (i32((x[l] - from) * g.inverse + g.origin) + i32((word & mask) | rest)) >> 16;
    const i32 b = (i32((y[l] - from) * g.inverse + g.origin) + i32(((word >> 16) & mask) | rest)) >> 16;
    first[l] = u8(a);
    second[l] = u8(b);
    if (Residual) {
      first_lost[l] = x[l] - code_value(a, shifted, g);
      second_lost[l] = y[l] - code_value(b, shifted, g);
    }
  }
}

// 2 * half values to codes; with Residual also what the codes lost. The counter is a multiple of 16.
template <bool Residual>
GW_INLINE void quantise(const float* v, i64 half, bool stochastic, bool shifted, const Grid& g, u64 key, u32 counter,
                        u8* codes, float* lost) {
  i64 j = 0;
  for (; j + 16 <= half; j += 16)
    quantise_run<Residual>(v + j, v + j + half, 16, stochastic, shifted, g, key, counter + u32(j), codes + j,
                           codes + j + half, lost + j, lost + j + half);
  if (j < half)
    quantise_run<Residual>(v + j, v + j + half, half - j, stochastic, shifted, g, key, counter + u32(j), codes + j,
                           codes + j + half, lost + j, lost + j + half);
}

// A block of n values (v is padded with zeros to a multiple of 8); returns the bytes written. A block that could not be
// sent keeps the residual it had: one bad step must not poison the next.
template <bool Residual>
static i64 encode_block(const float* v, i64 n, const Grid& g, bool stochastic, bool shifted, int bits, u64 key,
                        u32 counter, u8* out, float* left) {
  alignas(64) u8 codes[kMaxBlock];
  alignas(64) float lost[Residual ? kMaxBlock : 1];
  const i64 packed = (n + 7) / 8 * 8;
  if (!g.finite) {
    __builtin_memset(out, 0, size_t(packed / 8 * bits));
    return packed / 8 * bits;
  }
  quantise<Residual>(v, packed / 2, stochastic, shifted, g, key, counter, codes, lost);
  for (i64 i = n; i < packed; ++i) codes[i] = 0;
  GW_SETTLE(codes);
  pack(codes, packed, bits, out);
  if (Residual) __builtin_memcpy(left, lost, size_t(n) * sizeof(float));
  return packed / 8 * bits;
}

// The usual case, whole blocks of 128 by their maximum in 4 bits with stochastic rounding, at the speed of memory. The
// scales and the hashes of a batch come first: a block's own are long chains of dependent instructions. Values are
// computed twice rather than kept: the maxima of the next batch are found between the blocks of this one, so that their
// way from memory hides behind arithmetic. Returns how many blocks it wrote: all, or those before a batch that holds
// something not finite.
constexpr i64 kAhead = 1024;  // elements that decoding prefetches ahead
constexpr i64 kUsualBlock = 128, kUsualBatch = 8, kUsualAhead = 3 * kUsualBatch * kUsualBlock;  // the last: elements prefetched ahead

template <class T, bool Residual>
GW_INLINE i32 largest_of_block(const T* __restrict from, const float* __restrict left) {
  i32 most = 0;
  for (i64 i = 0; i < kUsualBlock; ++i) {
    const float v = Residual ? to_float(from[i]) + left[i] : to_float(from[i]);
    const i32 magnitude = i32(bits_of(v) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

template <class T, bool Residual>
static i64 encode_usual(const T* __restrict from, float* __restrict left, i64 blocks, u64 key, u32 counter,
                        u8* __restrict scales, u8* __restrict out) {
  constexpr float levels = 7.0f;
  constexpr i64 next_batch = Residual ? kUsualBatch * kUsualBlock : 0;
  alignas(64) i32 largest[kUsualBatch] = {};
  alignas(64) u16 raw[kUsualBatch];
  alignas(64) float inverse[kUsualBatch], step[kUsualBatch];
  const u32 key_low = u32(key), key_high = u32(key >> 32);
  i64 done = 0, batch = blocks < kUsualBatch ? blocks : kUsualBatch;
  for (i64 b = 0; b < batch; ++b)
    largest[b] = largest_of_block<T, Residual>(from + b * kUsualBlock, Residual ? left + b * kUsualBlock : left);
  while (batch) {
    i32 most = 0;
    for (i64 b = 0; b < kUsualBatch; ++b) {
      most = largest[b] > most ? largest[b] : most;
      const u32 rounded = (u32(largest[b]) + 0xffffu) >> 16, capped = rounded < 0x7f7fu ? rounded : 0x7f7fu;
      const u32 scale = float_of(u32(largest[b])) >= kTiny ? capped : 0u;
      const float bound = float_of(scale << 16);
      raw[b] = u16(scale);
      inverse[b] = bound >= kTiny ? levels * (0x1p16f * kShort) / bound : 0.0f;
      step[b] = bound / levels;
    }
    if (u32(most) >= kHuge) return done;
    __builtin_memcpy(scales + 2 * done, raw, size_t(2 * batch));
    alignas(64) u32 hashes[kUsualBatch * 16];
    for (u32 i = 0; i < kUsualBatch * 16; ++i) hashes[i] = random_hash(counter + i / 16 * 64 + i % 16, key_low, key_high);
    GW_SETTLE(hashes);
    const i64 left_over = blocks - done - batch, next = left_over < kUsualBatch ? left_over : kUsualBatch;
    for (i64 b = 0; b < batch; ++b, counter += 64, out += 64, from += kUsualBlock, left += Residual ? kUsualBlock : 0) {
      const float by = inverse[b], unit = step[b];
      for (int line = 0; line < 8; ++line) __builtin_prefetch(from + kUsualAhead + line * 16);
      if (Residual) for (int line = 0; line < 8; ++line) __builtin_prefetch(left + kUsualAhead + line * 16, 1);
      alignas(64) u32 both[64];
      for (int l = 0; l < 16; ++l) {
        const u32 hash = hashes[16 * b + l];
        for (int group = 0; group < 4; ++group) {
          const u32 word = random_fold(hash, group);
          const int j = 16 * group + l;
          const float x = Residual ? to_float(from[j]) + left[j] : to_float(from[j]);
          const float y = Residual ? to_float(from[j + 64]) + left[j + 64] : to_float(from[j + 64]);
          const u32 first = u32(i32(x * by + levels * 0x1p16f)) + (word & 0xffffu);
          const u32 second = u32(i32(y * by + levels * 0x1p16f)) + (word >> 16);
          both[j] = (first >> 16) | ((second >> 12) & 0xf0u);
          if (Residual) {
            left[j] = x - float(i32(first >> 16) - 7) * unit;
            left[j + 64] = y - float(i32(second >> 16) - 7) * unit;
          }
        }
      }
      GW_SETTLE(both);
      for (int j = 0; j < 64; ++j) out[j] = u8(both[j]);
      if (b < next)
        largest[b] = largest_of_block<T, Residual>(from + kUsualBatch * kUsualBlock, left + next_batch);
    }
    for (i64 b = next; b < kUsualBatch; ++b) largest[b] = 0;
    done += batch;
    batch = next;
  }
  return done;
}

template <class T, bool Residual>
static void encode_segments(const T* src, float* residual, const Segment* segments, i64 count, const Stream& stream,
                            const Quantiser& q, u8* payload) {
  alignas(64) float v[kMaxBlock];
  const bool stochastic = q.rounding == Rounding::stochastic, shifted = q.scale == Scale::minmax;
  u8* scales = payload;
  u8* const first_code = payload + payload_size(segments, count, q).scales;
  u8* out = first_code;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    const u64 key = stream_key(stream, seg.key);
    const int bits = int(seg.bits);
    const bool usual = q.block == kUsualBlock && bits == 4 && q.scale == Scale::max && stochastic;
    i64 at = 0, fast_until = 0;
    while (at < seg.numel) {
      const T* from = src + seg.offset + at;
      float* left = Residual ? residual + seg.offset + at : nullptr;
      const u32 counter = u32((seg.first + at) / 2);
      if (usual && at >= fast_until) {
        const i64 blocks = (seg.numel - at) / kUsualBlock;
        const i64 done = blocks ? encode_usual<T, Residual>(from, left, blocks, key, counter, scales, out) : 0;
        if (done) {
          at += done * kUsualBlock;
          scales += 2 * done;
          out += 64 * done;
          continue;
        }
        const i64 batch = blocks < kUsualBatch ? blocks : kUsualBatch;
        fast_until = at + (batch ? batch : 1) * kUsualBlock;  // block by block up to here
      }
      const i64 n = seg.numel - at < q.block ? seg.numel - at : q.block;
      for (i64 i = 0; i < n; ++i) v[i] = Residual ? to_float(from[i]) + left[i] : to_float(from[i]);
      for (i64 i = n; i < (n + 7) / 8 * 8; ++i) v[i] = 0.0f;
      u16 scale[2];
      const bool finite = find_scale(q.scale, v, n, scale);
      __builtin_memcpy(scales, scale, shifted ? 4 : 2);
      scales += shifted ? 4 : 2;
      const Grid g = make_grid(q.scale, bits, finite, scale);
      out += encode_block<Residual>(v, n, g, stochastic, shifted, bits, key, counter, out, left);
      at += n;
    }
  }
  while (scales < first_code) *scales++ = 0;
}

// One block of n values, N of them when N is known to the compiler. Returns the code bytes read.
template <class T, bool Add, int N>
GW_INLINE i64 decode_block(const u8* scales, const u8* in, T* __restrict to, i64 count, Scale kind, int bits) {
  alignas(64) u8 codes[N ? N : kMaxBlock];
  const i64 n = N ? N : count, packed = N ? N : (n + 7) / 8 * 8;
  const bool shifted = kind == Scale::minmax;
  u16 scale[2];
  __builtin_memcpy(scale, scales, shifted ? 4 : 2);
  const Grid g = make_grid(kind, bits, true, scale);
  unpack(in, packed, bits, codes);
  GW_SETTLE(codes);
  if (N) for (int line = 0; line < N; line += 16) __builtin_prefetch(to + kAhead + line, 1);
  for (i64 i = 0; i < n; ++i) {
    const float value = code_value(codes[i], shifted, g);
    from_float(Add ? to_float(to[i]) + value : value, to[i]);
  }
  return packed / 8 * bits;
}

template <class T, bool Add>
static void decode_segments(const u8* payload, T* dst, const Segment* segments, i64 count, const Quantiser& q) {
  const i64 scale_bytes = q.scale == Scale::minmax ? 4 : 2;
  const u8* scales = payload;
  const u8* in = payload + payload_size(segments, count, q).scales;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    const int bits = int(seg.bits);
    for (i64 at = 0; at < seg.numel; at += q.block, scales += scale_bytes) {
      const i64 n = seg.numel - at < q.block ? seg.numel - at : q.block;
      T* to = dst + seg.offset + at;
      if (n == 128 && bits == 4 && q.scale == Scale::max) in += decode_block<T, Add, 128>(scales, in, to, n, Scale::max, 4);
      else in += decode_block<T, Add, 0>(scales, in, to, n, q.scale, bits);
    }
  }
}
