// The interface between the kernels, kernels*.cpp, and api_*.cpp, which calls the SIMD level that was chosen.
// Each of the kernels' files is compiled once for each level, with GRADWIRE_LEVEL as the level's name and with its flags, into a
// namespace of that name. Plain pointers and sizes only; and nothing with linkage that levels share (no std:: templates), or the
// linker would mix the levels.
#pragma once
#include <cstdint>
#include <type_traits>

#include "sparse_layout.hpp"

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

// What an encode reads: elements in memory times a factor, rounded to their dtype.
struct Gradient {
  const void* data;
  Dtype dtype;
  const Segment* rows;  // the segments, with offsets from `data`
  float factor;
};

// The words of the random stream's key, without the tensor's.
struct Stream {
  int64_t seed, step, encode, rank;
};

// So many bytes of codes are summed at once.
constexpr int kFoldedBytes = 512;

// The checksum of a payload's codes, taken while they are written: they are still in the nearest cache then.
struct Summing {
  void (*along)(Summing& sum, const uint8_t* end);  // codes are there up to `end`
  const uint8_t* first;                             // code
  const uint8_t* next;                              // the first byte that is not summed yet
  alignas(64) uint8_t folded[kFoldedBytes];
};

struct Quantiser {
  int64_t block;
  Scale scale;
  Rounding rounding;
  Summing* summing = nullptr;
  const uint8_t* weights = nullptr;  // of the elements whose residuals begin at `residual`
  const float* residual = nullptr;
};

// The kinds of payloads of blocks with one scale each, other than QSGD's uniform levels.
enum class Code : int32_t { e4m3 = 0, e5m2 = 1, natural = 2, exponential = 3 };

struct Scaled {
  int64_t block;
  Code code;
  Scale scale;        // of exponential levels
  Rounding rounding;  // of those too
  Summing* summing = nullptr;
};

// bytes of the two sections of a payload
struct PayloadSize {
  int64_t scales;  // padded to kScaleAlign
  int64_t codes;
};

// A tensor of a flat buffer, seen as a matrix, and where its factors lie among those of others.
struct Matrix {
  int64_t offset;   // elements, in the flat buffer
  int64_t rows, columns;
  int64_t p_at, q_at;  // numbers, in the factors
};

// Whether the n codes of a block are packed in base 3: those of 2 bits that stand for three values, in whole blocks.
static inline bool in_base_3(int64_t n, int64_t block, int64_t bits, bool ternary) {
  return ternary && bits == 2 && n == block && block % 64 == 0;
}

// Bytes of the n codes of a block.
static inline int64_t code_bytes(int64_t n, int64_t block, int64_t bits, bool ternary) {
  return in_base_3(n, block, bits, ternary) ? n / 64 * 13 : (n + 7) / 8 * bits;
}

// Of blocks with so many bfloat16 scales each and codes of so many bits, or with 0 of the segments' bits; block 0: a run is
// one block.
static inline PayloadSize coded_size(const Segment* segments, int64_t count, int64_t block, int64_t scales, int64_t bits,
                              bool ternary = false) {
  int64_t blocks = 0, codes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t numel = segments[i].numel, full = block ? numel / block : 0, tail = numel - full * block;
    const int64_t width = bits ? bits : segments[i].bits;
    blocks += full + (tail != 0);
    codes += full * code_bytes(block, block, width, ternary) + code_bytes(tail, 0, width, false);
  }
  return {(2 * scales * blocks + kScaleAlign - 1) / kScaleAlign * kScaleAlign, codes};
}

static inline PayloadSize payload_size(const Segment* segments, int64_t count, const Quantiser& q) {
  return coded_size(segments, count, q.block, q.scale == Scale::minmax ? 2 : 1, 0, q.scale != Scale::minmax);
}

// Elements of at least `threshold` travel as it; 0: it is so many times a block's mean magnitude.
struct Ternary {
  int64_t block;
  float threshold;
  double multiple;
};

// out = weight - rate * (own * gradient + momentum * mean) / (sqrt(kept * squares + taken * gradient^2) + eps)
struct LocalUpdate {
  float rate, own, momentum, kept, taken, eps;
};

// second -= taken * (g^2 - max(0, ((unbiased * first)^2 - left * g^2) * whole)), and is at least 0
struct LowerMoment {
  float unbiased, left, whole, taken;
};

