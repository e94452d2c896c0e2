// What the functions of the C interface share: the level that runs, and checks of everything that they are given.
//
// The interface is plain C: a function is called gw_NAME, takes pointers to `Tensor` and numbers, and returns NULL, or in words
// why it refused its arguments. src/gradwire/kernels/cpu.py calls it through ctypes, so that one build serves every Python and
// every torch: nothing here knows either.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace gradwire {

// The kernels of the chosen SIMD level.
const Kernels& kernels();

// A dense tensor in the memory of the CPU, or with `places` a flat buffer whose rows lie apart, each in its own tensor. Twin of
// `Tensor` in src/gradwire/kernels/cpu.py.
struct Tensor {
  void* data;
  int64_t numel;
  int32_t dtype;       // a Dtype, or one of the numbers below
  int32_t contiguous;  // 0 or 1; 0 with places
  const void* const* const* places = nullptr;  // of each row, where the address of its tensor is written
  double factor = 1.0;                         // by which elements that lie apart are multiplied when they are read
};

constexpr int32_t kInt64 = 3, kUint8 = 4;  // every other dtype is -1

// Arguments that a kernel cannot work with, and why.
struct Refused {
  char words[256];
};

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void refuse(const char* format, ...) {
  Refused refused;
  va_list values;
  va_start(values, format);
  std::vsnprintf(refused.words, sizeof refused.words, format, values);
  va_end(values);
  throw refused;
}

// Goes on if the condition holds, else refuses with a message in printf's format.
#define GW_CHECK(condition, ...) \
  do {                           \
    if (!(condition)) ::gradwire::refuse(__VA_ARGS__); \
  } while (0)

using Long = long long;  // what "%lld" prints

// Runs `call`, which may refuse. Returns NULL, or the words, which live until this thread's next call.
template <class Call>
const char* guarded(Call call) {
  static thread_local Refused last;
  try {
    call();
    return nullptr;
  } catch (const Refused& refused) {
    last = refused;
  } catch (const std::exception& error) {
    std::snprintf(last.words, sizeof last.words, "%s", error.what());
  }
  return last.words;
}

// A function of the interface.
#define GW_API extern "C" __attribute__((visibility("default"))) const char*

inline Dtype dtype_of(const Tensor& t) {
  GW_CHECK(t.dtype >= 0 && t.dtype <= 2, "gradwire kernels take float32, bfloat16 and float16 tensors");
  return Dtype(t.dtype);
}

// Something remembered of every element: float32, as long as the flat buffer. NULL if there is none.
inline float* remembered(const Tensor* state, const Tensor& flat) {
  if (!state) return nullptr;
  GW_CHECK(state->contiguous && state->dtype == int32_t(Dtype::float32) && state->numel == flat.numel,
           "the residual must be float32 and as long as the flat buffer");
  return static_cast<float*>(state->data);
}

// The weights of a flat buffer's elements, a byte each. NULL if there are none.
inline const uint8_t* weights_of(const Tensor* weights, const Tensor& flat) {
  if (!weights) return nullptr;
  GW_CHECK(weights->contiguous && weights->dtype == kUint8 && weights->numel == flat.numel,
           "the weights must be uint8 and as long as the flat buffer");
  return static_cast<const uint8_t*>(weights->data);
}

inline void check_buffers(const Tensor& flat, const Tensor& payload) {
  GW_CHECK((flat.contiguous || flat.places) && payload.contiguous && payload.dtype == kUint8,
           "flat buffer and uint8 payload must be contiguous");
}

