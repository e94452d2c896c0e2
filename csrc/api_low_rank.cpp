// PowerSGD.
#include "api.hpp"

namespace gradwire {
namespace {

struct Matrices {
  const Matrix* rows;
  int64_t count;
};

float* numbers(const Tensor& t, const char* what) {
  GW_CHECK(t.contiguous && t.dtype == int32_t(Dtype::float32), "%s must be contiguous float32", what);
  return static_cast<float*>(t.data);
}

// A table of matrices that lie inside the flat buffer and the factors.
Matrices matrices_of(const Tensor& table, int64_t rank, int64_t flat, int64_t p, int64_t q) {
  GW_CHECK(table.numel % 5 == 0 && table.contiguous && table.dtype == kInt64,
           "matrices must be a contiguous int64 table of 5 columns");
  GW_CHECK(rank >= 1 && rank <= 1024, "rank %lld", Long(rank));
  const Matrices found{static_cast<const Matrix*>(table.data), table.numel / 5};
  constexpr int64_t most = int64_t(1) << 40;
  for (int64_t i = 0; i < found.count; ++i) {
    const Matrix& m = found.rows[i];
    GW_CHECK(m.offset >= 0 && m.rows >= rank && m.columns >= 1 && m.rows <= most / m.columns && m.p_at >= 0 && m.q_at >= 0 &&
                 m.offset <= flat - m.rows * m.columns && m.p_at <= p - m.rows * rank && m.q_at <= q - m.columns * rank,
             "matrix %lld reaches past the flat buffer or its factors, or has fewer rows than the rank", Long(i));
  }
  return found;
}

void check_flat(const Tensor& flat) { GW_CHECK(flat.contiguous, "the flat buffer must be contiguous"); }

}  // namespace
}  // namespace gradwire

using namespace gradwire;

GW_API gw_project(const Tensor* src, const Tensor* residual, const Tensor* matrices, int64_t rank, const Tensor* q, const Tensor* p) {
  return guarded([&] {
    check_flat(*src);
    const Matrices m = matrices_of(*matrices, rank, src->numel, p->numel, q->numel);
    kernels().project(src->data, dtype_of(*src), remembered(residual, *src), m.rows, m.count, rank, numbers(*q, "q"),
                      numbers(*p, "p"));
  });
}

GW_API gw_back_project(const Tensor* src, const Tensor* residual, const Tensor* matrices, int64_t rank, const Tensor* p,
                       const Tensor* q) {
  return guarded([&] {
    check_flat(*src);
    const Matrices m = matrices_of(*matrices, rank, src->numel, p->numel, q->numel);
    kernels().back_project(src->data, dtype_of(*src), remembered(residual, *src), m.rows, m.count, rank, numbers(*p, "p"),
                           numbers(*q, "q"));
  });
}

GW_API gw_orthogonalise(const Tensor* matrices, int64_t rank, const Tensor* p) {
  return guarded([&] {
    constexpr int64_t any = int64_t(1) << 62;
    const Matrices m = matrices_of(*matrices, rank, any, p->numel, any);
    kernels().orthogonalise(numbers(*p, "p"), m.rows, m.count, rank);
  });
}

GW_API gw_reconstruct(const Tensor* dst, const Tensor* residual, const Tensor* matrices, int64_t rank, const Tensor* p,
                      const Tensor* q_sum, const Tensor* q_own) {
  return guarded([&] {
    check_flat(*dst);
    GW_CHECK(q_own->numel == q_sum->numel, "the factors of one rank and of all must be of one size");
    const Matrices m = matrices_of(*matrices, rank, dst->numel, p->numel, q_sum->numel);
    kernels().reconstruct(dst->data, dtype_of(*dst), remembered(residual, *dst), m.rows, m.count, rank, numbers(*p, "p"),
                          numbers(*q_sum, "q_sum"), numbers(*q_own, "q_own"));
  });
}
