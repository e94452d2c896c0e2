// The ops of FP8, natural compression and QSGD's exponential levels.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "ops.hpp"

namespace gradwire {
namespace {

struct Call {
  Table table;
  Scaled how;
};

Call check(const Tensor& segments, const Tensor& flat, const Tensor& payload, int64_t code, int64_t block, int64_t scale,
           int64_t rounding) {
  STD_TORCH_CHECK(block >= 32 && block % 32 == 0 && block <= kMaxBlock, "block of ", block, " elements");
  STD_TORCH_CHECK(code >= 0 && code <= 3, "unknown code ", code);
  STD_TORCH_CHECK((scale == 0 || scale == 2) && rounding >= 0 && rounding <= 1, "unknown scale or rounding");
  check_buffers(flat, payload);
  const Call call{table_of(segments, flat, block), {block, Code(code), Scale(scale), Rounding(rounding)}};
  const bool own_bits = call.how.code == Code::exponential;
  for (int64_t i = 0; own_bits && i < call.table.count; ++i)
    STD_TORCH_CHECK(call.table.rows[i].bits >= 2 && call.table.rows[i].bits <= 8, "segment ", i, " has impossible bits");
  const PayloadSize size = coded_size(call.table.rows, call.table.count, block, 1, own_bits ? 0 : 8);
  check_payload(payload, size.scales + size.codes);
  return call;
}

void scaled_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, const Tensor& stream,
                   int64_t code, int64_t block, int64_t scale, int64_t rounding, Tensor payload) {
  const Call call = check(segments, src, payload, code, block, scale, rounding);
  kernels().scaled_encode(src.data_ptr(), dtype_of(src), remembered(residual, src), call.table.rows, call.table.count,
                          stream_of(stream), call.how, static_cast<uint8_t*>(payload.data_ptr()));
}

void scaled_decode(const Tensor& payload, const Tensor& segments, int64_t code, int64_t block, bool add, Tensor dst) {
  const Call call = check(segments, dst, payload, code, block, 0, 0);
  STD_TORCH_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
  kernels().scaled_decode(static_cast<const uint8_t*>(payload.data_ptr()), dst.data_ptr(), dtype_of(dst), add, call.table.rows,
                          call.table.count, call.how);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gradwire, m) {
  m.def("scaled_encode(Tensor src, Tensor(b!)? residual, Tensor segments, Tensor stream, int code, int block, int scale, "
        "int rounding, Tensor(a!) payload) -> ()");
  m.def("scaled_decode(Tensor payload, Tensor segments, int code, int block, bool add, Tensor(a!) dst) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gradwire, CPU, m) {
  m.impl("scaled_encode", TORCH_BOX(&scaled_encode));
  m.impl("scaled_decode", TORCH_BOX(&scaled_decode));
}

}  // namespace gradwire
