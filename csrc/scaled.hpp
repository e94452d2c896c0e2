// Payloads of blocks with one bfloat16 scale each: what FP8, Natural and QSGD's exponential levels share. The levels say
// what a block's scale is (`bound`, `cells_of`) and how one value is coded (`one`). Included inside a level's namespace.

constexpr u16 kBadScale = 0x7fc0u;  // NaN: of a block that holds something not finite

// A value as a code, and what the code stands for in units of the block's step.
struct Coded {
  u32 code;
  float sent;
};

template <class Levels>
GW_INLINE bool find_by_maximum(const float* v, i64 n, u16* scale) {
  u32 largest = 0;
  for (i64 i = 0; i < n; ++i) largest = (bits_of(v[i]) & 0x7fffffffu) > largest ? bits_of(v[i]) & 0x7fffffffu : largest;
  scale[0] = u16(Levels::bound(largest));
  return largest < kHuge;
}

// Levels of which one value is coded at a time: see levels.hpp.
template <class Levels>
struct OneByOne : Levels {
  template <bool Residual, bool Stochastic, bool Pairs, int Group>
  static GW_INLINE_MEMBER void group(const float* x, float* left, i64 half, const u32* hashes, const Cells& cells, i64 cell,
                                     int bits, u32* both) {
    const typename Levels::Cell c(cells, cell, bits);
    const float* const y = x + half;
    float* const y_left = left + (Residual ? half : 0);
#pragma GCC ivdep
    for (int l = 0; l < 16; ++l) {
      const u32 word = Stochastic ? random_fold(hashes[l], Group) : 0x80008000u;
      const float p = Residual ? x[l] + left[l] : x[l], q = Residual ? y[l] + y_left[l] : y[l];
      const Coded a = c.one(p, (word << 7) & 0x7fff80u), b = c.one(q, (word >> 9) & 0x7fff80u);
      both[l] = (a.code | b.code << (Pairs ? 4 : 8)) & c.mask;
      if (Residual) {
        left[l] = p - a.sent * c.step;
        y_left[l] = q - b.sent * c.step;
      }
    }
  }
};

// A block that no batch takes: n values of which v has room for a multiple of 8. Returns the bytes written.
template <class Levels, bool Residual>
static i64 encode_by_itself(const float* v, i64 n, u16 raw, bool stochastic, int bits, u64 key, u32 counter, u8* out, float* left) {
  alignas(64) u8 codes[kMaxBlock];
  const i64 packed = (n + 7) / 8 * 8, half = packed / 2;
  const u32 key_low = u32(key), key_high = u32(key >> 32);
  u32 scale[16] = {raw};
  Cells cells;
  Levels::cells_of(scale, bits, 0, cells);
  const typename Levels::Cell c(cells, 0, bits);
  const auto encode = [&](i64 i, u32 u) {
    const Coded coded = c.one(v[i], u);
    codes[i] = u8(coded.code & c.mask);
    if (Residual && i < n) left[i] = v[i] - coded.sent * c.step;
  };
  for (i64 j = 0; j < half; ++j) {
    const u32 at = counter + u32(j), group = at / 16 % 4;
    const u32 word = stochastic ? random_fold(random_hash(at - 16 * group, key_low, key_high), int(group)) : 0x80008000u;
    encode(j, (word << 7) & 0x7fff80u);
    encode(j + half, (word >> 9) & 0x7fff80u);
  }
  for (i64 i = n; i < packed; ++i) codes[i] = 0;
  GW_SETTLE(codes);
  pack(codes, packed, bits, out);
  return packed / 8 * bits;
}

// How runs.hpp encodes these levels.
template <class Levels>
struct ScaledCodec {
  static constexpr i64 words = 1;
  static constexpr int bits = Levels::bits;
  static constexpr bool ternary = false;

  static bool fast(const Quantiser& q) {
    const bool stochastic = Levels::stochastic && q.rounding == Rounding::stochastic;
    return batches(q.block) && (Levels::small || q.block >= kUnit) && (Levels::nearest || stochastic);
  }

  template <bool Residual>
  static GW_INLINE_MEMBER i64 several(const float* from, float* left, const Task& task) {
    return encode_blocks<Levels, Residual>(from, left, task);
  }

  template <bool Residual>
  static GW_INLINE_MEMBER i64 one(const float* v, i64 n, const Task& t, float* left) {
    const bool stochastic = Levels::stochastic && t.q.rounding == Rounding::stochastic;
    u16 scale[2];
    const bool finite = Levels::find(t.q.scale, v, n, scale);
    __builtin_memcpy(t.scales, finite ? scale : &kBadScale, 2);
    if (finite) return encode_by_itself<Levels, Residual>(v, n, scale[0], stochastic, t.bits, t.key, t.counter, t.out, left);
    __builtin_memset(t.out, 0, size_t((n + 7) / 8 * t.bits));  // the residual stays what it was
    return (n + 7) / 8 * t.bits;
  }
};

template <class Levels, class T, bool Add>
static void scaled_decode_to(const u8* payload, T* dst, const Segment* segments, i64 count, i64 block) {
  alignas(64) u8 unpacked[kMaxBlock];
  const u8* scales = payload;
  const u8* in = payload + coded_size(segments, count, block, 1, Levels::bits).scales;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    const int bits = Levels::bits ? Levels::bits : int(seg.bits);
    for (i64 at = 0; at < seg.numel; at += block, scales += 2) {
      const i64 n = seg.numel - at < block ? seg.numel - at : block;
      T* __restrict to = dst + seg.offset + at;
      const u8* __restrict codes = in;
      if (bits != 8) {
        unpack(in, (n + 7) / 8 * 8, bits, unpacked);
        GW_SETTLE(unpacked);
        codes = unpacked;
      }
      u16 raw;
      __builtin_memcpy(&raw, scales, 2);
      const typename Levels::Value value(raw, bits);
      i64 i = 0;
      for (; i + 64 <= n; i += 64) {
        for (int line = 0; line < 64; line += 16) __builtin_prefetch(to + i + kAhead + line, 1);
        for (i64 j = i; j < i + 64; ++j) {
          const float sent = value.of(codes[j]);
          from_float(Add ? to_float(to[j]) + sent : sent, to[j]);
        }
      }
      for (; i < n; ++i) {
        const float sent = value.of(codes[i]);
        from_float(Add ? to_float(to[i]) + sent : sent, to[i]);
      }
      in += (n + 7) / 8 * bits;
    }
  }
}
