// FP8 with a scale a block. Included inside a level's namespace. The meaning is src/gradwire/kernels/reference/fp8.py.

// A block whose largest magnitude is below this counts as zero: its factor would overflow.
constexpr float kTinyFp8 = 0x1p-110f;

// e4m3 (3 bits of mantissa) or e5m2 (2); codes are the formats' own.
template <int Mantissa>
struct Fp8 {
  static constexpr int kBias = Mantissa == 3 ? 7 : 15, kShift = 23 - Mantissa;
  static constexpr float kLargest = Mantissa == 3 ? 448.0f : 57344.0f;
  static constexpr int bits = 8, size_bits = 8;

  void begin(const Segment&, const Stream&) {}

  u16 scale_of(const float*, i64, i32 largest) const {
    const float bound = float_of(u32(largest));
    return bound >= kTinyFp8 ? bf16_up(bound) : u16(0);
  }

  static GW_INLINE_MEMBER float value(u32 code) {
    // the exponent is moved by a multiplication, which is exact and makes subnormals normal
    const float magnitude = float_of((code & 0x7fu) << kShift) * float_of(u32(254 - kBias) << 23);
    return float_of(bits_of(magnitude) | ((code & 0x80u) << 24));
  }

  // |x| exceeds the largest number by rounding errors at most, which are rounded off: nothing need be cut.
  static GW_INLINE_MEMBER u32 code_of(float x) {
    constexpr u32 smallest_normal = u32(128 - kBias) << 23;
    const u32 b = bits_of(x), magnitude = b & 0x7fffffffu;
    constexpr u32 less_than_half = (1u << (kShift - 1)) - 1u, moved = u32(127 - kBias) << 23;
    const u32 normal = (magnitude - moved + less_than_half + ((magnitude >> kShift) & 1u)) >> kShift;
    // subnormal codes: in the sum the last bit of a float is the smallest of the format, so that the addition rounds
    constexpr u32 aligning = u32(128 - kBias - Mantissa + 23) << 23;
    const u32 subnormal = bits_of(float_of(magnitude) + float_of(aligning)) - aligning;
    return (magnitude < smallest_normal ? subnormal : normal) | ((b >> 24) & 0x80u);
  }

  template <bool Residual>
  static GW_INLINE_MEMBER void run(const float* __restrict v, i64 count, float factor, float unit, u32* __restrict wide,
                                   float* __restrict left) {
    for (i64 i = 0; i < count; ++i) {
      wide[i] = code_of(v[i] * factor);
      if (Residual) left[i] = v[i] - value(wide[i]) * unit;
    }
  }

  template <bool Residual>
  GW_INLINE_MEMBER void encode(const float* __restrict v, i64 n, u16 raw, u32, u8* __restrict out, float* __restrict left) const {
    alignas(64) u32 wide[64];
    const float scale = bf16_value(raw), factor = kLargest / scale, unit = scale / kLargest;
    i64 i = 0;
    for (; i + 64 <= n; i += 64) {
      run<Residual>(v + i, 64, factor, unit, wide, left + (Residual ? i : 0));
      GW_SETTLE(wide);
      for (int j = 0; j < 64; ++j) out[i + j] = u8(wide[j]);
    }
    if (i < n) run<Residual>(v + i, n - i, factor, unit, wide, left + (Residual ? i : 0));
    for (i64 j = 0; j < n - i; ++j) out[i + j] = u8(wide[j]);
    for (i64 j = n; j < (n + 7) / 8 * 8; ++j) out[j] = 0;
  }

  template <class T, bool Add>
  GW_INLINE_MEMBER void decode(const u8* __restrict in, i64 n, u16 raw, T* __restrict to) const {
    const float unit = bf16_value(raw) / kLargest;
    i64 i = 0;
    for (; i + 64 <= n; i += 64) {
      for (int line = 0; line < 64; line += 16) __builtin_prefetch(to + i + kAhead + line, 1);
      for (i64 j = i; j < i + 64; ++j) {
        const float sent = value(in[j]) * unit;
        from_float(Add ? to_float(to[j]) + sent : sent, to[j]);
      }
    }
    for (; i < n; ++i) {
      const float sent = value(in[i]) * unit;
      from_float(Add ? to_float(to[i]) + sent : sent, to[i]);
    }
  }
};
