// The interface between kernels.cpp, which is compiled once per SIMD level, and ops.cpp, which chooses a level.
// Plain pointers and sizes only: nothing of torch is known here.
#pragma once
#include <cstdint>

namespace gradwire {

enum class Dtype : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class Scale : int32_t { max = 0, minmax = 1, l2 = 2 };
enum class Rounding : int32_t { stochastic = 0, nearest = 1 };

constexpr int64_t kMaxBlock = 8192;   // elements; a block is quantised in a buffer on the stack
constexpr int64_t kScaleAlign = 16;   // the codes begin at a multiple of this many bytes after the scales

// A run of elements of one tensor inside a flat buffer. `first` is the run's place in its tensor, a multiple of the
// block, so that blocks and random numbers are those of the tensor, however it was cut.
struct Segment {
  int64_t offset;  // elements, in the flat buffer
  int64_t numel;   // elements
  int64_t key;     // 64 bits that name the tensor
  int64_t first;   // elements
  int64_t bits;    // 2 to 8
};

// What the random stream is keyed by, beside the tensor.
struct Stream {
  int64_t seed, step, encode, rank;
};

struct Quantiser {
  int64_t block;
  Scale scale;
  Rounding rounding;
};

// What a payload of blocks with one scale each holds, beside QSGD's uniform levels.
enum class Code : int32_t { e4m3 = 0, e5m2 = 1, natural = 2, exponential = 3 };

struct Scaled {
  int64_t block;
  Code code;
  Scale scale;        // of exponential levels
  Rounding rounding;  // of those too
};

// bytes of the two sections of a payload
struct PayloadSize {
  int64_t scales;  // padded to kScaleAlign
  int64_t codes;
};

// Of blocks with `scale_bytes` each and codes of so many bits, or with 0 of the segments' bits.
inline PayloadSize coded_size(const Segment* segments, int64_t count, int64_t block, int64_t bits, int64_t scale_bytes = 2) {
  int64_t blocks = 0, codes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t full = segments[i].numel / block, tail = segments[i].numel % block;
    blocks += full + (tail != 0);
    codes += (full * (block / 8) + (tail + 7) / 8) * (bits ? bits : segments[i].bits);
  }
  const int64_t scales = blocks * scale_bytes;
  return {(scales + kScaleAlign - 1) / kScaleAlign * kScaleAlign, codes};
}

inline PayloadSize payload_size(const Segment* segments, int64_t count, const Quantiser& q) {
  return coded_size(segments, count, q.block, 0, q.scale == Scale::minmax ? 4 : 2);
}

struct Kernels {
  const char* level;
  // Reads src (+ residual, when given) and writes a payload; residual becomes what the payload lost.
  void (*qsgd_encode)(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                      const Stream& stream, const Quantiser& q, uint8_t* payload);
  // dst = decoded, or dst += decoded (float32 dst only).
  void (*qsgd_decode)(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                      const Quantiser& q);
  // numel elements of src (+ residual) as wire (bfloat16 or float16).
  void (*cast_encode)(const void* src, Dtype dtype, float* residual, int64_t numel, Dtype wire, uint8_t* payload);
  void (*cast_decode)(const uint8_t* payload, Dtype wire, void* dst, Dtype dtype, bool add, int64_t numel);
  // FP8, Natural and QSGD's exponential levels, as qsgd_encode and qsgd_decode.
  void (*scaled_encode)(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                        const Stream& stream, const Scaled& how, uint8_t* payload);
  void (*scaled_decode)(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                        const Scaled& how);
};

}  // namespace gradwire
