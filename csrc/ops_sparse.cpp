// The ops of the sparsifiers: Top-k, Threshold, DGC, Block Top-k and Random-k.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <memory>

#include "ops.hpp"

namespace gradwire {
namespace {

constexpr const char* kDamaged = "the payload's indices are damaged";
constexpr int64_t kStreamBytes = 8;

void check_ratio(double ratio) { STD_TORCH_CHECK(ratio > 0.0 && ratio <= 1.0, "a ratio of ", ratio, " is no part of the elements"); }

int64_t item_bytes(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

Dtype value_dtype(int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= 2, "values are float32 (0), bfloat16 (1) or float16 (2)");
  return Dtype(value);
}

void check_numel(int64_t numel) {
  STD_TORCH_CHECK(numel <= kMaxGroup, "a group of ", numel, " elements: indices reach to ", kMaxGroup);
}

uint8_t* bytes_of(const Tensor& payload) { return static_cast<uint8_t*>(payload.data_ptr()); }

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
  check_payload(payload, s.bytes);
  return s;
}

void select_encode(const Tensor& src, float* residual, float* momentum, const Tensor& segments, const Selector& selector,
                   const Tensor& payload) {
  const Dtype dtype = dtype_of(src);
  const Selection s = selection_of(src, segments, payload, selector, dtype);
  const std::unique_ptr<uint32_t[]> room(new uint32_t[size_t(4 * s.capacity)]);
  kernels().select_encode(src.data_ptr(), dtype, residual, momentum, s.table.rows, s.table.count, selector,
                          {room.get(), s.capacity}, bytes_of(payload));
}

void topk_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, double ratio, bool together,
                 double threshold, Tensor payload) {
  select_encode(src, remembered(residual, src), nullptr, segments, {ratio, together, float(threshold), 0.0f, 0.0}, payload);
}

void dgc_encode(const Tensor& src, const std::optional<Tensor>& residual, const std::optional<Tensor>& momentum,
                const Tensor& segments, double ratio, double decay, double bound, Tensor payload) {
  STD_TORCH_CHECK(residual.has_value() == momentum.has_value(), "residual and momentum are given together");
  select_encode(src, remembered(residual, src), remembered(momentum, src), segments, {ratio, false, 0.0f, float(decay), bound},
                payload);
}

void topk_decode(const Tensor& payload, const Tensor& segments, int64_t value, double ratio, bool together, bool add,
                 Tensor dst) {
  const Dtype wire = value_dtype(value);
  const Selection s = selection_of(dst, segments, payload, {ratio, together, 0.0f, 0.0f, 0.0}, wire);
  STD_TORCH_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
  const std::unique_ptr<uint32_t[]> index(new uint32_t[size_t(s.kept)]);
  const bool right = kernels().select_decode(bytes_of(payload), wire, dst.data_ptr(), dtype_of(dst), add, s.table.rows,
                                             s.table.count, s.selector, index.get());
  STD_TORCH_CHECK(right, kDamaged);
}

Table block_table(const Tensor& flat, const Tensor& segments, const Tensor& payload, double ratio, int64_t block, Dtype value) {
  check_ratio(ratio);
  STD_TORCH_CHECK(block >= 32 && block <= 256 && block % 32 == 0, "block of ", block, " elements");
  check_buffers(flat, payload);
  const Table table = table_of(segments, flat, block);
  int64_t kept = 0;
  for (int64_t i = 0; i < table.count; ++i) kept += block_kept(table.rows[i].numel, block, ratio);
  check_payload(payload, kept * (item_bytes(value) + 1));
  return table;
}

void block_topk_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, double ratio,
                       int64_t block, Tensor payload) {
  const Dtype dtype = dtype_of(src);
  const Table table = block_table(src, segments, payload, ratio, block, dtype);
  kernels().block_topk_encode(src.data_ptr(), dtype, remembered(residual, src), table.rows, table.count, block, ratio,
                              bytes_of(payload));
}

void block_topk_decode(const Tensor& payload, const Tensor& segments, int64_t value, double ratio, int64_t block, bool add,
                       Tensor dst) {
  const Dtype wire = value_dtype(value);
  const Table table = block_table(dst, segments, payload, ratio, block, wire);
  STD_TORCH_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
  const bool right = kernels().block_topk_decode(bytes_of(payload), wire, dst.data_ptr(), dtype_of(dst), add, table.rows,
                                                 table.count, block, ratio);
  STD_TORCH_CHECK(right, kDamaged);
}

// Checks that `values` holds the drawn elements of all segments, after `before` bytes.
Table random_table(const Tensor& flat, const Tensor& segments, const Tensor& values, double ratio, Dtype value, int64_t before) {
  check_ratio(ratio);
  check_buffers(flat, values);
  const Table table = table_of(segments, flat, 1);
  int64_t kept = 0;
  for (int64_t i = 0; i < table.count; ++i) {
    check_numel(table.rows[i].numel);
    kept += kept_of(table.rows[i].numel, ratio);
  }
  check_payload(values, before + kept * item_bytes(value));
  return table;
}

