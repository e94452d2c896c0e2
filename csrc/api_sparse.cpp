// The sparsifiers: Top-k, Threshold, DGC, Block Top-k and Random-k.
#include "packed.hpp"

namespace gradwire {
namespace {

constexpr const char* kDamaged = "the payload's indices are damaged";
constexpr int64_t kStreamBytes = 8;

void check_ratio(double ratio) { GW_CHECK(ratio > 0.0 && ratio <= 1.0, "a ratio of %g is no part of the elements", ratio); }

Dtype value_dtype(int64_t value) {
  GW_CHECK(value >= 0 && value <= 2, "values are float32 (0), bfloat16 (1) or float16 (2)");
  return Dtype(value);
}

void check_numel(int64_t numel) {
  GW_CHECK(numel <= kMaxGroup, "a group of %lld elements: indices reach to %lld", Long(numel), Long(kMaxGroup));
}

// The segments of a call, and what its payload takes.
struct Selection {
  Table table;
  Selector selector;
  int64_t kept = 0, bytes = 0, capacity = 0;

  void group(int64_t numel, int64_t itemsize) {
    check_numel(numel);
    const int64_t k = kept_of(numel, selector.ratio), room = candidate_capacity(k, numel);
    kept += k;
    bytes += k * itemsize + index_bytes(k, numel);
    capacity = room > capacity ? room : capacity;
  }
};

Selection selection_of(const Tensor& flat, const Tensor& segments, const Tensor& payload, const Selector& selector,
                       Dtype value) {
  check_ratio(selector.ratio);
  check_buffers(flat, payload);
  Selection s{table_of(segments, flat, 1), selector};
  int64_t all = 0;
  for (int64_t i = 0; i < s.table.count; ++i) {
    const int64_t numel = s.table.rows[i].numel;
    if (!selector.together) s.group(numel, item_bytes(value));
    all += numel;
    check_numel(all * int64_t(selector.together));
  }
  if (selector.together) s.group(all, item_bytes(value));
  check_payload(payload.numel, s.bytes);
  return s;
}

void select_encode(const Tensor& src, float* residual, float* momentum, const Tensor& segments, const Selector& selector,
                   const Tensor& payload) {
  const Dtype dtype = dtype_of(src);
  const Selection s = selection_of(src, segments, payload, selector, dtype);
  const std::unique_ptr<uint32_t[]> room(new uint32_t[size_t(4 * s.capacity)]);
  const FlatGradient flat(src, s.table);
  kernels().select_encode(flat.data(), dtype, residual, momentum, s.table.rows, s.table.count, selector,
                          {room.get(), s.capacity}, bytes_of(payload));
}

Table block_table(const Tensor& flat, const Tensor& segments, const Tensor& payload, double ratio, int64_t block, Dtype value) {
  check_ratio(ratio);
  GW_CHECK(block >= 32 && block <= 256 && block % 32 == 0, "block of %lld elements", Long(block));
  check_buffers(flat, payload);
  const Table table = table_of(segments, flat, block);
  int64_t kept = 0;
  for (int64_t i = 0; i < table.count; ++i) kept += block_kept(table.rows[i].numel, block, ratio);
  check_payload(payload.numel, kept * (item_bytes(value) + 1));
  return table;
}

// Checks that so many bytes hold the drawn elements of all segments, after `before` bytes.
Table random_table(const Tensor& flat, const Tensor& segments, int64_t bytes, double ratio, Dtype value, int64_t before) {
  check_ratio(ratio);
  const Table table = table_of(segments, flat, 1);
  int64_t kept = 0;
  for (int64_t i = 0; i < table.count; ++i) {
    check_numel(table.rows[i].numel);
    kept += kept_of(table.rows[i].numel, ratio);
  }
  check_payload(bytes, before + kept * item_bytes(value));
  return table;
}

// A payload of Random-k begins with the key of its random stream.
Table random_payload(const Tensor& flat, const Tensor& segments, const Tensor& payload, double ratio, Dtype value) {
  check_buffers(flat, payload);
  return random_table(flat, segments, payload.numel, ratio, value, kStreamBytes);
}

// Values of the elements that all ranks draw alike, as float32.
Table common_values(const Tensor& flat, const Tensor& segments, const Tensor& values, double ratio) {
  GW_CHECK(flat.contiguous && values.contiguous && values.dtype == int32_t(Dtype::float32),
           "flat buffer and float32 values must be contiguous");
  return random_table(flat, segments, 4 * values.numel, ratio, Dtype::float32, 0);
}

uint64_t common_base(const Tensor& stream) {  // the same on all ranks and for every encode of a step
  const Stream s = stream_of(stream);
  return kernels().stream_base({s.seed, s.step, 0, 0});
}

}  // namespace
}  // namespace gradwire

using namespace gradwire;

GW_API gw_topk_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, double ratio, bool together,
                      double threshold, const Tensor* payload) {
  return guarded([&] {
    select_encode(*src, remembered(residual, *src), nullptr, *segments, {ratio, together, float(threshold), 0.0f, 0.0}, *payload);
  });
}