struct Kernels {
  const char* level;
  // Reads src (+ residual, when given) and writes a payload; residual becomes what the payload lost.
  void (*qsgd_encode)(const Gradient& src, float* residual, const Segment* segments, int64_t count,
                      const Stream& stream, const Quantiser& q, uint8_t* payload);
  // dst = decoded, or dst += decoded (float32 dst only).
  void (*qsgd_decode)(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                      const Quantiser& q);
  // 2 to 4 bits with a scale by least squares, as qsgd_encode and qsgd_decode. `rows`: segments with the offsets of the weights.
  void (*fitted_encode)(const Gradient& src, float* residual, const Segment* segments, int64_t count, const Quantiser& q,
                        bool lloyd, uint8_t* payload);
  void (*fitted_decode)(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, const Segment* rows,
                        int64_t count, int64_t block, bool lloyd, const uint8_t* weights);
  // Energies of elements from a mean, and weights from energies.
  void (*learn_energy)(const void* mean, Dtype dtype, int64_t numel, float kept, float taken, float* energy);
  void (*weigh_elements)(const float* energy, int64_t numel, int64_t block, double floor, uint8_t* weights);
  // numel elements of src (+ residual) as wire (bfloat16 or float16). Decoding takes float32 too: a copy, or a sum.
  void (*cast_encode)(const void* src, Dtype dtype, float* residual, int64_t numel, Dtype wire, uint8_t* payload);
  void (*cast_decode)(const uint8_t* payload, Dtype wire, void* dst, Dtype dtype, bool add, int64_t numel);
  void (*scale)(float* values, float factor, int64_t numel);
  // numel elements times a factor, rounded to their dtype, into `to`: float32 if `wide`, else of their dtype. Sums are float32.
  void (*scale_into)(const void* from, Dtype dtype, float factor, void* to, bool wide, bool add, int64_t numel);
  // PowerSGD, M being src + residual: P = M Q', Q = P' M, dst = P Q.
  void (*project)(const void* src, Dtype dtype, const float* residual, const Matrix* matrices, int64_t count, int64_t rank,
                  const float* q, float* p);
  void (*back_project)(const void* src, Dtype dtype, const float* residual, const Matrix* matrices, int64_t count, int64_t rank,
                       const float* p, float* q);
  void (*orthogonalise)(float* p, const Matrix* matrices, int64_t count, int64_t rank);
  void (*reconstruct)(void* dst, Dtype dtype, float* residual, const Matrix* matrices, int64_t count, int64_t rank,
                      const float* p, const float* q_sum, const float* q_own);
  // Top-k and Threshold (no momentum) and DGC. Decoders return false, and write nothing, if the indices are damaged;
  // `value` is the dtype of the payload's values, `index` has room for all indices.
  void (*select_encode)(const void* src, Dtype dtype, float* residual, float* momentum, const Segment* segments, int64_t count,
                        const Selector& selector, const Scratch& scratch, uint8_t* payload);
  bool (*select_decode)(const uint8_t* payload, Dtype value, void* dst, Dtype dtype, bool add, const Segment* segments,
                        int64_t count, const Selector& selector, uint32_t* index);
  void (*block_topk_encode)(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                            int64_t block, double ratio, uint8_t* payload);
  bool (*block_topk_decode)(const uint8_t* payload, Dtype value, void* dst, Dtype dtype, bool add, const Segment* segments,
                            int64_t count, int64_t block, double ratio);
  // Random-k's values alone, as float32 if `wide`; `stream_base` is the key of its random stream.
  uint64_t (*stream_base)(const Stream& stream);
  void (*random_gather)(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count, double ratio,
                        uint64_t stream, bool wide, uint8_t* values);
  void (*random_scatter)(const uint8_t* values, Dtype value, void* dst, Dtype dtype, bool add, const Segment* segments,
                         int64_t count, double ratio, uint64_t stream);
  // Signs of src, or of momentum, which becomes keep * momentum + take * src first.
  void (*sign_encode)(const void* src, Dtype dtype, float* momentum, float keep, float take, const Segment* segments,
                      int64_t count, uint8_t* payload);
  // Signs and one mean magnitude a block, or two means: of what is at least zero and of what is below.
  void (*mean_sign_encode)(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                           int64_t block, int means, uint8_t* payload);
  // Both of these: no means are signs alone.
  void (*sign_decode)(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                      int64_t block, int means);
  void (*threshold_encode)(const Gradient& src, float* residual, const Segment* segments, int64_t count,
                           const Ternary& q, uint8_t* payload);
  void (*threshold_decode)(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                           const Ternary& q);
  // QSGD with 2 bits, of values cut back to `clip` times the root mean square of their block.
  void (*terngrad_encode)(const Gradient& src, float* residual, const Segment* segments, int64_t count,
                          const Stream& stream, int64_t block, double clip, uint8_t* payload);
  // FP8, Natural and QSGD's exponential levels, as qsgd_encode and qsgd_decode.
  void (*scaled_encode)(const Gradient& src, float* residual, const Segment* segments, int64_t count,
                        const Stream& stream, const Scaled& how, uint8_t* payload);
  void (*scaled_decode)(const uint8_t* payload, void* dst, Dtype dtype, bool add, const Segment* segments, int64_t count,
                        const Scaled& how);
  // Of elements `from` to `to`. Without mean or squares their terms are not there.
  void (*local_update)(const void* weight, const void* gradient, const void* squares, const void* mean, Dtype dtype,
                       const LocalUpdate& how, int64_t from, int64_t to, void* out);
  // Of elements `from` to `to`. Where the gradient is not finite nothing changes.
  void (*lower_second_moment)(const void* gradient, const void* first, Dtype dtype, const LowerMoment& how, int64_t from,
                              int64_t to, void* second);
};

// The kernels by name, in the order of the struct.
#define GW_KERNELS(X)                                                                                                          \
  X(qsgd_encode) X(qsgd_decode) X(fitted_encode) X(fitted_decode) X(learn_energy) X(weigh_elements)                           \
  X(cast_encode) X(cast_decode) X(scale) X(scale_into) X(project) X(back_project)               \
  X(orthogonalise) X(reconstruct) X(select_encode) X(select_decode) X(block_topk_encode) X(block_topk_decode) X(stream_base)                   \
  X(random_gather) X(random_scatter) X(sign_encode) X(mean_sign_encode) X(sign_decode) X(threshold_encode)                    \
  X(threshold_decode) X(terngrad_encode) X(scaled_encode) X(scaled_decode) X(local_update)      \
  X(lower_second_moment)

#ifdef GRADWIRE_LEVEL
namespace GRADWIRE_LEVEL {
#define GW_DECLARE(name) std::remove_pointer_t<decltype(Kernels::name)> name;
GW_KERNELS(GW_DECLARE)
}  // namespace GRADWIRE_LEVEL
#endif

}  // namespace gradwire
