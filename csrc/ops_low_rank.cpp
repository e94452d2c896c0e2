// The ops of PowerSGD.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "ops.hpp"

namespace gradwire {
namespace {

struct Matrices {
  const Matrix* rows;
  int64_t count;
};

float* numbers(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == ScalarType::Float, what, " must be contiguous float32");
  return static_cast<float*>(t.data_ptr());
}

// A table of matrices that lie inside the flat buffer and the factors.
Matrices matrices_of(const Tensor& table, int64_t rank, int64_t flat, int64_t p, int64_t q) {
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == 5 && table.is_contiguous() && table.scalar_type() == ScalarType::Long,
                  "matrices must be a contiguous int64 table of 5 columns");
  STD_TORCH_CHECK(rank >= 1 && rank <= 1024, "rank ", rank);
  const Matrices found{static_cast<const Matrix*>(table.data_ptr()), table.size(0)};
  constexpr int64_t most = int64_t(1) << 40;
  for (int64_t i = 0; i < found.count; ++i) {
    const Matrix& m = found.rows[i];
    STD_TORCH_CHECK(m.offset >= 0 && m.rows >= rank && m.columns >= 1 && m.rows <= most / m.columns && m.p_at >= 0 && m.q_at >= 0 &&
                        m.offset <= flat - m.rows * m.columns && m.p_at <= p - m.rows * rank && m.q_at <= q - m.columns * rank,
                    "matrix ", i, " reaches past the flat buffer or its factors, or has fewer rows than the rank");
  }
  return found;
}

void project(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& table, int64_t rank, const Tensor& q, Tensor p) {
  STD_TORCH_CHECK(src.is_contiguous(), "the flat buffer must be contiguous");
  const Matrices m = matrices_of(table, rank, src.numel(), p.numel(), q.numel());
  kernels().project(src.data_ptr(), dtype_of(src), remembered(residual, src), m.rows, m.count, rank, numbers(q, "q"), numbers(p, "p"));
}

void back_project(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& table, int64_t rank, const Tensor& p, Tensor q) {
  STD_TORCH_CHECK(src.is_contiguous(), "the flat buffer must be contiguous");
  const Matrices m = matrices_of(table, rank, src.numel(), p.numel(), q.numel());
  kernels().back_project(src.data_ptr(), dtype_of(src), remembered(residual, src), m.rows, m.count, rank, numbers(p, "p"), numbers(q, "q"));
}

void orthogonalise(const Tensor& table, int64_t rank, Tensor p) {
  constexpr int64_t any = int64_t(1) << 62;
  const Matrices m = matrices_of(table, rank, any, p.numel(), any);
  kernels().orthogonalise(numbers(p, "p"), m.rows, m.count, rank);
}

void reconstruct(Tensor dst, const std::optional<Tensor>& residual, const Tensor& table, int64_t rank, const Tensor& p,
                 const Tensor& q_sum, const Tensor& q_own) {
  STD_TORCH_CHECK(dst.is_contiguous(), "the flat buffer must be contiguous");
  STD_TORCH_CHECK(q_own.numel() == q_sum.numel(), "the factors of one rank and of all must be of one size");
  const Matrices m = matrices_of(table, rank, dst.numel(), p.numel(), q_sum.numel());
  kernels().reconstruct(dst.data_ptr(), dtype_of(dst), remembered(residual, dst), m.rows, m.count, rank, numbers(p, "p"),
                        numbers(q_sum, "q_sum"), numbers(q_own, "q_own"));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gradwire, m) {
  m.def("project(Tensor src, Tensor? residual, Tensor matrices, int rank, Tensor q, Tensor(a!) p) -> ()");
  m.def("back_project(Tensor src, Tensor? residual, Tensor matrices, int rank, Tensor p, Tensor(a!) q) -> ()");
  m.def("orthogonalise(Tensor matrices, int rank, Tensor(a!) p) -> ()");
  m.def("reconstruct(Tensor(a!) dst, Tensor(b!)? residual, Tensor matrices, int rank, Tensor p, Tensor q_sum, Tensor q_own) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gradwire, CPU, m) {
  m.impl("project", TORCH_BOX(&project));
  m.impl("back_project", TORCH_BOX(&back_project));
  m.impl("orthogonalise", TORCH_BOX(&orthogonalise));
  m.impl("reconstruct", TORCH_BOX(&reconstruct));
}

}  // namespace gradwire
