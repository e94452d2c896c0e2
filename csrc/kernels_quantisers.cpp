// QSGD, casts, FP8, natural compression and exponential levels, at one SIMD level. See kernels.hpp.
#include "kernels.hpp"

#include <cstddef>

namespace gradwire {
namespace GRADWIRE_LEVEL {

#include "numbers.hpp"
#include "random.hpp"
#include "planes.hpp"
#include "scales.hpp"
#include "qsgd.hpp"
#include "scaled.hpp"
#include "fitted.hpp"
#include "weights.hpp"
#include "fp8.hpp"
#include "powers.hpp"
#include "runs.hpp"
#include "cast.hpp"

void qsgd_encode(const Gradient& src, float* residual, const Segment* segments, int64_t count, const Stream& stream,
                        const Quantiser& q, uint8_t* payload) {
  if (q.scale == Scale::minmax) encode_with<UniformCodec<true>>(src, residual, segments, count, stream, q, payload);
  else encode_with<UniformCodec<false>>(src, residual, segments, count, stream, q, payload);
}

void qsgd_decode(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments,
                        int64_t count, const Quantiser& q) {
  switch (dtype) {
    case Dtype::float32:
      if (add) return decode_segments<float, true>(payload, static_cast<float*>(dst), segments, count, q);
      return decode_segments<float, false>(payload, static_cast<float*>(dst), segments, count, q);
    case Dtype::bfloat16: return decode_segments<bf16, false>(payload, static_cast<bf16*>(dst), segments, count, q);
    case Dtype::float16: return decode_segments<f16, false>(payload, static_cast<f16*>(dst), segments, count, q);
  }
}

void fitted_encode(const Gradient& src, float* residual, const Segment* segments, int64_t count, const Quantiser& q, bool lloyd,
                   uint8_t* payload) {
  if (lloyd) encode_with<FittedCodec<true>>(src, residual, segments, count, {}, q, payload);
  else encode_with<FittedCodec<false>>(src, residual, segments, count, {}, q, payload);
}

void fitted_decode(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, const Segment* rows,
                   int64_t count, int64_t block, bool lloyd, const uint8_t* weights) {
  const auto decode = [&](auto* to, auto added) {
    fitted_decode_to<std::remove_pointer_t<decltype(to)>, added.value>(payload, to, segments, rows, count, block, lloyd, weights);
  };
  switch (dtype) {
    case Dtype::float32:
      if (add) return decode(static_cast<float*>(dst), std::true_type{});
      return decode(static_cast<float*>(dst), std::false_type{});
    case Dtype::bfloat16: return decode(static_cast<bf16*>(dst), std::false_type{});
    case Dtype::float16: return decode(static_cast<f16*>(dst), std::false_type{});
  }
}

void learn_energy(const void* mean, Dtype dtype, int64_t numel, float kept, float taken, float* energy) {
  switch (dtype) {
    case Dtype::float32: return learn_run(static_cast<const float*>(mean), numel, kept, taken, energy);
    case Dtype::bfloat16: return learn_run(static_cast<const bf16*>(mean), numel, kept, taken, energy);
    case Dtype::float16: return learn_run(static_cast<const f16*>(mean), numel, kept, taken, energy);
  }
}

void weigh_elements(const float* energy, int64_t numel, int64_t block, double floor, uint8_t* weights) {
  const i64 blocks = block == kUnit ? numel / kUnit : 0;
  weigh_blocks(energy, blocks, floor, weights);
  for (i64 at = blocks * kUnit; at < numel; at += block)
    weigh_block(energy + at, numel - at < block ? numel - at : block, floor, weights + at);
}

template <class T>
static void cast_encode_dtype(const void* src, float* residual, int64_t numel, Dtype wire, uint8_t* payload) {
  const T* from = static_cast<const T*>(src);
  if (wire == Dtype::bfloat16) cast_encode_as<T, bf16>(from, residual, numel, reinterpret_cast<bf16*>(payload));
  else cast_encode_as<T, f16>(from, residual, numel, reinterpret_cast<f16*>(payload));
}

void cast_encode(const void* src, Dtype dtype, float* residual, int64_t numel, Dtype wire, uint8_t* payload) {
  switch (dtype) {
    case Dtype::float32: return cast_encode_dtype<float>(src, residual, numel, wire, payload);
    case Dtype::bfloat16: return cast_encode_dtype<bf16>(src, residual, numel, wire, payload);
    case Dtype::float16: return cast_encode_dtype<f16>(src, residual, numel, wire, payload);
  }
}

void scale(float* values, float factor, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) values[i] *= factor;
}

void scale_into(const void* from, Dtype dtype, float factor, void* to, bool wide, bool add, int64_t numel) {
  switch (dtype) {
    case Dtype::float32: return scale_into_dtype<float>(from, factor, to, wide, add, numel);
    case Dtype::bfloat16: return scale_into_dtype<bf16>(from, factor, to, wide, add, numel);
    case Dtype::float16: return scale_into_dtype<f16>(from, factor, to, wide, add, numel);
  }
}

template <class T>
static void cast_decode_dtype(const uint8_t* payload, Dtype wire, void* dst, bool add, int64_t numel) {
  T* to = static_cast<T*>(dst);
  switch (wire) {
    case Dtype::float32: return cast_decode_as<T, float>(reinterpret_cast<const float*>(payload), to, add, numel);
    case Dtype::bfloat16: return cast_decode_as<T, bf16>(reinterpret_cast<const bf16*>(payload), to, add, numel);
    case Dtype::float16: return cast_decode_as<T, f16>(reinterpret_cast<const f16*>(payload), to, add, numel);
  }
}

void cast_decode(const uint8_t* payload, Dtype wire, void* dst, Dtype dtype, bool add, int64_t numel) {
  switch (dtype) {
    case Dtype::float32: return cast_decode_dtype<float>(payload, wire, dst, add, numel);
    case Dtype::bfloat16: return cast_decode_dtype<bf16>(payload, wire, dst, add, numel);
    case Dtype::float16: return cast_decode_dtype<f16>(payload, wire, dst, add, numel);
  }
}

void scaled_encode(const Gradient& src, float* residual, const Segment* segments, int64_t count, const Stream& stream,
                          const Scaled& how, uint8_t* payload) {
  const Quantiser q{how.block, how.scale, how.rounding, how.summing};
  switch (how.code) {
    case Code::e4m3: return encode_with<ScaledCodec<Fp8<3>>>(src, residual, segments, count, stream, q, payload);
    case Code::e5m2: return encode_with<ScaledCodec<Fp8<2>>>(src, residual, segments, count, stream, q, payload);
    case Code::natural: return encode_with<ScaledCodec<Natural>>(src, residual, segments, count, stream, q, payload);
    case Code::exponential: return encode_with<ScaledCodec<Exponential>>(src, residual, segments, count, stream, q, payload);
  }
}

template <class Levels>
static void scaled_decode_as(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                             int64_t block) {
  switch (dtype) {
    case Dtype::float32:
      if (add) return scaled_decode_to<Levels, float, true>(payload, static_cast<float*>(dst), segments, count, block);
      return scaled_decode_to<Levels, float, false>(payload, static_cast<float*>(dst), segments, count, block);
    case Dtype::bfloat16: return scaled_decode_to<Levels, bf16, false>(payload, static_cast<bf16*>(dst), segments, count, block);
    case Dtype::float16: return scaled_decode_to<Levels, f16, false>(payload, static_cast<f16*>(dst), segments, count, block);
  }
}

void scaled_decode(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                          const Scaled& how) {
  switch (how.code) {
    case Code::e4m3: return scaled_decode_as<Fp8<3>>(payload, dst, dtype, add, segments, count, how.block);
    case Code::e5m2: return scaled_decode_as<Fp8<2>>(payload, dst, dtype, add, segments, count, how.block);
    case Code::natural: return scaled_decode_as<Natural>(payload, dst, dtype, add, segments, count, how.block);
    case Code::exponential: return scaled_decode_as<Exponential>(payload, dst, dtype, add, segments, count, how.block);
  }
}

}  // namespace GRADWIRE_LEVEL
}  // namespace gradwire
