// FP8 with a scale a block. Included inside a level's namespace. The meaning is src/gradwire/kernels/reference/fp8.py.

// e4m3 (3 bits of mantissa) or e5m2 (2); codes are the formats' own.
template <int Mantissa>
struct Fp8Levels {
  static constexpr i64 words = 1;
  static constexpr bool nibbles = false, stochastic = false, nearest = true, small = true, usual = true, by_maximum = true,
                        ternary = false;
  static constexpr int bits = 8;
  static constexpr int kBias = Mantissa == 3 ? 7 : 15, kShift = 23 - Mantissa;
  static constexpr float kLargest = Mantissa == 3 ? 448.0f : 57344.0f;
  static constexpr u32 kTinyFp8 = u32(127 - 110) << 23;  // a smaller block counts as zero: its factor would overflow

  static GW_INLINE_MEMBER u32 bound(u32 largest) { return bound_as_bf16(largest, kTinyFp8); }

  static GW_INLINE_MEMBER bool find(Scale, const float* v, i64 n, u16* scale) { return find_by_maximum<Fp8Levels>(v, n, scale); }

  static GW_INLINE_MEMBER void cells_of(const u32* __restrict scale, int, i64 at, Cells& cells) {
    float* __restrict inverse = cells.inverse + at;
    float* __restrict step = cells.step + at;
GW_ROLLED
    for (int c = 0; c < 16; ++c) {
      const float largest = float_of(scale[c] << 16), quotient = kLargest / largest;
      inverse[c] = largest > 0.0f ? quotient : 0.0f;
      step[c] = largest / kLargest;
    }
  }

  struct Cell {
    float inverse, step;
    u32 mask;

    GW_INLINE_MEMBER Cell(const Cells& cells, i64 at, int)
        : inverse(cells.inverse[at]), step(cells.step[at]), mask(inverse > 0.0f ? ~0u : 0u) {}

    // Adding a power of two whose last bit is the code's last makes the addition round; below the smallest normal number
    // that is the smallest subnormal. |x| exceeds the largest number by rounding errors at most, which are rounded off:
    // nothing need be cut.
    GW_INLINE_MEMBER Coded one(float x, u32) const {
      constexpr u32 smallest_normal = u32(128 - kBias) << 23, moved = u32(kShift) << 23;
      const u32 b = bits_of(x * inverse), exponent = b & kInfBits;
      const u32 power = exponent > smallest_normal ? exponent : smallest_normal;
      const float sum = float_of(b & 0x7fffffffu) + float_of(power + moved);
      const u32 code = bits_of(sum) - power + (power >> kShift) - (moved + (smallest_normal >> kShift));
      return {code | ((b >> 24) & 0x80u), float_of(bits_of(sum - float_of(power + moved)) | (b & 0x80000000u))};
    }
  };

  struct Value {
    float step;

    GW_INLINE_MEMBER Value(u16 raw, int) : step(bf16_value(raw) / kLargest) {}

    GW_INLINE_MEMBER float of(u32 code) const {
      // as in to_float(f16)
      constexpr u32 smallest_normal = u32(128 - kBias) << 23;
      const u32 fraction = (code & 0x7fu) << kShift, normal = fraction + (u32(127 - kBias) << 23);
      const u32 subnormal = bits_of(float_of(smallest_normal | fraction) - float_of(smallest_normal));
      const u32 magnitude = (fraction >> 23) ? normal : subnormal;
      return float_of(magnitude | ((code & 0x80u) << 24)) * step;
    }
  };
};

template <int Mantissa>
using Fp8 = OneByOne<Fp8Levels<Mantissa>>;
