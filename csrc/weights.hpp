// Weights of elements, powers of two. Included inside a level's namespace, after fitted.hpp. The meaning is
// src/gradwire/kernels/reference/weights.py; this file only has to give the same bytes.

constexpr float kMost = 0x1p100f, kLeastSquare = 0x1p-110f, kLeastEnergy = 0x1p-100f;

template <class T>
static __attribute__((noinline)) void learn_run(const T* __restrict mean, i64 n, float kept, float taken, float* __restrict energy) {
  for (i64 i = 0; i < n; ++i) {
    const float m = to_float(mean[i]), square = m * m;
    const float counted = square >= kLeastSquare ? square : 0.0f;
    const float sum = kept * energy[i] + taken * counted;
    const float next = sum >= kLeastEnergy ? sum : 0.0f;
    energy[i] = square < kMost ? next : energy[i];
  }
}

// The exponent of the power of two that is nearest to a square root, plus 64.
GW_INLINE i32 root_of(float square) { return i32((bits_of(square) >> 23) + 2u) >> 1; }

static __attribute__((noinline)) void weigh_block(const float* __restrict energy, i64 n, double floor, u8* __restrict weights) {
  float lane[kSumLanes] = {};
  const i64 whole = n / kSumLanes * kSumLanes;
  for (i64 i = 0; i < whole; i += kSumLanes)
    for (int j = 0; j < kSumLanes; ++j) lane[j] += energy[i + j];
  for (i64 i = whole; i < n; ++i) lane[i - whole] += energy[i];
  const double mean = double(fold_lanes(lane)) / double(n);
  if (!(mean > 0.0)) {
    __builtin_memset(weights, 127, size_t(n));
    return;
  }
  const float least = float(mean * floor);
  const i32 base = 127 - root_of(float(mean) + least);
  for (i64 i = 0; i < n; ++i) weights[i] = u8(base + root_of(energy[i] + least));
}

// Whole blocks of 128, eight at a time: sums, floors and exponents of as many blocks are found by whole vectors.
static __attribute__((noinline)) void weigh_blocks(const float* __restrict energy, i64 blocks, double floor, u8* __restrict weights) {
  constexpr int fits = int(kFitted / kUnit);
  alignas(64) float partial[kFold * fits] = {}, sums[fits], least[fits];
  alignas(64) i32 base[fits];
  for (i64 done = 0; done < blocks; done += fits, energy += fits * kUnit, weights += fits * kUnit) {
    const i64 count = blocks - done < fits ? blocks - done : fits;
    for (i64 c = 0; c < count; ++c) {
      float* const to[1] = {partial + kFold * c};
      sum_block<1, kUnit>(kUnit, [&](i64 i, float* lane) { lane[0] += energy[c * kUnit + i]; }, to);
    }
    GW_SETTLE(partial);
    fold_blocks<fits>(partial, sums);
    GW_SETTLE(sums);
    for (int c = 0; c < fits; ++c) {
      const double mean = double(sums[c]) / double(kUnit);
      least[c] = float(mean * floor);
      base[c] = 127 - root_of(float(mean) + least[c]);
    }
    GW_SETTLE(base);
    for (i64 c = 0; c < count; ++c) {
      u8* const to = weights + c * kUnit;
      if (!(sums[c] > 0.0f)) {
        __builtin_memset(to, 127, kUnit);
        continue;
      }
      const float* const from = energy + c * kUnit;
      for (i64 i = 0; i < kUnit; ++i) to[i] = u8(base[c] + root_of(from[i] + least[c]));
    }
  }
}

// Decoded values times their weights, written or added.
template <class T, bool Add>
static __attribute__((noinline)) void weigh_into(const float* __restrict values, const u8* __restrict weights, i64 n, T* __restrict to) {
  for (i64 i = 0; i < n; ++i) {
    const float value = values[i] * weight_of(weights[i]);
    from_float(Add ? to_float(to[i]) + value : value, to[i]);
  }
}

// Uniform levels. `rows`: the segments with the offsets of the weights.
template <class T, bool Add>
static void weighted_decode_to(const u8* payload, T* dst, const Segment* segments, const Segment* rows, i64 count, i64 block,
                               const u8* weights) {
  alignas(64) float tile[kMaxBlock];
  const Quantiser q{block, Scale::max, Rounding::nearest};
  const i64 each = block < kFitted ? kFitted / block * block : block;
  const u8* scales = payload;
  const u8* in = payload + coded_size(segments, count, block, 1, 0).scales;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    for (i64 at = 0; at < seg.numel; at += each) {
      const i64 n = seg.numel - at < each ? seg.numel - at : each;
      decode_run<float, false>(scales, in, tile, n, q, int(seg.bits));
      weigh_into<T, Add>(tile, weights + rows[s].offset + at, n, dst + seg.offset + at);
    }
  }
}

template <class T, bool Add>
static void fitted_decode_to(const u8* payload, T* dst, const Segment* segments, const Segment* rows, i64 count, i64 block,
                             bool lloyd, const u8* weights) {
  if (lloyd && weights) return lloyd_decode_to<T, Add, true>(payload, dst, segments, rows, count, block, weights);
  if (lloyd) return lloyd_decode_to<T, Add, false>(payload, dst, segments, rows, count, block, nullptr);
  if (weights) return weighted_decode_to<T, Add>(payload, dst, segments, rows, count, block, weights);
  decode_segments<T, Add>(payload, dst, segments, count, {block, Scale::max, Rounding::nearest});
}
