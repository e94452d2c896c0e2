// Conversions between float32, bfloat16 and float16 as integer arithmetic, so that every SIMD level rounds alike.
// Included inside the level's own namespace: nothing here may have linkage shared between levels.

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

#define GW_INLINE static inline __attribute__((always_inline))
#define GW_INLINE_MEMBER inline __attribute__((always_inline))

// Ends the compiler's knowledge of what a buffer holds. Without it gcc takes vectors of bytes apart element by element
// when they are read back in another width.
#define GW_SETTLE(buffer) asm volatile("" : : "r"(buffer) : "memory")

// Keeps gcc from taking a short loop apart before it can become vectors.
#define GW_ROLLED _Pragma("GCC unroll 1")

constexpr i64 kUnit = 128;  // elements that are worked on at once

GW_INLINE u32 bits_of(float x) { u32 b; __builtin_memcpy(&b, &x, 4); return b; }
GW_INLINE float float_of(u32 b) { float x; __builtin_memcpy(&x, &b, 4); return x; }

constexpr u32 kInfBits = 0x7f800000u;

struct bf16 { u16 raw; };
struct f16 { u16 raw; };

GW_INLINE float to_float(float x) { return x; }
GW_INLINE float to_float(bf16 x) { return float_of(u32(x.raw) << 16); }
GW_INLINE float to_float(f16 x) {
  const u32 magnitude = x.raw & 0x7fffu, sign = u32(x.raw & 0x8000u) << 16;
  // exponent moved from bias 15 to 127. A subnormal gets the smallest normal's, which is taken off again: exact, and no operand
  // is a subnormal float32, which a script may have set the processor to take for zero
  constexpr u32 smallest_normal = u32(128 - 15) << 23;
  const u32 fraction = magnitude << 13, normal = fraction + (u32(127 - 15) << 23);
  const u32 subnormal = bits_of(float_of(smallest_normal | fraction) - float_of(smallest_normal));
  const u32 finite = magnitude >= 0x400u ? normal : subnormal;
  const u32 special = (magnitude << 13) | kInfBits;
  return float_of((magnitude >= 0x7c00u ? special : finite) | sign);
}

GW_INLINE void from_float(float x, float& out) { out = x; }
GW_INLINE void from_float(float x, bf16& out) {  // nearest, ties to even; one bit pattern for NaN
  const u32 b = bits_of(x);
  const u32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  out.raw = u16((b & 0x7fffffffu) > kInfBits ? 0x7fc0u : rounded);
}
GW_INLINE void from_float(float x, f16& out) {  // nearest, ties to even; overflow is Inf, one NaN
  const u32 b = bits_of(x), magnitude = b & 0x7fffffffu, sign = (b >> 16) & 0x8000u;
  // subnormal results: adding 0.5 aligns the mantissa so that the addition itself rounds
  const u32 subnormal = bits_of(float_of(magnitude < 0x38800000u ? magnitude : 0u) + 0.5f) - 0x3f000000u;
  const u32 normal = (magnitude - (u32(127 - 15) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const u32 finite = magnitude < 0x38800000u ? subnormal : normal;
  const u32 number = (magnitude >= 0x477ff000u ? 0x7c00u : finite) | sign;
  out.raw = u16(magnitude > kInfBits ? 0x7e00u : number);
}

// Scales travel as bfloat16, rounded away from what they bound so that they still bound it.
GW_INLINE u16 bf16_up(float x) {  // smallest bfloat16 >= x >= 0, at most the largest finite one
  const u32 rounded = (bits_of(x) + 0xffffu) >> 16;
  return u16(rounded < 0x7f7fu ? rounded : 0x7f7fu);
}
GW_INLINE u16 bf16_towards(float x, bool up) {  // for a signed bound
  const u32 b = bits_of(x), magnitude = b & 0x7fffffffu;
  const bool negative = b >> 31;
  const u32 away = bf16_up(float_of(magnitude)), towards_zero = magnitude >> 16;
  return u16((negative != up ? away : towards_zero) | (negative ? 0x8000u : 0u));
}
GW_INLINE float bf16_value(u16 raw) { return float_of(u32(raw) << 16); }

// n numbers as float32.
template <class T>
static __attribute__((noinline)) void widen(const T* __restrict from, i64 n, float* __restrict to) {
  for (i64 i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

// The same, times a factor and rounded to their dtype.
template <class T>
static __attribute__((noinline)) void widen_scaled(const T* __restrict from, i64 n, float factor, float* __restrict to) {
  for (i64 i = 0; i < n; ++i) {
    T scaled;
    from_float(to_float(from[i]) * factor, scaled);
    to[i] = to_float(scaled);
  }
}

// Whether kernels read it where it is. Anything else goes through a tile of float32: so kernels are compiled for float32 alone.
GW_INLINE bool read_in_place(const Gradient& g) { return g.dtype == Dtype::float32 && g.factor == 1.0f; }

template <class T>
GW_INLINE const float* read_tile(const Gradient& g, i64 first, i64 n, float* tile) {
  const T* const from = static_cast<const T*>(g.data) + first;
  if (g.factor == 1.0f) widen(from, n, tile);
  else widen_scaled(from, n, g.factor, tile);
  return tile;
}

// Elements `at` to `at + n` of a row: where they are, or copied into `tile`, which has the room.
GW_INLINE const float* read_row(const Gradient& g, i64 row, i64 at, i64 n, float* tile) {
  const i64 first = g.rows[row].offset + at;
  if (read_in_place(g)) return static_cast<const float*>(g.data) + first;
  switch (g.dtype) {
    case Dtype::float32: return read_tile<float>(g, first, n, tile);
    case Dtype::bfloat16: return read_tile<bf16>(g, first, n, tile);
    case Dtype::float16: return read_tile<f16>(g, first, n, tile);
  }
  return tile;
}
