// Chooses the SIMD level at run time, and registers the ops of QSGD and casts through libtorch's stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#ifdef GRADWIRE_HAVE_AVX2
#include <cpuid.h>
#endif

#include <atomic>
#include <vector>

#include "ops.hpp"

namespace gradwire {

namespace baseline { extern const Kernels kernels; }
#ifdef GRADWIRE_HAVE_AVX2
namespace avx2 { extern const Kernels kernels; }
#endif
#ifdef GRADWIRE_HAVE_AVX512
namespace avx512 { extern const Kernels kernels; }
#endif

namespace {

#ifdef GRADWIRE_HAVE_AVX2
// Where LZCNT is hidden, as by some hypervisors, it runs as BSR and counts wrongly; not all compilers know it by name.
bool counts_leading_zeros() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c >> 5 & 1u);
}
#endif

// Levels this machine can run, slowest first.
std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found{&baseline::kernels};
#ifdef GRADWIRE_HAVE_AVX2
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && counts_leading_zeros();
  if (v3) found.push_back(&avx2::kernels);
#ifdef GRADWIRE_HAVE_AVX512
  if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    found.push_back(&avx512::kernels);
#endif
#endif
  return found;
}

const std::vector<const Kernels*>& levels() {
  static const std::vector<const Kernels*> found = runnable();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_relaxed);
  return current ? *current : *levels().back();
}

namespace {

int64_t level_count() { return int64_t(levels().size()); }

void set_level(int64_t index) {
  STD_TORCH_CHECK(index >= 0 && index < level_count(), "SIMD level ", index, " does not run here; there are ", level_count());
  chosen.store(levels()[size_t(index)]);
}

struct Call {
  const Segment* segments;
  int64_t count;
  Quantiser q;
};

Call check(const Tensor& segments, const Tensor& flat, const Tensor& payload, int64_t block, int64_t scale, int64_t rounding) {
  STD_TORCH_CHECK(block >= 32 && block % 32 == 0 && block <= kMaxBlock, "block of ", block, " elements");
  STD_TORCH_CHECK(scale >= 0 && scale <= 2 && rounding >= 0 && rounding <= 1, "unknown scale or rounding");
  check_buffers(flat, payload);
  const Table table = table_of(segments, flat, block);
  Call call{table.rows, table.count, {block, Scale(scale), Rounding(rounding)}};
  for (int64_t i = 0; i < call.count; ++i)
    STD_TORCH_CHECK(call.segments[i].bits >= 2 && call.segments[i].bits <= 8, "segment ", i, " has impossible bits");
  const PayloadSize size = payload_size(call.segments, call.count, call.q);
  check_payload(payload, size.scales + size.codes);
  return call;
}

void qsgd_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, const Tensor& stream,
                 int64_t block, int64_t scale, int64_t rounding, Tensor payload) {
  const Call call = check(segments, src, payload, block, scale, rounding);
  kernels().qsgd_encode(src.data_ptr(), dtype_of(src), remembered(residual, src), call.segments, call.count,
                        stream_of(stream), call.q, static_cast<uint8_t*>(payload.data_ptr()));
}

void qsgd_decode(const Tensor& payload, const Tensor& segments, int64_t block, int64_t scale, bool add, Tensor dst) {
  const Call call = check(segments, dst, payload, block, scale, 0);
  STD_TORCH_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
  kernels().qsgd_decode(static_cast<const uint8_t*>(payload.data_ptr()), dst.data_ptr(), dtype_of(dst), add, call.segments,
                        call.count, call.q);
}

Dtype wire_of(int64_t wire) {
  STD_TORCH_CHECK(wire == 1 || wire == 2, "the wire dtype is bfloat16 (1) or float16 (2)");
  return Dtype(wire);
}

void cast_check(const Tensor& flat, const Tensor& payload) {
  check_buffers(flat, payload);
  STD_TORCH_CHECK(payload.numel() == 2 * flat.numel(), "the payload has ", payload.numel(), " bytes where ", flat.numel(),
                  " elements take ", 2 * flat.numel());
}

void cast_encode(const Tensor& src, const std::optional<Tensor>& residual, int64_t wire, Tensor payload) {
  cast_check(src, payload);
  kernels().cast_encode(src.data_ptr(), dtype_of(src), remembered(residual, src), src.numel(), wire_of(wire),
                        static_cast<uint8_t*>(payload.data_ptr()));
}

void cast_decode(const Tensor& payload, int64_t wire, bool add, Tensor dst) {
  cast_check(dst, payload);
  kernels().cast_decode(static_cast<const uint8_t*>(payload.data_ptr()), wire_of(wire), dst.data_ptr(), dtype_of(dst), add,
                        dst.numel());
}

}  // namespace

STABLE_TORCH_LIBRARY(gradwire, m) {
  m.def("level_count() -> int");
  m.def("set_level(int index) -> ()");
  m.def("qsgd_encode(Tensor src, Tensor(b!)? residual, Tensor segments, Tensor stream, int block, int scale, int rounding, "
        "Tensor(a!) payload) -> ()");
  m.def("qsgd_decode(Tensor payload, Tensor segments, int block, int scale, bool add, Tensor(a!) dst) -> ()");
  m.def("cast_encode(Tensor src, Tensor(b!)? residual, int wire, Tensor(a!) payload) -> ()");
  m.def("cast_decode(Tensor payload, int wire, bool add, Tensor(a!) dst) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gradwire, CompositeExplicitAutograd, m) {
  m.impl("level_count", TORCH_BOX(&level_count));
  m.impl("set_level", TORCH_BOX(&set_level));
}

STABLE_TORCH_LIBRARY_IMPL(gradwire, CPU, m) {
  m.impl("qsgd_encode", TORCH_BOX(&qsgd_encode));
  m.impl("qsgd_decode", TORCH_BOX(&qsgd_decode));
  m.impl("cast_encode", TORCH_BOX(&cast_encode));
  m.impl("cast_decode", TORCH_BOX(&cast_decode));
}

}  // namespace gradwire

extern "C" __attribute__((visibility("default"))) const char* gradwire_level_name(int64_t index) {
  return index >= 0 && index < gradwire::level_count() ? gradwire::levels()[size_t(index)]->level : "";
}