uint64_t common_base(const Tensor& stream) {  // the same on all ranks and for every encode of a step
  const Stream s = stream_of(stream);
  return kernels().stream_base({s.seed, s.step, 0, 0});
}

void randomk_encode(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, const Tensor& stream,
                    double ratio, Tensor payload) {
  const Dtype dtype = dtype_of(src);
  const Table table = random_table(src, segments, payload, ratio, dtype, kStreamBytes);
  const uint64_t base = kernels().stream_base(stream_of(stream));
  for (int i = 0; i < kStreamBytes; ++i) bytes_of(payload)[i] = uint8_t(base >> (8 * i));
  kernels().random_gather(src.data_ptr(), dtype, remembered(residual, src), table.rows, table.count, ratio, base, false,
                          bytes_of(payload) + kStreamBytes);
}

void randomk_decode(const Tensor& payload, const Tensor& segments, int64_t value, double ratio, bool add, Tensor dst) {
  const Dtype wire = value_dtype(value);
  const Table table = random_table(dst, segments, payload, ratio, wire, kStreamBytes);
  STD_TORCH_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
  uint64_t base = 0;
  for (int i = 0; i < kStreamBytes; ++i) base |= uint64_t(bytes_of(payload)[i]) << (8 * i);
  kernels().random_scatter(bytes_of(payload) + kStreamBytes, wire, dst.data_ptr(), dtype_of(dst), add, table.rows, table.count,
                           ratio, base);
}

void gather_random(const Tensor& src, const std::optional<Tensor>& residual, const Tensor& segments, const Tensor& stream,
                   double ratio, Tensor values) {
  const Table table = random_table(src, segments, values, ratio, Dtype::float32, 0);
  kernels().random_gather(src.data_ptr(), dtype_of(src), remembered(residual, src), table.rows, table.count, ratio,
                          common_base(stream), true, bytes_of(values));
}

void scatter_random(const Tensor& values, const Tensor& segments, const Tensor& stream, double ratio, bool add, Tensor dst) {
  const Table table = random_table(dst, segments, values, ratio, Dtype::float32, 0);
  STD_TORCH_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
  kernels().random_scatter(bytes_of(values), Dtype::float32, dst.data_ptr(), dtype_of(dst), add, table.rows, table.count, ratio,
                           common_base(stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(gradwire, m) {
  m.def("topk_encode(Tensor src, Tensor(b!)? residual, Tensor segments, float ratio, bool together, float threshold, "
        "Tensor(a!) payload) -> ()");
  m.def("dgc_encode(Tensor src, Tensor(b!)? residual, Tensor(c!)? momentum, Tensor segments, float ratio, float decay, "
        "float bound, Tensor(a!) payload) -> ()");
  m.def("topk_decode(Tensor payload, Tensor segments, int value, float ratio, bool together, bool add, Tensor(a!) dst) -> ()");
  m.def("block_topk_encode(Tensor src, Tensor(b!)? residual, Tensor segments, float ratio, int block, Tensor(a!) payload) "
        "-> ()");
  m.def("block_topk_decode(Tensor payload, Tensor segments, int value, float ratio, int block, bool add, Tensor(a!) dst) "
        "-> ()");
  m.def("randomk_encode(Tensor src, Tensor(b!)? residual, Tensor segments, Tensor stream, float ratio, Tensor(a!) payload) "
        "-> ()");
  m.def("randomk_decode(Tensor payload, Tensor segments, int value, float ratio, bool add, Tensor(a!) dst) -> ()");
  m.def("gather_random(Tensor src, Tensor(b!)? residual, Tensor segments, Tensor stream, float ratio, Tensor(a!) values) "
        "-> ()");
  m.def("scatter_random(Tensor values, Tensor segments, Tensor stream, float ratio, bool add, Tensor(a!) dst) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gradwire, CPU, m) {
  m.impl("topk_encode", TORCH_BOX(&topk_encode));
  m.impl("dgc_encode", TORCH_BOX(&dgc_encode));
  m.impl("topk_decode", TORCH_BOX(&topk_decode));
  m.impl("block_topk_encode", TORCH_BOX(&block_topk_encode));
  m.impl("block_topk_decode", TORCH_BOX(&block_topk_decode));
  m.impl("randomk_encode", TORCH_BOX(&randomk_encode));
  m.impl("randomk_decode", TORCH_BOX(&randomk_decode));
  m.impl("gather_random", TORCH_BOX(&gather_random));
  m.impl("scatter_random", TORCH_BOX(&scatter_random));
}

}  // namespace gradwire