inline int64_t item_bytes(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

inline uint8_t* bytes_of(const Tensor& payload) { return static_cast<uint8_t*>(payload.data); }

inline void check_payload(int64_t bytes, int64_t expected) {
  GW_CHECK(bytes == expected, "the payload has %lld bytes where the segments take %lld", Long(bytes), Long(expected));
}

inline void check_add(bool add, const Tensor& dst) {
  GW_CHECK(!add || dtype_of(dst) == Dtype::float32, "decode-and-add sums in float32");
}

inline void check_bits(const Segment& segment, int64_t index, int64_t least, int64_t most) {
  GW_CHECK(segment.bits >= least && segment.bits <= most, "segment %lld has impossible bits", Long(index));
}

// A table of segments, all of them inside the flat buffer and each beginning at a multiple of `block` elements of its tensor.
struct Table {
  const Segment* rows;
  int64_t count;
  void* data;             // the flat buffer, or where the first row lies
  const Segment* placed;  // the rows with offsets from `data`: they differ from `rows` where rows lie apart
};

// Finds where the rows lie. What it returns holds until this thread's next call.
inline Table placed_apart(const Table& table, const Tensor& flat) {
  static thread_local std::vector<Segment> placed;
  const int64_t each = item_bytes(dtype_of(flat));
  placed.assign(table.rows, table.rows + table.count);
  char* base = nullptr;
  for (int64_t i = 0; i < table.count; ++i) {
    if (!table.rows[i].numel) continue;
    char* const tensor = static_cast<char*>(const_cast<void*>(*flat.places[i]));
    GW_CHECK(tensor, "segment %lld is of a tensor that was not given in this step", Long(i));
    char* const row = tensor + table.rows[i].first * each;
    base = base ? base : row;
    const int64_t bytes = int64_t(reinterpret_cast<intptr_t>(row) - reinterpret_cast<intptr_t>(base));
    GW_CHECK(bytes % each == 0, "segment %lld lies between two elements of another tensor", Long(i));
    placed[size_t(i)].offset = bytes / each;
  }
  return {table.rows, table.count, base, placed.data()};
}

inline Table table_of(const Tensor& segments, const Tensor& flat, int64_t block) {
  GW_CHECK(segments.numel % 5 == 0 && segments.contiguous && segments.dtype == kInt64,
           "segments must be a contiguous int64 table of 5 columns");
  const Segment* const rows = static_cast<const Segment*>(segments.data);
  const Table table{rows, segments.numel / 5, flat.data, rows};
  for (int64_t i = 0; i < table.count; ++i) {
    const Segment& s = table.rows[i];
    GW_CHECK(s.offset >= 0 && s.numel >= 0 && s.offset <= flat.numel && s.numel <= flat.numel - s.offset,
             "segment %lld reaches past the flat buffer of %lld elements", Long(i), Long(flat.numel));
    GW_CHECK(s.first >= 0 && s.first % block == 0, "segment %lld has an impossible start", Long(i));
  }
  return flat.places ? placed_apart(table, flat) : table;
}

inline float factor_of(const Tensor& flat) { return flat.places ? float(flat.factor) : 1.0f; }

inline Gradient gradient_of(const Tensor& src, const Table& table) {
  return {table.data, dtype_of(src), table.placed, factor_of(src)};
}

// A gradient for kernels that read flat buffers alone: the buffer, or for the time of a call a copy of rows that lie apart.
class FlatGradient {
 public:
  FlatGradient(const Tensor& src, const Table& table) : data_(src.data) {
    if (!src.places) return;
    const Dtype dtype = dtype_of(src);
    const int64_t each = item_bytes(dtype);
    copy_.reset(new char[size_t(src.numel * each)]);
    data_ = copy_.get();
    for (int64_t i = 0; i < table.count; ++i)
      kernels().scale_into(static_cast<const char*>(table.data) + table.placed[i].offset * each, dtype, factor_of(src),
                           copy_.get() + table.rows[i].offset * each, false, false, table.rows[i].numel);
  }

  const void* data() const { return data_; }

 private:
  const void* data_;
  std::unique_ptr<char[]> copy_;
};

inline Stream stream_of(const Tensor& stream) {
  GW_CHECK(stream.numel == 4 && stream.contiguous && stream.dtype == kInt64,
           "the stream is four int64: seed, step, encode, rank");
  const int64_t* s = static_cast<const int64_t*>(stream.data);
  return {s[0], s[1], s[2], s[3]};
}

}  // namespace gradwire
