// QSGD, casts, FP8, natural compression and QSGD's exponential levels.
#include "checksum.hpp"
#include "packed.hpp"

namespace gradwire {
namespace {

struct Call {
  Table table;
  Quantiser q;
};

void check_block(int64_t block) {
  GW_CHECK(block >= 32 && block % 32 == 0 && block <= kMaxBlock, "block of %lld elements", Long(block));
}

Call checked(const Tensor& segments, const Tensor& flat, const Tensor& payload, int64_t block, int64_t scale, int64_t rounding) {
  check_block(block);
  GW_CHECK(scale >= 0 && scale <= 2 && rounding >= 0 && rounding <= 1, "unknown scale or rounding");
  check_buffers(flat, payload);
  const Call call{table_of(segments, flat, block), {block, Scale(scale), Rounding(rounding)}};
  for (int64_t i = 0; i < call.table.count; ++i) check_bits(call.table.rows[i], i, 2, 8);
  const PayloadSize size = payload_size(call.table.rows, call.table.count, call.q);
  check_payload(payload.numel, size.scales + size.codes);
  return call;
}

Call checked_fitted(const Tensor& segments, const Tensor& flat, const Tensor& payload, int64_t block, int64_t levels) {
  check_block(block);
  GW_CHECK(levels == 0 || levels == 1, "unknown levels");
  check_buffers(flat, payload);
  const Call call{table_of(segments, flat, block), {block, Scale::max, Rounding::nearest}};
  for (int64_t i = 0; i < call.table.count; ++i) check_bits(call.table.rows[i], i, 2, 4);
  const PayloadSize size = coded_size(call.table.rows, call.table.count, block, 1, 0, levels == 0);
  check_payload(payload.numel, size.scales + size.codes);
  return call;
}

// Elements that are cast before their bytes are summed, which are still in the nearest cache then.
constexpr int64_t kCastTile = 4096;

Dtype wire_of(int64_t wire) {
  GW_CHECK(wire == 1 || wire == 2, "the wire dtype is bfloat16 (1) or float16 (2)");
  return Dtype(wire);
}

void check_cast(const Tensor& flat, const Tensor& payload) {
  check_buffers(flat, payload);
  GW_CHECK(flat.contiguous, "a cast takes a flat buffer as a whole");
  GW_CHECK(payload.numel == 2 * flat.numel, "the payload has %lld bytes where %lld elements take %lld", Long(payload.numel),
           Long(flat.numel), Long(2 * flat.numel));
}

struct ScaledCall {
  Table table;
  Scaled how;
};

ScaledCall checked_scaled(const Tensor& segments, const Tensor& flat, const Tensor& payload, const Scaled& how) {
  check_block(how.block);
  GW_CHECK(how.scale == Scale::max || how.scale == Scale::l2, "unknown scale");
  GW_CHECK(how.rounding == Rounding::stochastic || how.rounding == Rounding::nearest, "unknown rounding");
  check_buffers(flat, payload);
  const ScaledCall call{table_of(segments, flat, how.block), how};
  const bool own_bits = how.code == Code::exponential;
  for (int64_t i = 0; own_bits && i < call.table.count; ++i) check_bits(call.table.rows[i], i, 2, 8);
  const PayloadSize size = coded_size(call.table.rows, call.table.count, how.block, 1, own_bits ? 0 : 8);
  check_payload(payload.numel, size.scales + size.codes);
  return call;
}

Code fp8_of(int64_t format) {
  GW_CHECK(format == 0 || format == 1, "FP8 is e4m3 (0) or e5m2 (1)");
  return Code(format);
}

void encode_scaled(const Tensor* src, const Tensor* residual, const Tensor* segments, const Stream& stream,
                   const Scaled& how, const Tensor* payload) {
  ScaledCall call = checked_scaled(*segments, *src, *payload, how);
  encode_and_sum(*payload, [&](Summing* sum) {
    call.how.summing = sum;
    kernels().scaled_encode(gradient_of(*src, call.table), remembered(residual, *src), call.table.rows, call.table.count, stream,
                            call.how, bytes_of(*payload));
  });
}

void decode_scaled(const Tensor* payload, const Tensor* segments, Code code, int64_t block, bool add, const Tensor* dst) {
  const ScaledCall call = checked_scaled(*segments, *dst, *payload, {block, code, Scale::max, Rounding::stochastic});
  check_add(add, *dst);
  kernels().scaled_decode(bytes_of(*payload), call.table.data, dtype_of(*dst), add, call.table.placed, call.table.count,
                          call.how);
}

}  // namespace
}  // namespace gradwire

using namespace gradwire;

GW_API gw_qsgd_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, const Tensor* stream, int64_t block,
                      int64_t scale, int64_t rounding, const Tensor* payload) {
  return guarded([&] {
    Call call = checked(*segments, *src, *payload, block, scale, rounding);
    encode_and_sum(*payload, [&](Summing* sum) {
      call.q.summing = sum;
      kernels().qsgd_encode(gradient_of(*src, call.table), remembered(residual, *src), call.table.rows, call.table.count,
                            stream_of(*stream), call.q, bytes_of(*payload));
    });
  });
}

GW_API gw_qsgd_decode(const Tensor* payload, const Tensor* segments, int64_t block, int64_t scale, bool add, const Tensor* dst) {
  return guarded([&] {
    const Call call = checked(*segments, *dst, *payload, block, scale, 0);
    check_add(add, *dst);
    kernels().qsgd_decode(bytes_of(*payload), call.table.data, dtype_of(*dst), add, call.table.placed, call.table.count, call.q);
  });
}

