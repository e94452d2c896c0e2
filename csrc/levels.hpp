// How the batches of batch.hpp find scales and codes: one type for each kind of levels. Included inside a level's
// namespace.
//   words       bfloat16 numbers that a block has before its codes
//   nibbles     whether codes of at most 4 bits come as two nibbles of a byte
//   stochastic, nearest: the roundings that batches know
//   small, usual: whether blocks below 128 come in batches, and whether those of 128 have a path of their own
//   ternary     whether codes of 2 bits stand for three values
//   by_maximum  whether the scale is always made of the largest magnitude
//   bound       a block's scale from the bits of its largest magnitude
//   cells_of    what is needed of 16 scales
//   group       16 pairs of values, x[l] and x[l + half], to codes: two nibbles of a byte with Pairs, else two bytes.
//               Residuals become what is lost.

constexpr i64 kBatch = 1024;         // elements, or one block if that is larger
constexpr i64 kCells = kBatch / 32;  // blocks of a batch, at most; a multiple of 16

// The grids of the blocks of a batch. What the numbers are is the levels' own affair.
struct Cells {
  alignas(64) float inverse[kCells];
  alignas(64) float base[kCells];
  alignas(64) float step[kCells];
};

GW_INLINE u32 bound_as_bf16(u32 largest, u32 tiny) {
  const u32 rounded = (largest + 0xffffu) >> 16, capped = rounded < 0x7f7fu ? rounded : 0x7f7fu;
  return largest >= tiny ? capped : 0u;
}

// QSGD's, as in Grid; Shifted: between a lowest and a highest value.
template <bool Shifted>
struct Uniform {
  static constexpr i64 words = Shifted ? 2 : 1;
  static constexpr bool nibbles = true, stochastic = true, nearest = true, small = true, usual = !Shifted, by_maximum = false,
                        ternary = !Shifted;

  static GW_INLINE_MEMBER u32 bound(u32 largest) { return bound_as_bf16(largest, kTinyBits); }

  static GW_INLINE_MEMBER void cells_of(const u32* __restrict scale, int bits, i64 at, Cells& cells) {
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

  template <bool Residual, bool Stochastic, bool Pairs, int Group>
  static GW_INLINE_MEMBER void group(const float* x, float* left, i64 half, const u32* hashes, const Cells& cells, i64 cell,
                                     int bits, u32* both) {
    const i32 zero = Shifted ? 0 : (1 << (bits - 1)) - 1;
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
};
