// Powers of two with a sign: natural compression, and QSGD's exponential levels, which are powers of two times the scale.
// Included inside a level's namespace. The meaning is src/gradwire/kernels/reference/floats.py.

// What a block's codes stand for: code 0 is zero, code e is 2^(e + offset - 127) * unit, up to `limit` * unit. Below the
// power with the biased exponent `lowest`, whose value is `floor`, there is only zero.
struct PowerGrid {
  float inverse, unit, limit, floor;
  i32 lowest, offset;
};

template <bool Natural>
struct Powers {
  static constexpr int size_bits = Natural ? 8 : 0;
  Scale scale = Scale::max;
  bool stochastic = true;
  int bits = 8;
  u32 key_low = 0, key_high = 0;

  void begin(const Segment& segment, const Stream& stream) {
    const u64 key = stream_key(stream, segment.key);
    key_low = u32(key), key_high = u32(key >> 32);
    if (!Natural) bits = int(segment.bits);
  }

  u16 scale_of(const float* v, i64 n, i32 largest) const {
    if (Natural) return u32(largest) >= kTinyBits ? u16((u32(largest) + 0x7fffffu) >> 23 << 7) : u16(0);
    u16 found[2];
    find_scale<float, false>(scale, v, nullptr, n, found);
    return found[0];
  }

  PowerGrid grid_of(u16 raw) const {
    const i32 exponent = (raw >> 7) & 0xff;
    if (Natural) {
      const i32 lowest = exponent - 126 > 1 ? exponent - 126 : 1;
      const float unit = exponent == 255 ? float_of(0x7fc00000u) : 1.0f;
      return {1.0f, unit, float_of(u32(exponent) << 23), float_of(u32(lowest) << 23), lowest, exponent - 127};
    }
    const i32 levels = (1 << (bits - 1)) - 1, last = 128 - levels;
    // 134 - exponent: what would be below kTiny
    const i32 lowest = last > 134 - exponent ? last : 134 - exponent;
    const float bound = bf16_value(raw);
    return {1.0f / bound, bound, 1.0f, float_of(u32(lowest) << 23), lowest, 127 - levels};
  }

  static GW_INLINE_MEMBER float value(u32 code, const PowerGrid& g, int sign_bit) {
    const i32 magnitude = i32(code & ((1u << sign_bit) - 1u)), power = magnitude + g.offset;
    const float size = float_of(magnitude && power > 0 ? u32(power) << 23 : 0u) * g.unit;
    return float_of(bits_of(size) ^ ((code >> sign_bit) << 31));
  }

  // u: 16 random bits
  static GW_INLINE_MEMBER u32 code_of(float x, u32 u, const PowerGrid& g, int sign_bit) {
    const u32 b = bits_of(x);
    float size = float_of(b & 0x7fffffffu);
    if (!Natural) {
      size = size * g.inverse;
      size = size < g.limit ? size : g.limit;
    }
    // a carry out of the mantissa is the next power of two; below the lowest the mantissa of size + floor is size / floor
    const bool below = size < g.floor;
    const u32 mantissa = bits_of(below ? size + g.floor : size);
    const i32 power = i32((mantissa + (u << 7)) >> 23) - i32(below);
    return u32(power >= g.lowest ? power - g.offset : 0) | ((b >> 31) << sign_bit);
  }

  // 16 pairs of values or fewer, which share words of one random group.
  template <bool Residual>
  static GW_INLINE_MEMBER void run(const float* __restrict x, const float* __restrict y, i64 count, const u32* __restrict hashes,
                                   u32 group, u32 mask, const PowerGrid g, int sign_bit, u32* __restrict first,
                                   u32* __restrict second, float* x_left, float* y_left) {
    const u32 multiply = kMultiply[group], add = kAdd[group], fold = group ? mask : 0u, rest = mask ? 0u : 0x80008000u;
    const u32 once = group ? multiply : 1u;
#pragma GCC ivdep
    for (i64 l = 0; l < count; ++l) {
      const u32 linear = hashes[l] * once + add;
      const u32 word = ((linear ^ ((linear >> 16) & fold)) & mask) | rest;
      first[l] = code_of(x[l], word & 0xffffu, g, sign_bit);
      second[l] = code_of(y[l], word >> 16, g, sign_bit);
      if (Residual) {
        x_left[l] = x[l] - value(first[l], g, sign_bit);
        y_left[l] = y[l] - value(second[l], g, sign_bit);
      }
    }
  }

