// The scale of a block, and what a block is cut into. Included inside a level's namespace.

// Below kTiny a block's range counts as zero: 2^24 times its reciprocal would overflow. From kHuge on its values count as not
// finite: the range or the rounded scale would overflow.
constexpr float kTiny = 0x1p-100f;
constexpr u32 kTinyBits = 0x0d800000u;
constexpr float kShort = 1.0f - 0x1p-22f;  // what a scale's inverse is multiplied by
constexpr u32 kHuge = 0x7e800000u;  // bits of 2^126

// N values of src (+ what is left), as magnitudes that compare as integers: the largest.
template <int N, bool Residual>
GW_INLINE i32 largest_of(const float* __restrict from, const float* __restrict left) {
  i32 most = 0;
  for (i64 i = 0; i < N; ++i) {
    const float v = Residual ? from[i] + left[i] : from[i];
    const i32 magnitude = i32(bits_of(v) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// The scale of n values. A block that holds a NaN or an Inf (or a value of 2^126 or more) gets
// a NaN scale: it decodes to NaN throughout, so nothing non-finite ever becomes a finite number.
template <bool Residual>
GW_INLINE bool find_scale(Scale kind, const float* __restrict from, const float* __restrict left, i64 n, u16* scale) {
  const auto value = [&](i64 i) { return Residual ? from[i] + left[i] : from[i]; };
  i32 largest = 0;
  for (i64 i = 0; i < n; ++i) {
    const i32 magnitude = i32(bits_of(value(i)) & 0x7fffffffu);
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
      for (int j = 0; j < 16; ++j) lane[j] += double(value(i + j)) * double(value(i + j));
    for (i64 i = n / 16 * 16; i < n; ++i) lane[i % 16] += double(value(i)) * double(value(i));
    for (int width = 8; width > 0; width /= 2)
      for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    const double norm = __builtin_sqrt(lane[0]);
    const float bound = norm < 0x1.fep127 ? float(norm) : 0x1.fep127f;
    scale[0] = bound >= kTiny ? bf16_up(bound) : u16(0);
  } else {
    // the order of floats as integers: flip the magnitude bits of negatives
    i32 low = 0x7fffffff, high = -0x7fffffff - 1;
    for (i64 i = 0; i < n; ++i) {
      const i32 b = i32(bits_of(value(i)));
      const i32 ordered = b ^ ((b >> 31) & 0x7fffffff);
      low = ordered < low ? ordered : low;
      high = ordered > high ? ordered : high;
    }
    scale[0] = bf16_towards(float_of(u32(low ^ ((low >> 31) & 0x7fffffff))), false);
    scale[1] = bf16_towards(float_of(u32(high ^ ((high >> 31) & 0x7fffffff))), true);
  }
  return true;
}
