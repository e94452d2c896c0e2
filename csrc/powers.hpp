// Powers of two with a sign: natural compression, and QSGD's exponential levels, which are powers of two times the scale.
// Included inside a level's namespace. The meaning is src/gradwire/kernels/reference/powers.py.

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
    // 134 - exponent: what would be below 2^-120
    const i32 lowest = last > 134 - exponent ? last : 134 - exponent;
    const float bound = bf16_value(raw);
    return {1.0f / bound, bound, 1.0f, float_of(u32(lowest) << 23), lowest, 127 - levels};
  }

  static GW_INLINE_MEMBER float value(u32 code, const PowerGrid& g, int sign_bit) {
    const i32 magnitude = i32(code & ((1u << sign_bit) - 1u)), power = magnitude + g.offset;
    const float size = float_of(magnitude && power > 0 ? u32(power) << 23 : 0u) * g.unit;
    return float_of(bits_of(size) ^ ((code >> sign_bit) << 31));
  }

  // u: 16 random bits, as the upper ones of a mantissa
  static GW_INLINE_MEMBER u32 code_of(float x, u32 u, const PowerGrid& g, int sign_bit) {
    const u32 b = bits_of(x);
    float size = float_of(b & 0x7fffffffu);
    if (!Natural) {
      size = size * g.inverse;
      size = size < g.limit ? size : g.limit;
    }
    // a carry out of the mantissa is the next power of two; below the lowest the mantissa of size + floor is size / floor
    const bool below = size < g.floor;
    const u32 mantissa = below ? bits_of(size + g.floor) - (1u << 23) : bits_of(size);
    const i32 power = i32((mantissa + u) >> 23);
    return u32(power >= g.lowest ? power - g.offset : 0) | ((b >> (31 - sign_bit)) & (1u << sign_bit));
  }

  // 16 pairs of values, or `count`, x[l] and x[l + half], which share words of one random group; two codes to an element
  // of `both`.
  template <bool Residual, int Group>
  GW_INLINE_MEMBER void run(const float* x, i64 half, i64 count, const u32* __restrict hashes, const PowerGrid& grid,
                            u32* __restrict both, float* left) const {
    const PowerGrid g = grid;
    const int sign_bit = Natural ? 7 : bits - 1;
    const bool random = Natural || stochastic;
    const float* const y = x + half;
    float* const y_left = left + (Residual ? half : 0);
#pragma GCC ivdep
    for (i64 l = 0; l < count; ++l) {
      const u32 word = random ? random_fold(hashes[l], Group) : 0x80008000u;
      const float p = x[l], q = y[l];
      const u32 first = code_of(p, (word << 7) & 0x7fff80u, g, sign_bit);
      const u32 second = code_of(q, (word >> 9) & 0x7fff80u, g, sign_bit);
      both[l] = first | (second << 8);
      if (Residual) {
        left[l] = p - value(first, g, sign_bit);
        y_left[l] = q - value(second, g, sign_bit);
      }
    }
  }

  template <bool Residual>
  GW_INLINE_MEMBER void run_any(u32 group, const float* x, i64 half, i64 count, const u32* hashes, const PowerGrid& g, u32* both,
                                float* left) const {
    if (group == 0) run<Residual, 0>(x, half, count, hashes, g, both, left);
    else if (group == 1) run<Residual, 1>(x, half, count, hashes, g, both, left);
    else if (group == 2) run<Residual, 2>(x, half, count, hashes, g, both, left);
    else run<Residual, 3>(x, half, count, hashes, g, both, left);
  }

  // Codes of a block of n values, which v holds padded to `packed`, one to a byte.
  template <bool Residual>
  GW_INLINE_MEMBER void quantise(const float* v, i64 packed, const PowerGrid& g, u32 counter, u8* codes, float* left) const {
    alignas(64) u32 both[64], hashes[16];
    const i64 half = packed / 2;
    i64 j = 0;
    if (counter % 64 == 0) {
      for (; j + 64 <= half; j += 64) {
GW_ROLLED
        for (u32 l = 0; l < 16; ++l) hashes[l] = random_hash(counter + u32(j) + l, key_low, key_high);
        GW_SETTLE(hashes);
        float* const at = left + (Residual ? j : 0);
        run<Residual, 0>(v + j, half, 16, hashes, g, both, at);
        run<Residual, 1>(v + j + 16, half, 16, hashes, g, both + 16, at + (Residual ? 16 : 0));
        run<Residual, 2>(v + j + 32, half, 16, hashes, g, both + 32, at + (Residual ? 32 : 0));
        run<Residual, 3>(v + j + 48, half, 16, hashes, g, both + 48, at + (Residual ? 48 : 0));
        GW_SETTLE(both);
        for (int l = 0; l < 64; ++l) codes[j + l] = u8(both[l]);
        for (int l = 0; l < 64; ++l) codes[j + half + l] = u8(both[l] >> 8);
      }
    }
    for (; j < half; j += 16) {
      const i64 count = half - j < 16 ? half - j : 16;
      const u32 at = counter + u32(j), group = at / 16 % 4;
      for (u32 l = 0; l < 16; ++l) hashes[l] = random_hash(at - 16 * group + l, key_low, key_high);
      run_any<Residual>(group, v + j, half, count, hashes, g, both, left + (Residual ? j : 0));
      GW_SETTLE(both);
      for (i64 l = 0; l < count; ++l) codes[j + l] = u8(both[l]), codes[j + half + l] = u8(both[l] >> 8);
    }
  }

  template <bool Residual>
  void encode(const float* v, i64 n, u16 raw, u32 counter, u8* out, float* left) const {
    alignas(64) u8 codes[Natural ? 1 : kMaxBlock];
    const i64 packed = (n + 7) / 8 * 8;
    const PowerGrid g = grid_of(raw);
    u8* const to = Natural ? out : codes;
    if (Residual && packed != n) {  // the padding has no residual
      alignas(64) float lost[kMaxBlock];
      quantise<Residual>(v, packed, g, counter, to, lost);
      __builtin_memcpy(left, lost, size_t(n) * sizeof(float));
    } else {
      quantise<Residual>(v, packed, g, counter, to, left);
    }
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