GW_API gw_dgc_encode(const Tensor* src, const Tensor* residual, const Tensor* momentum, const Tensor* segments, double ratio,
                     double decay, double bound, const Tensor* payload) {
  return guarded([&] {
    GW_CHECK(!residual == !momentum, "residual and momentum are given together");
    select_encode(*src, remembered(residual, *src), remembered(momentum, *src), *segments,
                  {ratio, false, 0.0f, float(decay), bound}, *payload);
  });
}

GW_API gw_topk_decode(const Tensor* payload, const Tensor* segments, int64_t value, double ratio, bool together, bool add,
                      const Tensor* dst) {
  return guarded([&] {
    const Dtype wire = value_dtype(value);
    const Selection s = selection_of(*dst, *segments, *payload, {ratio, together, 0.0f, 0.0f, 0.0}, wire);
    check_add(add, *dst);
    const std::unique_ptr<uint32_t[]> index(new uint32_t[size_t(s.kept)]);
    const bool right = kernels().select_decode(bytes_of(*payload), wire, s.table.data, dtype_of(*dst), add, s.table.placed,
                                               s.table.count, s.selector, index.get());
    GW_CHECK(right, "%s", kDamaged);
  });
}

GW_API gw_block_topk_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, double ratio, int64_t block,
                            const Tensor* payload) {
  return guarded([&] {
    const Dtype dtype = dtype_of(*src);
    const Table table = block_table(*src, *segments, *payload, ratio, block, dtype);
    const FlatGradient flat(*src, table);
    kernels().block_topk_encode(flat.data(), dtype, remembered(residual, *src), table.rows, table.count, block, ratio,
                                bytes_of(*payload));
  });
}

GW_API gw_block_topk_decode(const Tensor* payload, const Tensor* segments, int64_t value, double ratio, int64_t block, bool add,
                            const Tensor* dst) {
  return guarded([&] {
    const Dtype wire = value_dtype(value);
    const Table table = block_table(*dst, *segments, *payload, ratio, block, wire);
    check_add(add, *dst);
    const bool right = kernels().block_topk_decode(bytes_of(*payload), wire, table.data, dtype_of(*dst), add, table.placed,
                                                   table.count, block, ratio);
    GW_CHECK(right, "%s", kDamaged);
  });
}

GW_API gw_randomk_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, const Tensor* stream, double ratio,
                         const Tensor* payload) {
  return guarded([&] {
    const Dtype dtype = dtype_of(*src);
    const Table table = random_payload(*src, *segments, *payload, ratio, dtype);
    const uint64_t base = kernels().stream_base(stream_of(*stream));
    for (int i = 0; i < kStreamBytes; ++i) bytes_of(*payload)[i] = uint8_t(base >> (8 * i));
    const FlatGradient flat(*src, table);
    kernels().random_gather(flat.data(), dtype, remembered(residual, *src), table.rows, table.count, ratio, base, false,
                            bytes_of(*payload) + kStreamBytes);
  });
}

GW_API gw_randomk_decode(const Tensor* payload, const Tensor* segments, int64_t value, double ratio, bool add, const Tensor* dst) {
  return guarded([&] {
    const Dtype wire = value_dtype(value);
    const Table table = random_payload(*dst, *segments, *payload, ratio, wire);
    check_add(add, *dst);
    uint64_t base = 0;
    for (int i = 0; i < kStreamBytes; ++i) base |= uint64_t(bytes_of(*payload)[i]) << (8 * i);
    kernels().random_scatter(bytes_of(*payload) + kStreamBytes, wire, table.data, dtype_of(*dst), add, table.placed, table.count,
                             ratio, base);
  });
}

GW_API gw_gather_random(const Tensor* src, const Tensor* residual, const Tensor* segments, const Tensor* stream, double ratio,
                        const Tensor* values) {
  return guarded([&] {
    const Table table = common_values(*src, *segments, *values, ratio);
    kernels().random_gather(src->data, dtype_of(*src), remembered(residual, *src), table.rows, table.count, ratio,
                            common_base(*stream), true, bytes_of(*values));
  });
}

GW_API gw_scatter_random(const Tensor* values, const Tensor* segments, const Tensor* stream, double ratio, bool add,
                         const Tensor* dst) {
  return guarded([&] {
    const Table table = common_values(*dst, *segments, *values, ratio);
    check_add(add, *dst);
    kernels().random_scatter(bytes_of(*values), Dtype::float32, dst->data, dtype_of(*dst), add, table.rows, table.count, ratio,
                             common_base(*stream));
  });
}

GW_PACKED(topk_encode)
GW_PACKED(dgc_encode)
GW_PACKED(topk_decode)
GW_PACKED(block_topk_encode)
GW_PACKED(block_topk_decode)
GW_PACKED(randomk_encode)
GW_PACKED(randomk_decode)
GW_PACKED(gather_random)
GW_PACKED(scatter_random)
