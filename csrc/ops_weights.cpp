// The op of local updates. Unlike codecs, which run on lanes beside the script, it runs on the script's thread, and with its
// threads.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ops.hpp"

namespace gradwire {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements that are worth a thread

const void* elements_of(const std::optional<Tensor>& state, const Tensor& weight) {
  if (!state) return nullptr;
  STD_TORCH_CHECK(state->is_contiguous() && state->scalar_type() == weight.scalar_type() && state->numel() == weight.numel(),
                  "gradient, moments and result must be contiguous, of the weight's dtype and as long as it");
  return state->data_ptr();
}

void local_update(const Tensor& weight, const Tensor& gradient, const std::optional<Tensor>& squares,
                  const std::optional<Tensor>& mean, double rate, double own, double momentum, double kept, double taken,
                  double eps, Tensor out) {
  const Dtype dtype = dtype_of(weight);
  STD_TORCH_CHECK(weight.is_contiguous(), "the weight must be contiguous");
  const void *g = elements_of(gradient, weight), *s = elements_of(squares, weight), *m = elements_of(mean, weight);
  void* to = const_cast<void*>(elements_of(out, weight));
  const LocalUpdate how{float(rate), float(own), float(momentum), float(kept), float(taken), float(eps)};
  torch::stable::parallel_for(0, weight.numel(), kGrain, [&](int64_t begin, int64_t end) {
    kernels().local_update(weight.data_ptr(), g, s, m, dtype, how, begin, end, to);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gradwire, m) {
  m.def("local_update(Tensor weight, Tensor gradient, Tensor? squares, Tensor? mean, float rate, float own, float momentum, "
        "float kept, float taken, float eps, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gradwire, CPU, m) { m.impl("local_update", TORCH_BOX(&local_update)); }

}  // namespace gradwire
