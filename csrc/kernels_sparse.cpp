// Sparsifiers, PowerSGD and local updates, at one SIMD level. See kernels.hpp.
#include "kernels.hpp"

#include <cstddef>

namespace gradwire {
namespace GRADWIRE_LEVEL {

#include "numbers.hpp"
#include "random.hpp"
#include "low_rank.hpp"
#include "selection.hpp"
#include "indices.hpp"
#include "sparse.hpp"
#include "block_topk.hpp"
#include "randomk.hpp"
#include "local_update.hpp"

// Returns `call` with T the type of numbers of `dtype`.
#define GW_TYPED(call)                                                 \
  switch (dtype) {                                                     \
    case Dtype::float32: { using T = float; return call; }             \
    case Dtype::bfloat16: { using T = bf16; return call; }             \
    case Dtype::float16: { using T = f16; return call; }               \
  }

void project(const void* src, Dtype dtype, const float* residual, const Matrix* matrices, int64_t count, int64_t rank,
                    const float* q, float* p) {
  if (residual) { GW_TYPED((project_all<T, true>(static_cast<const T*>(src), residual, matrices, count, rank, q, p))) }
  else { GW_TYPED((project_all<T, false>(static_cast<const T*>(src), nullptr, matrices, count, rank, q, p))) }
}

void back_project(const void* src, Dtype dtype, const float* residual, const Matrix* matrices, int64_t count,
                         int64_t rank, const float* p, float* q) {
  if (residual) { GW_TYPED((back_project_all<T, true>(static_cast<const T*>(src), residual, matrices, count, rank, p, q))) }
  else { GW_TYPED((back_project_all<T, false>(static_cast<const T*>(src), nullptr, matrices, count, rank, p, q))) }
}

void reconstruct(void* dst, Dtype dtype, float* residual, const Matrix* matrices, int64_t count, int64_t rank,
                        const float* p, const float* q_sum, const float* q_own) {
  if (residual) { GW_TYPED((reconstruct_all<T, true>(static_cast<T*>(dst), residual, matrices, count, rank, p, q_sum, q_own))) }
  else { GW_TYPED((reconstruct_all<T, false>(static_cast<T*>(dst), nullptr, matrices, count, rank, p, q_sum, q_own))) }
}

}  // namespace GRADWIRE_LEVEL
}  // namespace gradwire
