// What the files of op registrations share: the level that runs, and checks of what every op is given.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "kernels.hpp"

namespace gradwire {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

// The kernels of the chosen SIMD level.
const Kernels& kernels();

inline Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half: return Dtype::float16;
    default: STD_TORCH_CHECK(false, "gradwire kernels take float32, bfloat16 and float16 tensors");
  }
}

// Something remembered of every element: float32, as long as the flat buffer.
inline float* remembered(const std::optional<Tensor>& state, const Tensor& flat) {
  if (!state) return nullptr;
  STD_TORCH_CHECK(state->is_contiguous() && state->scalar_type() == ScalarType::Float && state->numel() == flat.numel(),
                  "the residual must be float32 and as long as the flat buffer");
  return static_cast<float*>(state->data_ptr());
}

inline void check_buffers(const Tensor& flat, const Tensor& payload) {
  STD_TORCH_CHECK(flat.is_contiguous() && payload.is_contiguous() && payload.scalar_type() == ScalarType::Byte,
                  "flat buffer and uint8 payload must be contiguous");
}

inline void check_payload(const Tensor& payload, int64_t expected) {
  STD_TORCH_CHECK(payload.numel() == expected, "the payload has ", payload.numel(), " bytes where the segments take ", expected);
}

// A table of segments, all of them inside the flat buffer and each beginning at a multiple of `block` elements of its tensor.
struct Table {
  const Segment* rows;
  int64_t count;
};

inline Table table_of(const Tensor& segments, const Tensor& flat, int64_t block) {
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 5 && segments.is_contiguous() &&
                      segments.scalar_type() == ScalarType::Long, "segments must be a contiguous int64 table of 5 columns");
  const Table table{static_cast<const Segment*>(segments.data_ptr()), segments.size(0)};
  for (int64_t i = 0; i < table.count; ++i) {
    const Segment& s = table.rows[i];
    STD_TORCH_CHECK(s.offset >= 0 && s.numel >= 0 && s.offset <= flat.numel() && s.numel <= flat.numel() - s.offset,
                    "segment ", i, " reaches past the flat buffer of ", flat.numel(), " elements");
    STD_TORCH_CHECK(s.first >= 0 && s.first % block == 0, "segment ", i, " has an impossible start");
  }
  return table;
}

inline Stream stream_of(const Tensor& stream) {
  STD_TORCH_CHECK(stream.numel() == 4 && stream.is_contiguous() && stream.scalar_type() == ScalarType::Long,
                  "the stream is four int64: seed, step, encode, rank");
  const int64_t* s = static_cast<const int64_t*>(stream.data_ptr());
  return {s[0], s[1], s[2], s[3]};
}

}  // namespace gradwire
