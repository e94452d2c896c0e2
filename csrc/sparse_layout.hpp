// How many elements sparse payloads hold and where, shared by kernels and ops. Plain sizes; the same formulas as
// src/gradwire/core/payload.py. Everything is static: no linkage is shared between SIMD levels.
#pragma once
#include <cstdint>

namespace gradwire {

// What a call of Top-k, Threshold or DGC selects.
struct Selector {
  double ratio;     // the part that is sent of each group
  bool together;    // one group of all segments, in their order; else each segment is one
  float threshold;  // what is smaller travels as zero; 0: nothing is
  float momentum;   // DGC's
  double bound;     // the norm to which a segment's gradient is cut back; 0: none is
};

// Room for the search of a group, in elements of 32 bits: two lists of indices and values.
struct Scratch {
  uint32_t* room;
  int64_t capacity;  // of each of the four
};

constexpr int64_t kChunk = 1024;            // elements that are looked through at once
constexpr int64_t kMaxGroup = 0x7fffffff;   // elements of a group: indices have 32 bits

static inline int64_t kept_of(int64_t numel, double ratio) {
  const double up = __builtin_ceil(ratio * double(numel));
  const int64_t kept = up < 1.0 ? 1 : up < double(numel) ? int64_t(up) : numel;
  return numel ? kept : 0;
}

static inline int64_t elias_fano_bytes(int64_t kept, int64_t numel, int low) {
  return (kept * low + 7) / 8 + (kept + (numel >> low) + 7) / 8;
}

// Low bits of an index that are sent as they are; -1: a bitmap of all elements is smaller.
static inline int index_low_bits(int64_t kept, int64_t numel) {
  const int low = kept ? 63 - __builtin_clzll(uint64_t(numel / kept)) : 0;
  return elias_fano_bytes(kept, numel, low) < (numel + 7) / 8 ? low : -1;
}

static inline int64_t index_bytes(int64_t kept, int64_t numel) {
  const int low = index_low_bits(kept, numel);
  return low < 0 ? (numel + 7) / 8 : elias_fano_bytes(kept, numel, low);
}

// Candidates that a search may have to hold at once: twice what is kept, so that dropping the smaller half pays.
static inline int64_t candidate_capacity(int64_t kept, int64_t numel) {
  const int64_t wanted = 2 * kept + 4096;
  return (wanted < numel ? wanted : numel) + kChunk;
}

static inline int64_t block_kept(int64_t numel, int64_t block, double ratio) {
  return numel / block * kept_of(block, ratio) + kept_of(numel % block, ratio);
}

}  // namespace gradwire