  template <bool Residual>
  void encode(const float* v, i64 n, u16 raw, u32 counter, u8* out, float* left) const {
    alignas(64) u8 codes[Natural ? 1 : kMaxBlock];
    alignas(64) float lost[Residual ? kMaxBlock : 1];
    alignas(64) u32 first[64], second[64], hashes[16];
    u8* const to = Natural ? out : codes;
    const i64 packed = (n + 7) / 8 * 8, half = packed / 2;
    const PowerGrid g = grid_of(raw);
    const u32 mask = stochastic ? 0xffffffffu : 0u;
    float* const lose = Residual ? (packed == n ? left : lost) : lost;  // the last block's padding has no residual
    for (i64 j = 0; j < half; j += 64) {
      const i64 pairs = half - j < 64 ? half - j : 64;
      for (i64 from = 0; from < pairs; from += 16) {
        const i64 count = pairs - from < 16 ? pairs - from : 16, x = j + from, y = x + half;
        const u32 at = counter + u32(x), group = at / 16 % 4;
        if (from == 0 || group == 0)
          for (u32 l = 0; l < 16; ++l) hashes[l] = random_hash(at - 16 * group + l, key_low, key_high);
        GW_SETTLE(hashes);
        if (count == 16)
          run<Residual>(v + x, v + y, 16, hashes, group, mask, g, bits - 1, first + from, second + from, lose + (Residual ? x : 0),
                        lose + (Residual ? y : 0));
        else
          run<Residual>(v + x, v + y, count, hashes, group, mask, g, bits - 1, first + from, second + from,
                        lose + (Residual ? x : 0), lose + (Residual ? y : 0));
      }
      GW_SETTLE(first);
      GW_SETTLE(second);
      if (pairs == 64) {
        for (int l = 0; l < 64; ++l) to[j + l] = u8(first[l]);
        for (int l = 0; l < 64; ++l) to[j + half + l] = u8(second[l]);
      } else {
        for (i64 l = 0; l < pairs; ++l) to[j + l] = u8(first[l]), to[j + half + l] = u8(second[l]);
      }
    }
    if (Residual && lose != left) __builtin_memcpy(left, lost, size_t(n) * sizeof(float));
    for (i64 i = n; i < packed; ++i) to[i] = 0;
    if (Natural) return;
    GW_SETTLE(codes);
    pack(codes, packed, bits, out);
  }

  template <class T, bool Add>
  void decode(const u8* __restrict in, i64 n, u16 raw, T* __restrict to) const {
    alignas(64) u8 unpacked[Natural ? 1 : kMaxBlock];
    const u8* __restrict codes = in;
    const PowerGrid g = grid_of(raw);
    const int sign_bit = Natural ? 7 : bits - 1;
    if (!Natural) {
      unpack(in, (n + 7) / 8 * 8, bits, unpacked);
      GW_SETTLE(unpacked);
      codes = unpacked;
    }
    i64 i = 0;
    for (; i + 64 <= n; i += 64) {
      for (int line = 0; line < 64; line += 16) __builtin_prefetch(to + i + kAhead + line, 1);
      for (i64 j = i; j < i + 64; ++j) {
        const float sent = value(codes[j], g, sign_bit);
        from_float(Add ? to_float(to[j]) + sent : sent, to[j]);
      }
    }
    for (; i < n; ++i) {
      const float sent = value(codes[i], g, sign_bit);
      from_float(Add ? to_float(to[i]) + sent : sent, to[i]);
    }
  }
};