GW_API gw_fitted_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, const Tensor* weights, int64_t block,
                        int64_t levels, const Tensor* payload) {
  return guarded([&] {
    Call call = checked_fitted(*segments, *src, *payload, block, levels);
    float* const left = remembered(residual, *src);
    call.q.weights = weights_of(weights, *src);
    call.q.residual = left;
    GW_CHECK(residual || !weights, "weights need a residual");
    encode_and_sum(*payload, [&](Summing* sum) {
      call.q.summing = sum;
      kernels().fitted_encode(gradient_of(*src, call.table), left, call.table.rows, call.table.count, call.q, levels == 1,
                              bytes_of(*payload));
    });
  });
}

GW_API gw_fitted_decode(const Tensor* payload, const Tensor* segments, const Tensor* weights, int64_t block, int64_t levels,
                        bool add, const Tensor* dst) {
  return guarded([&] {
    const Call call = checked_fitted(*segments, *dst, *payload, block, levels);
    check_add(add, *dst);
    kernels().fitted_decode(bytes_of(*payload), call.table.data, dtype_of(*dst), add, call.table.placed, call.table.rows,
                            call.table.count, block, levels == 1, weights_of(weights, *dst));
  });
}

GW_API gw_learn_energy(const Tensor* mean, const Tensor* segments, double keep, const Tensor* energy) {
  return guarded([&] {
    GW_CHECK(mean->contiguous || mean->places, "the mean must be contiguous");
    const Table table = table_of(*segments, *mean, 1);
    float* const to = remembered(energy, *mean);
    const int64_t each = item_bytes(dtype_of(*mean));
    for (int64_t i = 0; i < table.count; ++i)
      kernels().learn_energy(static_cast<const char*>(table.data) + table.placed[i].offset * each, dtype_of(*mean),
                             table.rows[i].numel, float(keep), float(1.0 - keep), to + table.rows[i].offset);
  });
}

GW_API gw_weigh_elements(const Tensor* energy, const Tensor* segments, int64_t block, double floor, const Tensor* weights) {
  return guarded([&] {
    check_block(block);
    const float* const from = remembered(energy, *energy);
    const Table table = table_of(*segments, *energy, block);
    auto* const to = const_cast<uint8_t*>(weights_of(weights, *energy));
    for (int64_t i = 0; i < table.count; ++i)
      kernels().weigh_elements(from + table.rows[i].offset, table.rows[i].numel, block, floor, to + table.rows[i].offset);
  });
}

GW_API gw_cast_encode(const Tensor* src, const Tensor* residual, int64_t wire, const Tensor* payload) {
  return guarded([&] {
    check_cast(*src, *payload);
    float* const left = remembered(residual, *src);
    const auto* const from = static_cast<const uint8_t*>(src->data);
    uint8_t* const out = bytes_of(*payload);
    const Dtype dtype = dtype_of(*src), into = wire_of(wire);
    encode_and_sum(*payload, [&](Summing* sum) {
      if (sum) sum->first = sum->next = out;
      const int64_t most = sum ? kCastTile : src->numel;
      for (int64_t at = 0; at < src->numel; at += most) {
        const int64_t numel = std::min(most, src->numel - at);
        kernels().cast_encode(from + at * item_bytes(dtype), dtype, left ? left + at : nullptr, numel, into, out + 2 * at);
        if (sum) sum->along(*sum, out + 2 * (at + numel));
      }
    });
  });
}

GW_API gw_cast_decode(const Tensor* payload, int64_t wire, bool add, const Tensor* dst) {
  return guarded([&] {
    check_cast(*dst, *payload);
    kernels().cast_decode(bytes_of(*payload), wire_of(wire), dst->data, dtype_of(*dst), add, dst->numel);
  });
}

GW_API gw_fp8_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, int64_t block, int64_t format,
                     const Tensor* payload) {
  return guarded([&] {
    encode_scaled(src, residual, segments, {}, {block, fp8_of(format), Scale::max, Rounding::nearest}, payload);
  });
}

GW_API gw_fp8_decode(const Tensor* payload, const Tensor* segments, int64_t block, int64_t format, bool add, const Tensor* dst) {
  return guarded([&] { decode_scaled(payload, segments, fp8_of(format), block, add, dst); });
}

GW_API gw_natural_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, const Tensor* stream, int64_t block,
                         const Tensor* payload) {
  return guarded([&] {
    const Scaled how{block, Code::natural, Scale::max, Rounding::stochastic};
    encode_scaled(src, residual, segments, stream_of(*stream), how, payload);
  });
}

GW_API gw_natural_decode(const Tensor* payload, const Tensor* segments, int64_t block, bool add, const Tensor* dst) {
  return guarded([&] { decode_scaled(payload, segments, Code::natural, block, add, dst); });
}

GW_API gw_exponential_encode(const Tensor* src, const Tensor* residual, const Tensor* segments, const Tensor* stream,
                             int64_t block, int64_t scale, int64_t rounding, const Tensor* payload) {
  return guarded([&] {
    const Scaled how{block, Code::exponential, Scale(scale), Rounding(rounding)};
    encode_scaled(src, residual, segments, stream_of(*stream), how, payload);
  });
}

GW_API gw_exponential_decode(const Tensor* payload, const Tensor* segments, int64_t block, bool add, const Tensor* dst) {
  return guarded([&] { decode_scaled(payload, segments, Code::exponential, block, add, dst); });
}

GW_PACKED(qsgd_encode)
GW_PACKED(qsgd_decode)
GW_PACKED(fitted_encode)
GW_PACKED(fitted_decode)
GW_PACKED(learn_energy)
GW_PACKED(weigh_elements)
GW_PACKED(cast_encode)
GW_PACKED(cast_decode)
GW_PACKED(fp8_encode)
GW_PACKED(fp8_decode)
GW_PACKED(natural_encode)
GW_PACKED(natural_decode)
GW_PACKED(exponential_encode)
GW_PACKED(exponential_decode)
