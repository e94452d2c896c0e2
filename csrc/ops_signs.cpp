// Registers the ops of signs and of ternary codes through libtorch's stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "ops.hpp"

namespace gradwire {
namespace {

// Checks everything but what only one op has; block 0: a run is one block.
Table checked(const Tensor& segments, const Tensor& flat, const Tensor& payload, int64_t block, int64_t scales, int64_t bits) {
  STD_TORCH_CHECK(block == 0 || (block >= 32 && block % 32 == 0 && block <= kMaxBlock && (block & (block - 1)) == 0),
                  "block of ", block, " elements");
  check_buffers(flat, payload);
  const Table table = table_of(segments, flat, block ? block : 1);
  const PayloadSize size = coded_size(table.rows, table.count, block, scales, bits);
  check_payload(payload, size.scales + size.codes);
  return table;
}

void check_add(bool add, const Tensor& dst) {
  STD_TORCH_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
}

void sign_encode(const Tensor& src, const std::optional<Tensor>& momentum, double keep, const Tensor& segments, Tensor payload) {
  const Table table = checked(segments, src, payload, 0, 0, 1);
  kernels().sign_encode(src.data_ptr(), dtype_of(src), remembered(momentum, src), float(keep), float(1.0 - keep), table.rows,
                        table.count, static_cast<uint8_t*>(payload.data_ptr()));
}

void mean_sign_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, int64_t block,
                      int64_t means, Tensor payload) {
  STD_TORCH_CHECK(means == 1 || means == 2, "a block has 1 or 2 means, not ", means);
  const Table table = checked(segments, src, payload, block, means, 1);
  kernels().mean_sign_encode(src.data_ptr(), dtype_of(src), remembered(residual, src), table.rows, table.count, block,
                             int(means), static_cast<uint8_t*>(payload.data_ptr()));
}

void sign_decode(const Tensor& payload, const Tensor& segments, int64_t block, int64_t means, bool add, Tensor dst) {
  STD_TORCH_CHECK(means >= 0 && means <= 2, "a block has 0, 1 or 2 means, not ", means);
  const Table table = checked(segments, dst, payload, block, means, 1);
  check_add(add, dst);
  kernels().sign_decode(static_cast<const uint8_t*>(payload.data_ptr()), dst.data_ptr(), dtype_of(dst), add, table.rows,
                        table.count, block, int(means));
}

Ternary ternary_of(int64_t block, double threshold, double multiple) {
  STD_TORCH_CHECK(block != 0, "block of 0 elements");
  STD_TORCH_CHECK(threshold >= 0.0 && float(threshold) < 0x1p126f, "a threshold of ", threshold);
  STD_TORCH_CHECK((threshold == 0.0) == (float(threshold) == 0.0f), "a threshold of ", threshold, " is zero in float32");
  STD_TORCH_CHECK(multiple > 0.0 && multiple < 0x1p126, "a multiple of ", multiple);
  return {block, float(threshold), multiple};
}

void threshold_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, int64_t block,
                      double threshold, double multiple, Tensor payload) {
  const Ternary q = ternary_of(block, threshold, multiple);
  const Table table = checked(segments, src, payload, block, threshold > 0.0 ? 0 : 1, 2);
  kernels().threshold_encode(src.data_ptr(), dtype_of(src), remembered(residual, src), table.rows, table.count, q,
                             static_cast<uint8_t*>(payload.data_ptr()));
}

void threshold_decode(const Tensor& payload, const Tensor& segments, int64_t block, double threshold, bool add, Tensor dst) {
  const Ternary q = ternary_of(block, threshold, 1.0);
  const Table table = checked(segments, dst, payload, block, threshold > 0.0 ? 0 : 1, 2);
  check_add(add, dst);
  kernels().threshold_decode(static_cast<const uint8_t*>(payload.data_ptr()), dst.data_ptr(), dtype_of(dst), add, table.rows,
                             table.count, q);
}

void terngrad_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, const Tensor& stream,
                     int64_t block, double clip, Tensor payload) {
  STD_TORCH_CHECK(block != 0, "block of 0 elements");
  STD_TORCH_CHECK(clip > 0.0, "clipping at ", clip, " root mean squares");
  const Table table = checked(segments, src, payload, block, 1, 2);
  for (int64_t i = 0; i < table.count; ++i)
    STD_TORCH_CHECK(table.rows[i].bits == 2, "segment ", i, " has impossible bits");
  kernels().terngrad_encode(src.data_ptr(), dtype_of(src), remembered(residual, src), table.rows, table.count,
                            stream_of(stream), block, clip, static_cast<uint8_t*>(payload.data_ptr()));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gradwire, m) {
  m.def("sign_encode(Tensor src, Tensor(b!)? momentum, float keep, Tensor segments, Tensor(a!) payload) -> ()");
  m.def("mean_sign_encode(Tensor src, Tensor(b!)? residual, Tensor segments, int block, int means, Tensor(a!) payload) -> ()");
  m.def("sign_decode(Tensor payload, Tensor segments, int block, int means, bool add, Tensor(a!) dst) -> ()");
  m.def("threshold_encode(Tensor src, Tensor(b!)? residual, Tensor segments, int block, float threshold, float multiple, "
        "Tensor(a!) payload) -> ()");
  m.def("threshold_decode(Tensor payload, Tensor segments, int block, float threshold, bool add, Tensor(a!) dst) -> ()");
  m.def("terngrad_encode(Tensor src, Tensor(b!)? residual, Tensor segments, Tensor stream, int block, float clip, "
        "Tensor(a!) payload) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gradwire, CPU, m) {
  m.impl("sign_encode", TORCH_BOX(&sign_encode));
  m.impl("mean_sign_encode", TORCH_BOX(&mean_sign_encode));
  m.impl("sign_decode", TORCH_BOX(&sign_decode));
  m.impl("threshold_encode", TORCH_BOX(&threshold_encode));
  m.impl("threshold_decode", TORCH_BOX(&threshold_decode));
  m.impl("terngrad_encode", TORCH_BOX(&terngrad_encode));
}

}  // namespace gradwire
