// Powers of two with a sign: natural compression, and QSGD's exponential levels, which are powers of two times the scale.
// Included inside a level's namespace. The meaning is src/gradwire/kernels/reference/powers.py.

template <bool Natural>
struct PowerLevels {
  static constexpr i64 words = 1;
  static constexpr bool nibbles = !Natural, stochastic = true, nearest = !Natural, small = false, usual = false, by_maximum = Natural,
                        ternary = false;
  static constexpr int bits = Natural ? 8 : 0;

  static GW_INLINE_MEMBER u32 bound(u32 largest) {
    if (!Natural) return bound_as_bf16(largest, kTinyBits);
    return largest >= kTinyBits ? (largest + 0x7fffffu) >> 23 << 7 : 0u;
  }

  static GW_INLINE_MEMBER bool find(Scale kind, const float* v, i64 n, u16* scale) {
    if (Natural || kind == Scale::max) return find_by_maximum<PowerLevels>(v, n, scale);
    return find_scale<false>(kind, v, nullptr, n, scale);
  }

  // The code of 2^1 times its unit would be this much less than a power's biased exponent.
  static GW_INLINE_MEMBER i32 offset_of(i32 exponent, int bits) {
    return Natural ? exponent - 127 : 128 - (1 << (bits - 1));
  }

  // base: below this power of two there is only zero; inverse: what a value is multiplied by, or, of natural
  // compression, the offset.
  static GW_INLINE_MEMBER void cells_of(const u32* __restrict scale, int bits, i64 at, Cells& cells) {
    float* __restrict inverse = cells.inverse + at;
    float* __restrict base = cells.base + at;
    float* __restrict step = cells.step + at;
GW_ROLLED
    for (int c = 0; c < 16; ++c) {
      const i32 exponent = i32(scale[c] >> 7);
      const float bound = float_of(scale[c] << 16), quotient = 1.0f / bound;
      // natural: 127 powers. exponential: as many as there are codes, and none below 2^-120
      const i32 first = Natural ? exponent - 126 : offset_of(exponent, bits) + 1, limit = Natural ? 1 : 134 - exponent;
      const u32 lowest = u32(first > limit ? first : limit) << 23;
      base[c] = float_of(scale[c] ? lowest : kInfBits);
      inverse[c] = Natural ? float(offset_of(exponent, bits)) : quotient;
      step[c] = Natural ? 1.0f : bound;
    }
  }

  struct Cell {
    float inverse, floor, step;
    i32 offset;
    int sign_bit;
    u32 mask;

    GW_INLINE_MEMBER Cell(const Cells& cells, i64 at, int bits)
        : inverse(cells.inverse[at]), floor(cells.base[at]), step(cells.step[at]),
          offset(Natural ? i32(inverse) : offset_of(0, bits)), sign_bit(Natural ? 7 : bits - 1),
          mask(bits_of(floor) < kInfBits ? ~0u : 0u) {}

    // u: 16 random bits, as the upper ones of a mantissa
    GW_INLINE_MEMBER Coded one(float x, u32 u) const {
      const u32 b = bits_of(x), sign = b & 0x80000000u;
      u32 mantissa = b & 0x7fffffffu;
      if (!Natural) {
        // below the lowest power the mantissa of size + floor is size / floor; above it this is less than size
        const float product = float_of(mantissa) * inverse, size = product < 1.0f ? product : 1.0f;
        const u32 lifted = bits_of(size + floor) - (1u << 23);
        mantissa = bits_of(size) > lifted ? bits_of(size) : lifted;
      }
      const u32 power = mantissa + u;  // a carry out of the mantissa is the next power of two
      const bool any = power >= bits_of(floor);
      const u32 code = any ? (power >> 23) - u32(offset) : 0u;
      return {code | (sign >> (31 - sign_bit)), float_of((any ? power & kInfBits : 0u) | sign)};
    }
  };

  // Code 0 is zero, code e is 2^(e + offset - 127) * unit.
  struct Value {
    float unit;
    i32 offset;
    int sign_bit;

    GW_INLINE_MEMBER Value(u16 raw, int bits)
        : unit(!Natural ? bf16_value(raw) : ((raw >> 7) & 0xff) == 255 ? float_of(0x7fc00000u) : 1.0f),
          offset(offset_of((raw >> 7) & 0xff, bits)), sign_bit(bits - 1) {}

    GW_INLINE_MEMBER float of(u32 code) const {
      const i32 magnitude = i32(code & ((1u << sign_bit) - 1u)), power = magnitude + offset;
      const float size = float_of(magnitude && power > 0 ? u32(power) << 23 : 0u) * unit;
      return float_of(bits_of(size) ^ ((code >> sign_bit) << 31));
    }
  };
};

using Natural = OneByOne<PowerLevels<true>>;
using Exponential = OneByOne<PowerLevels<false>>;
