// Local updates, and second moments. They run on the script's thread and with its threads; codecs run on the threads of lanes instead.
#include "api.hpp"

// Of the OpenMP runtime that torch has loaded, if it has: its threads are the script's own. No runtime is linked here.
extern "C" {
__attribute__((weak, visibility("default"))) void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
__attribute__((weak, visibility("default"))) int omp_get_thread_num(void);
__attribute__((weak, visibility("default"))) int omp_get_num_threads(void);
}

namespace gradwire {

// Twin of `Update` in src/gradwire/kernels/cpu.py.
struct Update {
  float rate, own, momentum, kept, taken, eps;
  int64_t threads;  // at most
};

// Twin of `Lower` in src/gradwire/kernels/second_moment.py.
struct Lower {
  float unbiased, left, whole, taken;
  int64_t threads;  // at most
};

namespace {

constexpr int64_t kGrain = 1 << 16;  // elements that are worth a thread

const void* elements_of(const Tensor* state, const Tensor& weight) {
  if (!state) return nullptr;
  GW_CHECK(state->contiguous && state->dtype == weight.dtype && state->numel == weight.numel,
           "gradient, moments and result must be contiguous, of the weight's dtype and as long as it");
  return state->data;
}

// Calls work(begin, end) for parts of 0 to numel, on several threads where that pays.
template <class Work>
void in_parallel(int64_t numel, int64_t threads, const Work& work) {
  const int64_t most = (numel + kGrain - 1) / kGrain;
  threads = threads < most ? threads : most;
  if (threads <= 1 || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) return work(0, numel);
  struct Shared {
    const Work& work;
    int64_t numel;
  } shared{work, numel};
  const auto part = [](void* data) {
    const Shared& s = *static_cast<const Shared*>(data);
    const int64_t index = omp_get_thread_num(), count = omp_get_num_threads(), each = (s.numel + count - 1) / count;
    const int64_t begin = index * each, end = begin + each < s.numel ? begin + each : s.numel;
    if (begin < end) s.work(begin, end);
  };
  GOMP_parallel(part, &shared, unsigned(threads), 0);
}

}  // namespace
}  // namespace gradwire

using namespace gradwire;

GW_API gw_local_update(const Tensor* weight, const Tensor* gradient, const Tensor* squares, const Tensor* mean, const Update* by,
                       const Tensor* out) {
  return guarded([&] {
    const Dtype dtype = dtype_of(*weight);
    GW_CHECK(weight->contiguous, "the weight must be contiguous");
    const void *g = elements_of(gradient, *weight), *s = elements_of(squares, *weight), *m = elements_of(mean, *weight);
    void* to = const_cast<void*>(elements_of(out, *weight));
    const LocalUpdate how{by->rate, by->own, by->momentum, by->kept, by->taken, by->eps};
    in_parallel(weight->numel, by->threads, [&](int64_t begin, int64_t end) {
      kernels().local_update(weight->data, g, s, m, dtype, how, begin, end, to);
    });
  });
}

GW_API gw_lower_second_moment(const Tensor* second, const Tensor* first, const Tensor* gradient, const Lower* by) {
  return guarded([&] {
    const Dtype dtype = dtype_of(*second);
    GW_CHECK(second->contiguous, "the second moment must be contiguous");
    const void *m = elements_of(first, *second), *g = elements_of(gradient, *second);
    const LowerMoment how{by->unbiased, by->left, by->whole, by->taken};
    in_parallel(second->numel, by->threads, [&](int64_t begin, int64_t end) {
      kernels().lower_second_moment(g, m, dtype, how, begin, end, const_cast<void*>(static_cast<const void*>(second->data)));
    });
  });
}
