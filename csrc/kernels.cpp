// All kernels of one SIMD level, in the level's own namespace. Compiled once per level with that level's flags; nothing
// with linkage shared between levels may be used here (no std:: templates), or the linker would mix the levels.
#include "kernels.hpp"

#include <cstddef>

#ifndef GRADWIRE_LEVEL
#define GRADWIRE_LEVEL baseline
#endif
#define GW_TEXT_(x) #x
#define GW_TEXT(x) GW_TEXT_(x)

namespace gradwire {
namespace GRADWIRE_LEVEL {

#include "numbers.hpp"
#include "random.hpp"
#include "planes.hpp"
#include "qsgd.hpp"
#include "cast.hpp"
#include "signs.hpp"
#include "signs_dtypes.hpp"
#include "ternary.hpp"

template <class T>
static void encode_dtype(const void* src, float* residual, const Segment* segments, int64_t count, const Stream& stream,
                         const Quantiser& q, uint8_t* payload) {
  const T* from = static_cast<const T*>(src);
  if (residual) encode_segments<T, true>(from, residual, segments, count, stream, q, payload);
  else encode_segments<T, false>(from, nullptr, segments, count, stream, q, payload);
}

static void qsgd_encode(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                        const Stream& stream, const Quantiser& q, uint8_t* payload) {
  switch (dtype) {
    case Dtype::float32: return encode_dtype<float>(src, residual, segments, count, stream, q, payload);
    case Dtype::bfloat16: return encode_dtype<bf16>(src, residual, segments, count, stream, q, payload);
    case Dtype::float16: return encode_dtype<f16>(src, residual, segments, count, stream, q, payload);
  }
}

static void qsgd_decode(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments,
                        int64_t count, const Quantiser& q) {
  switch (dtype) {
    case Dtype::float32:
      if (add) return decode_segments<float, true>(payload, static_cast<float*>(dst), segments, count, q);
      return decode_segments<float, false>(payload, static_cast<float*>(dst), segments, count, q);
    case Dtype::bfloat16: return decode_segments<bf16, false>(payload, static_cast<bf16*>(dst), segments, count, q);
    case Dtype::float16: return decode_segments<f16, false>(payload, static_cast<f16*>(dst), segments, count, q);
  }
}

template <class T>
static void cast_encode_dtype(const void* src, float* residual, int64_t numel, Dtype wire, uint8_t* payload) {
  const T* from = static_cast<const T*>(src);
  if (wire == Dtype::bfloat16) cast_encode_as<T, bf16>(from, residual, numel, reinterpret_cast<bf16*>(payload));
  else cast_encode_as<T, f16>(from, residual, numel, reinterpret_cast<f16*>(payload));
}

static void cast_encode(const void* src, Dtype dtype, float* residual, int64_t numel, Dtype wire, uint8_t* payload) {
  switch (dtype) {
    case Dtype::float32: return cast_encode_dtype<float>(src, residual, numel, wire, payload);
    case Dtype::bfloat16: return cast_encode_dtype<bf16>(src, residual, numel, wire, payload);
    case Dtype::float16: return cast_encode_dtype<f16>(src, residual, numel, wire, payload);
  }
}

template <class T>
static void cast_decode_dtype(const uint8_t* payload, Dtype wire, void* dst, bool add, int64_t numel) {
  T* to = static_cast<T*>(dst);
  if (wire == Dtype::bfloat16) cast_decode_as<T, bf16>(reinterpret_cast<const bf16*>(payload), to, add, numel);
  else cast_decode_as<T, f16>(reinterpret_cast<const f16*>(payload), to, add, numel);
}

static void cast_decode(const uint8_t* payload, Dtype wire, void* dst, Dtype dtype, bool add, int64_t numel) {
  switch (dtype) {
    case Dtype::float32: return cast_decode_dtype<float>(payload, wire, dst, add, numel);
    case Dtype::bfloat16: return cast_decode_dtype<bf16>(payload, wire, dst, add, numel);
    case Dtype::float16: return cast_decode_dtype<f16>(payload, wire, dst, add, numel);
  }
}

extern const Kernels kernels;
const Kernels kernels = {GW_TEXT(GRADWIRE_LEVEL), qsgd_encode, qsgd_decode, cast_encode, cast_decode,
                         sign_encode, mean_sign_encode, sign_decode, threshold_encode, threshold_decode, terngrad_encode};

}  // namespace GRADWIRE_LEVEL
}  // namespace gradwire
