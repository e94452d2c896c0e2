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
#include "scales.hpp"
#include "qsgd.hpp"
#include "cast.hpp"
#include "scaled.hpp"
#include "fp8.hpp"
#include "powers.hpp"
#include "signs.hpp"
#include "signs_dtypes.hpp"
#include "ternary.hpp"
#include "low_rank.hpp"
#include "selection.hpp"
#include "indices.hpp"
#include "sparse.hpp"
#include "block_topk.hpp"
#include "randomk.hpp"
#include "local_update.hpp"

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

// Returns `call` with T the type of numbers of `dtype`.
#define GW_TYPED(call)                                                 \
  switch (dtype) {                                                     \
    case Dtype::float32: { using T = float; return call; }             \
    case Dtype::bfloat16: { using T = bf16; return call; }             \
    case Dtype::float16: { using T = f16; return call; }               \
  }

static void project(const void* src, Dtype dtype, const float* residual, const Matrix* matrices, int64_t count, int64_t rank,
                    const float* q, float* p) {
  if (residual) { GW_TYPED((project_all<T, true>(static_cast<const T*>(src), residual, matrices, count, rank, q, p))) }
  else { GW_TYPED((project_all<T, false>(static_cast<const T*>(src), nullptr, matrices, count, rank, q, p))) }
}

static void back_project(const void* src, Dtype dtype, const float* residual, const Matrix* matrices, int64_t count,
                         int64_t rank, const float* p, float* q) {
  if (residual) { GW_TYPED((back_project_all<T, true>(static_cast<const T*>(src), residual, matrices, count, rank, p, q))) }
  else { GW_TYPED((back_project_all<T, false>(static_cast<const T*>(src), nullptr, matrices, count, rank, p, q))) }
}

static void reconstruct(void* dst, Dtype dtype, float* residual, const Matrix* matrices, int64_t count, int64_t rank,
                        const float* p, const float* q_sum, const float* q_own) {
  if (residual) { GW_TYPED((reconstruct_all<T, true>(static_cast<T*>(dst), residual, matrices, count, rank, p, q_sum, q_own))) }
  else { GW_TYPED((reconstruct_all<T, false>(static_cast<T*>(dst), nullptr, matrices, count, rank, p, q_sum, q_own))) }
}

template <class Levels>
static void scaled_encode_as(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                             const Stream& stream, const Scaled& how, uint8_t* payload) {
  const Quantiser q{how.block, how.scale, how.rounding};
#define GW_ENCODE(T)                                                                                                      \
  return residual                                                                                                         \
             ? scaled_encode_from<Levels, T, true>(static_cast<const T*>(src), residual, segments, count, stream, q, payload) \
             : scaled_encode_from<Levels, T, false>(static_cast<const T*>(src), residual, segments, count, stream, q, payload)
  switch (dtype) {
    case Dtype::float32: GW_ENCODE(float);
    case Dtype::bfloat16: GW_ENCODE(bf16);
    case Dtype::float16: GW_ENCODE(f16);
  }
#undef GW_ENCODE
}

static void scaled_encode(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                          const Stream& stream, const Scaled& how, uint8_t* payload) {
  switch (how.code) {
    case Code::e4m3: return scaled_encode_as<Fp8<3>>(src, dtype, residual, segments, count, stream, how, payload);
    case Code::e5m2: return scaled_encode_as<Fp8<2>>(src, dtype, residual, segments, count, stream, how, payload);
    case Code::natural: return scaled_encode_as<Natural>(src, dtype, residual, segments, count, stream, how, payload);
    case Code::exponential: return scaled_encode_as<Exponential>(src, dtype, residual, segments, count, stream, how, payload);
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

static void scaled_decode(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                          const Scaled& how) {
  switch (how.code) {
    case Code::e4m3: return scaled_decode_as<Fp8<3>>(payload, dst, dtype, add, segments, count, how.block);
    case Code::e5m2: return scaled_decode_as<Fp8<2>>(payload, dst, dtype, add, segments, count, how.block);
    case Code::natural: return scaled_decode_as<Natural>(payload, dst, dtype, add, segments, count, how.block);
    case Code::exponential: return scaled_decode_as<Exponential>(payload, dst, dtype, add, segments, count, how.block);
  }
}

extern const Kernels kernels;
const Kernels kernels = {
    GW_TEXT(GRADWIRE_LEVEL), qsgd_encode, qsgd_decode, cast_encode, cast_decode, project, back_project, orthogonalise,
    reconstruct, select_encode, select_decode, block_topk_encode, block_topk_decode, stream_base, random_gather,
    random_scatter, sign_encode, mean_sign_encode, sign_decode, threshold_encode, threshold_decode, terngrad_encode,
    scaled_encode, scaled_decode, local_update,
};

}  // namespace GRADWIRE_LEVEL
}  // namespace gradwire
