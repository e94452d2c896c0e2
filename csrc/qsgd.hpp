// QSGD, block by block: load, bound, quantise, pack. Included inside a level's namespace.
// The meaning is src/gradwire/kernels/reference/qsgd.py; this file only has to give the same bytes.

// How a block's values map to codes. Codes are found in fixed point with 16 fractional bits:
//   code = (int((x - base) * inverse + origin) + u) >> 16, u uniform in 0..65535 (or 32768 to round to nearest)
//   value = base + (code - zero) * step
// `inverse` is 2^-22 short of the exact quotient, so that no rounding error can lift a code over the largest one.
struct Grid {
  bool finite;
  float inverse, origin, base, step;
  i32 zero;
};

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
static i64 encode_block(const float* v, i64 n, const Grid& g, bool stochastic, bool shifted, int bits, i64 block, u64 key,
                        u32 counter, u8* out, float* left) {
  alignas(64) u8 codes[kMaxBlock];
  alignas(64) float lost[Residual ? kMaxBlock : 1];
  const i64 packed = (n + 7) / 8 * 8, nbytes = code_bytes(n, block, bits, !shifted);
  if (!g.finite) {
    __builtin_memset(out, 0, size_t(nbytes));
    return nbytes;
  }
  quantise<Residual>(v, packed / 2, stochastic, shifted, g, key, counter, codes, lost);
  for (i64 i = n; i < packed; ++i) codes[i] = 0;
  GW_SETTLE(codes);
  if (in_base_3(n, block, bits, !shifted)) pack_base_3(codes, n, out);
  else pack(codes, packed, bits, out);
  if (Residual) __builtin_memcpy(left, lost, size_t(n) * sizeof(float));
  return nbytes;
}

#include "levels.hpp"
#include "batch.hpp"

// How runs.hpp encodes uniform levels.
template <bool Shifted>
struct UniformCodec {
  static constexpr i64 words = Shifted ? 2 : 1;
  static constexpr int bits = 0;  // the segment's
  static constexpr bool ternary = !Shifted;

  static bool fast(const Quantiser& q) { return batches(q.block); }

  template <bool Residual>
  static GW_INLINE_MEMBER i64 several(const float* from, float* left, const Task& task) {
    return encode_blocks<Uniform<Shifted>, Residual>(from, left, task);
  }

  template <bool Residual>
  static GW_INLINE_MEMBER i64 one(const float* v, i64 n, const Task& t, float* left) {
    u16 scale[2] = {};
    const bool finite = find_scale<false>(t.q.scale, v, nullptr, n, scale);
    __builtin_memcpy(t.scales, scale, size_t(2 * words));
    const Grid g = make_grid(t.q.scale, t.bits, finite, scale);
    return encode_block<Residual>(v, n, g, t.q.rounding == Rounding::stochastic, Shifted, t.bits, t.q.block, t.key, t.counter,
                                  t.out, left);
  }
};

// A block of n values. Returns the code bytes read.
template <class T, bool Add>
static i64 decode_block(const u8* scales, const u8* in, T* __restrict to, i64 n, const Quantiser& q, int bits) {
  alignas(64) u8 codes[kMaxBlock];
  const i64 packed = (n + 7) / 8 * 8;
  const bool shifted = q.scale == Scale::minmax;
  u16 scale[2];
  __builtin_memcpy(scale, scales, shifted ? 4 : 2);
  const Grid g = make_grid(q.scale, bits, true, scale);
  if (in_base_3(n, q.block, bits, !shifted)) unpack_blocks_base_3<0>(in, n, 1, codes);
  else unpack(in, packed, bits, codes);
  GW_SETTLE(codes);
  for (i64 i = 0; i < n; ++i) {
    const float value = code_value(codes[i], shifted, g);
    from_float(Add ? to_float(to[i]) + value : value, to[i]);
  }
  return code_bytes(n, q.block, bits, !shifted);
}

// Moves `scales` and `in` on.
template <class T, bool Add>
static void decode_run(const u8*& scales, const u8*& in, T* to, i64 numel, const Quantiser& q, int bits) {
  const bool shifted = q.scale == Scale::minmax;
  const i64 scale_bytes = shifted ? 4 : 2, blocks = batches(q.block) ? numel / q.block : 0;
  if (shifted) decode_batches<T, Add, true>(scales, in, to, blocks, q.block, bits);
  else decode_batches<T, Add, false>(scales, in, to, blocks, q.block, bits);
  scales += scale_bytes * blocks;
  in += blocks * code_bytes(q.block, q.block, bits, !shifted);
  for (i64 at = blocks * q.block; at < numel; at += q.block, scales += scale_bytes) {
    const i64 n = numel - at < q.block ? numel - at : q.block;
    in += decode_block<T, Add>(scales, in, to + at, n, q, bits);
  }
}

template <class T, bool Add>
static void decode_segments(const u8* payload, T* dst, const Segment* segments, i64 count, const Quantiser& q) {
  const u8* scales = payload;
  const u8* in = payload + payload_size(segments, count, q).scales;
  for (i64 s = 0; s < count; ++s)
    decode_run<T, Add>(scales, in, dst + segments[s].offset, segments[s].numel, q, int(segments[s].bits));
}
