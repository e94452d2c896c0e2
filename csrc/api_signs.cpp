// Signs and ternary codes.
#include "packed.hpp"

namespace gradwire {
namespace {

// Checks everything but what only one function has; block 0: a run is one block.
Table checked(const Tensor& segments, const Tensor& flat, const Tensor& payload, int64_t block, int64_t scales, int64_t bits,
              bool ternary = false) {
  GW_CHECK(block == 0 || (block >= 32 && block % 32 == 0 && block <= kMaxBlock && (block & (block - 1)) == 0),
           "block of %lld elements", Long(block));
  check_buffers(flat, payload);
  const Table table = table_of(segments, flat, block ? block : 1);
  const PayloadSize size = coded_size(table.rows, table.count, block, scales, bits, ternary);
  check_payload(payload.numel, size.scales + size.codes);
  return table;
}

Ternary ternary_of(int64_t block, double threshold, double multiple) {
  GW_CHECK(block != 0, "block of 0 elements");
  GW_CHECK(threshold >= 0.0 && float(threshold) < 0x1p126f, "a threshold of %g", threshold);
  GW_CHECK((threshold == 0.0) == (float(threshold) == 0.0f), "a threshold of %g is zero in float32", threshold);
  GW_CHECK(multiple > 0.0 && multiple < 0x1p126, "a multiple of %g", multiple);
  return {block, float(threshold), multiple};
}

}  // namespace
}  // namespace gradwire

using namespace gradwire;

GW_API gw_sign_encode(const Tensor* src, const Tensor* momentum, double keep, const Tensor* segments, const Tensor* payload) {
  return guarded([&] {
    const Table table = checked(*segments, *src, *payload, 0, 0, 1);
    const FlatGradient flat(*src, table);
    kernels().sign_encode(flat.data(), dtype_of(*src), remembered(momentum, *src), float(keep), float(1.0 - keep), table.rows,
                          table.count, bytes_of(*payload));
  });
}

GW_API gw_mean_sign_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, int64_t block, int64_t means,
                           const Tensor* payload) {
  return guarded([&] {
    GW_CHECK(means == 1 || means == 2, "a block has 1 or 2 means, not %lld", Long(means));
    const Table table = checked(*segments, *src, *payload, block, means, 1);
    const FlatGradient flat(*src, table);
    kernels().mean_sign_encode(flat.data(), dtype_of(*src), remembered(residual, *src), table.rows, table.count, block, int(means),
                               bytes_of(*payload));
  });
}

GW_API gw_sign_decode(const Tensor* payload, const Tensor* segments, int64_t block, int64_t means, bool add, const Tensor* dst) {
  return guarded([&] {
    GW_CHECK(means >= 0 && means <= 2, "a block has 0, 1 or 2 means, not %lld", Long(means));
    const Table table = checked(*segments, *dst, *payload, block, means, 1);
    check_add(add, *dst);
    kernels().sign_decode(bytes_of(*payload), table.data, dtype_of(*dst), add, table.placed, table.count, block, int(means));
  });
}

GW_API gw_threshold_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, int64_t block, double threshold,
                           double multiple, const Tensor* payload) {
  return guarded([&] {
    const Ternary q = ternary_of(block, threshold, multiple);
    const Table table = checked(*segments, *src, *payload, block, threshold > 0.0 ? 0 : 1, 2);
    kernels().threshold_encode(gradient_of(*src, table), remembered(residual, *src), table.rows, table.count, q,
                               bytes_of(*payload));
  });
}

GW_API gw_threshold_decode(const Tensor* payload, const Tensor* segments, int64_t block, double threshold, bool add,
                           const Tensor* dst) {
  return guarded([&] {
    const Ternary q = ternary_of(block, threshold, 1.0);
    const Table table = checked(*segments, *dst, *payload, block, threshold > 0.0 ? 0 : 1, 2);
    check_add(add, *dst);
    kernels().threshold_decode(bytes_of(*payload), table.data, dtype_of(*dst), add, table.placed, table.count, q);
  });
}

GW_API gw_terngrad_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, const Tensor* stream, int64_t block,
                          double clip, const Tensor* payload) {
  return guarded([&] {
    GW_CHECK(block != 0, "block of 0 elements");
    GW_CHECK(clip > 0.0, "clipping at %g root mean squares", clip);
    const Table table = checked(*segments, *src, *payload, block, 1, 2, true);
    for (int64_t i = 0; i < table.count; ++i) check_bits(table.rows[i], i, 2, 2);
    kernels().terngrad_encode(gradient_of(*src, table), remembered(residual, *src), table.rows, table.count, stream_of(*stream),
                              block, clip, bytes_of(*payload));
  });
}

GW_PACKED(sign_encode)
GW_PACKED(mean_sign_encode)
GW_PACKED(sign_decode)
GW_PACKED(threshold_encode)
GW_PACKED(threshold_decode)
GW_PACKED(terngrad_encode)
