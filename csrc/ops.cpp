// Registers the torch ops through libtorch's stable ABI, checks every size, and chooses the SIMD level at run time.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace gradwire {

namespace baseline { extern const Kernels kernels; }
#ifdef GRADWIRE_HAVE_AVX2
namespace avx2 { extern const Kernels kernels; }
#endif
#ifdef GRADWIRE_HAVE_AVX512
namespace avx512 { extern const Kernels kernels; }
#endif

namespace {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

// Levels this machine can run, slowest first.
std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found{&baseline::kernels};
#ifdef GRADWIRE_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    found.push_back(&avx2::kernels);
#endif
#ifdef GRADWIRE_HAVE_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    found.push_back(&avx512::kernels);
#endif
  return found;
}

const std::vector<const Kernels*>& levels() {
  static const std::vector<const Kernels*> found = runnable();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_relaxed);
  return current ? *current : *levels().back();
}

int64_t level_count() { return int64_t(levels().size()); }

void set_level(int64_t index) {
  STD_TORCH_CHECK(index >= 0 && index < level_count(), "SIMD level ", index, " does not run here; there are ", level_count());
  chosen.store(levels()[size_t(index)]);
}

Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half: return Dtype::float16;
    default: STD_TORCH_CHECK(false, "gradwire kernels take float32, bfloat16 and float16 tensors");
  }
}

struct Call {
  const Segment* segments;
  int64_t count;
  Quantiser q;
};

Call check(const Tensor& segments, const Tensor& flat, const Tensor& payload, int64_t block, int64_t scale, int64_t rounding) {
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 5 && segments.is_contiguous() &&
                      segments.scalar_type() == ScalarType::Long, "segments must be a contiguous int64 table of 5 columns");
  STD_TORCH_CHECK(flat.is_contiguous() && payload.is_contiguous() && payload.scalar_type() == ScalarType::Byte,
                  "flat buffer and uint8 payload must be contiguous");
  STD_TORCH_CHECK(block >= 32 && block % 32 == 0 && block <= kMaxBlock, "block of ", block, " elements");
  STD_TORCH_CHECK(scale >= 0 && scale <= 2 && rounding >= 0 && rounding <= 1, "unknown scale or rounding");
  Call call{static_cast<const Segment*>(segments.data_ptr()), segments.size(0), {block, Scale(scale), Rounding(rounding)}};
  for (int64_t i = 0; i < call.count; ++i) {
    const Segment& s = call.segments[i];
    STD_TORCH_CHECK(s.offset >= 0 && s.numel >= 0 && s.offset <= flat.numel() && s.numel <= flat.numel() - s.offset,
                    "segment ", i, " reaches past the flat buffer of ", flat.numel(), " elements");
    STD_TORCH_CHECK(s.bits >= 2 && s.bits <= 8 && s.first >= 0 && s.first % block == 0, "segment ", i, " has impossible bits or start");
  }
  const PayloadSize size = payload_size(call.segments, call.count, call.q);
  STD_TORCH_CHECK(payload.numel() == size.scales + size.codes, "the payload has ", payload.numel(), " bytes where the segments take ",
                  size.scales + size.codes);
  return call;
}

float* residual_of(const std::optional<Tensor>& residual, const Tensor& flat) {
  if (!residual) return nullptr;
  STD_TORCH_CHECK(residual->is_contiguous() && residual->scalar_type() == ScalarType::Float && residual->numel() == flat.numel(),
                  "the residual must be float32 and as long as the flat buffer");
  return static_cast<float*>(residual->data_ptr());
}

void qsgd_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, const Tensor& stream,
                 int64_t block, int64_t scale, int64_t rounding, Tensor payload) {
  const Call call = check(segments, src, payload, block, scale, rounding);
  STD_TORCH_CHECK(stream.numel() == 4 && stream.is_contiguous() && stream.scalar_type() == ScalarType::Long,
                  "the stream is four int64: seed, step, encode, rank");
  const int64_t* s = static_cast<const int64_t*>(stream.data_ptr());
  kernels().qsgd_encode(src.data_ptr(), dtype_of(src), residual_of(residual, src), call.segments, call.count,
                        {s[0], s[1], s[2], s[3]}, call.q, static_cast<uint8_t*>(payload.data_ptr()));
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
  STD_TORCH_CHECK(flat.is_contiguous() && payload.is_contiguous() && payload.scalar_type() == ScalarType::Byte,
                  "flat buffer and uint8 payload must be contiguous");
  STD_TORCH_CHECK(payload.numel() == 2 * flat.numel(), "the payload has ", payload.numel(), " bytes where ", flat.numel(),
                  " elements take ", 2 * flat.numel());
}

void cast_encode(const Tensor& src, const std::optional<Tensor>& residual, int64_t wire, Tensor payload) {
  cast_check(src, payload);
  kernels().cast_encode(src.data_ptr(), dtype_of(src), residual_of(residual, src), src.numel(), wire_of(wire),
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
