// Levels whose scale is fitted to the block by least squares: uniform ones, which qsgd.hpp decodes, and those of Lloyd and Max.
// Included inside a level's namespace, after qsgd.hpp. The meaning is src/gradwire/kernels/reference/fitted.py; this file only
// has to give the same bytes.

constexpr double kTooLarge = 0x1p110;  // from here on the sums of a block could overflow
constexpr i64 kFitted = 1024;          // elements of a batch, or one block if that is larger; two batches fit into the nearest cache
constexpr i64 kFits = kFitted / 32;    // blocks of a batch, at most
constexpr int kSumLanes = 64;          // partial sums of a block

constexpr float kLloyd[3][8] = {
    {464 / 1024.0f, 1547 / 1024.0f},
    {251 / 1024.0f, 774 / 1024.0f, 1376 / 1024.0f, 2204 / 1024.0f},
    {131 / 1024.0f, 397 / 1024.0f, 673 / 1024.0f, 965 / 1024.0f, 1286 / 1024.0f, 1657 / 1024.0f, 2119 / 1024.0f, 2798 / 1024.0f},
};
constexpr double kFirst[2][3] = {{1.7, 0.227, 0.124}, {1.375, 0.351, 0.34}};

// The levels of Bits bits: `count` magnitudes that are not the lowest.
template <int Bits, bool Lloyd>
struct Magnitudes {
  static constexpr int count = (1 << (Bits - 1)) - 1;
  static constexpr bool by_mean = Bits == 2;
  static constexpr double first = kFirst[Lloyd][Bits - 2];
  static constexpr float units = Lloyd ? 1.0f : float(count);  // of a scale

  static constexpr float of(int k) { return Lloyd ? kLloyd[Bits - 2][k] : float(k); }
  static constexpr float bound(int k) { return (of(k) + of(k + 1)) / 2; }  // above it comes level k + 1
};

// Stored weights are exponents of float32.
GW_INLINE float weight_of(u8 stored) { return float_of(u32(stored) << 23); }
GW_INLINE float over_weight(float x, float weight) { return x * float_of((254u << 23) - bits_of(weight)); }  // exact

GW_INLINE float size_of(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

// What one block's elements are compared with: the bounds between levels for this unit, infinite where nothing is sent.
template <class M>
struct Bounds {
  float bound[M::count];

  GW_INLINE_MEMBER explicit Bounds(float unit) {
    for (int k = 0; k < M::count; ++k) bound[k] = unit * M::bound(k);
  }
};

// What they become: the levels for this unit.
template <class M>
struct Values {
  float unit, value[M::count + 1];

  GW_INLINE_MEMBER explicit Values(float unit) : unit(unit) {
    for (int k = 0; k <= M::count; ++k) value[k] = unit * M::of(k);
  }
};

// Adds an element's terms of the two sums of a fit.
template <class M>
GW_INLINE void add_terms(float size, const Bounds<M>& at, float& products, float& squares) {
  if (M::count == 1 && M::of(0) == 0.0f) {
    const u32 above = size > at.bound[0] ? 0xffffffffu : 0u;
    products += float_of(bits_of(size) & above);
    squares += float_of(0x3f800000u & above);  // 1
    return;
  }
  float level = M::of(0), square = M::of(0) * M::of(0);
#pragma GCC unroll 8
  for (int k = 0; k < M::count; ++k) {
    const bool above = size > at.bound[k];
    level = above ? M::of(k + 1) : level;
    square = above ? M::of(k + 1) * M::of(k + 1) : square;
  }
  products += size * level;
  squares += square;
}

// The code of an element, and what it loses.
template <int Bits, bool Lloyd, class M>
GW_INLINE u32 code_and_rest(float x, const Bounds<M>& at, const Values<M>& to, float& rest) {
  const float size = size_of(x);
  const u32 sign = bits_of(x) & 0x80000000u, negative = u32(i32(sign) >> 31);  // all bits or none
  if (Bits == 2 && !Lloyd) {
    const bool above = size > at.bound[0];
    rest = above ? x - float_of(bits_of(to.value[1]) | sign) : x;
    return above ? ~negative & 2u : 1u;
  }
  u32 number = 0;
  float value = to.value[0];
#pragma GCC unroll 8
  for (int k = 0; k < M::count; ++k) {
    const bool above = size > at.bound[k];
    number = above ? u32(k + 1) : number;
    if (Lloyd) value = above ? to.value[k + 1] : value;
  }
  if (Lloyd) {
    rest = x - float_of(bits_of(value) | sign);
    return number | sign >> (32 - Bits);
  }
  const u32 steps = (number ^ negative) - negative;
  rest = x - float(i32(steps)) * to.unit;
  return u32(M::count) + steps;
}

GW_INLINE float fold_lanes(float* lane) {
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}

template <class M>
GW_INLINE float first_unit(double statistic, i64 n) {
  return float(statistic * (M::by_mean ? M::first / double(n) : M::first));
}

// The scale that is sent, the nearest bfloat16, as float32.
template <class M>
GW_INLINE float fitted_scale(float products, float squares) {
  const float scale = float(double(products) / double(squares == 0.0f ? 1.0f : squares) * double(M::units));
  const u32 bits = bits_of(scale), nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return float_of(scale >= kTiny ? nearest : 0u);
}

// A block that no batch takes: n elements, with room for a multiple of 8 in v. Returns the bytes written. v was divided by the
// weights, if there are any.
template <int Bits, bool Lloyd, bool Residual>
static __attribute__((noinline)) i64 encode_fitted(const float* v, i64 n, const Task& t, float* left, const u8* weights) {
  using M = Magnitudes<Bits, Lloyd>;
  alignas(64) u8 codes[kMaxBlock];
  float lane[2][kSumLanes] = {};
  i32 largest = 0;
  const i64 packed = (n + 7) / 8 * 8, block = t.q.block, nbytes = code_bytes(n, block, Bits, !Lloyd);
  for (i64 i = 0; i < n; ++i) {
    const float size = size_of(v[i]);
    lane[0][i % kSumLanes] += size;
    largest = i32(bits_of(size)) > largest ? i32(bits_of(size)) : largest;
  }
  const double statistic = double(M::by_mean ? fold_lanes(lane[0]) : float_of(u32(largest)));
  if (!(statistic < kTooLarge)) {  // the residual stays what it was
    __builtin_memcpy(t.scales, &kBadScale, 2);
    __builtin_memset(t.out, 0, size_t(nbytes));
    return nbytes;
  }
  const float unit = first_unit<M>(statistic, n);
  const Bounds<M> first(unit);
  for (int j = 0; j < kSumLanes; ++j) lane[0][j] = 0.0f;
  for (i64 i = 0; i < n; ++i) add_terms<M>(size_of(v[i]), first, lane[0][i % kSumLanes], lane[1][i % kSumLanes]);
  const float scale = fitted_scale<M>(fold_lanes(lane[0]), fold_lanes(lane[1]));
  const u16 raw = u16(bits_of(scale) >> 16);
  __builtin_memcpy(t.scales, &raw, 2);
  const Bounds<M> at(scale > 0.0f ? unit : float_of(kInfBits));
  const Values<M> to(scale / M::units);
  for (i64 i = 0; i < n; ++i) {
    float rest;
    codes[i] = u8(code_and_rest<Bits, Lloyd, M>(v[i], at, to, rest));
    if (Residual) left[i] = weights ? rest * weight_of(weights[i]) : rest;
  }
  for (i64 i = n; i < packed; ++i) codes[i] = 0;
  GW_SETTLE(codes);
  if (in_base_3(n, block, Bits, !Lloyd)) pack_base_3(codes, n, t.out);
  else pack(codes, packed, Bits, t.out);
  return nbytes;
}

// ---- whole blocks, in batches

constexpr i64 kFold = 16;  // numbers to which the lanes of a block are folded at once

using Floats4 = float __attribute__((vector_size(16), may_alias));
using Ints4 = i32 __attribute__((vector_size(16), may_alias));

// 16 partial sums as four.
GW_INLINE Floats4 quarter_of(const float* partial) {
  const auto* const q = reinterpret_cast<const Floats4*>(partial);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

// The first and second sums of a and b, and their other two, added.
GW_INLINE Floats4 halves_of(Floats4 a, Floats4 b) {
  return __builtin_shuffle(a, b, Ints4{0, 4, 1, 5}) + __builtin_shuffle(a, b, Ints4{2, 6, 3, 7});
}

// The sums of `Count` blocks, of which each has 16 partial ones.
template <int Count>
GW_INLINE void fold_blocks(const float* __restrict partial, float* __restrict sums) {
  for (int c = 0; c < Count; c += 4) {
    const float* const p = partial + kFold * c;
    const Floats4 a = halves_of(quarter_of(p), quarter_of(p + kFold));
    const Floats4 b = halves_of(quarter_of(p + 2 * kFold), quarter_of(p + 3 * kFold));
    const Floats4 even = __builtin_shuffle(a, b, Ints4{0, 1, 4, 5}), odd = __builtin_shuffle(a, b, Ints4{2, 3, 6, 7});
    *reinterpret_cast<Floats4*>(sums + c) = even + odd;
  }
}

// 16 partial sums of each of the N numbers that `add` adds for an element of a block, in the order of the lanes.
template <int N, int Block, class Add>
GW_INLINE void sum_block(i64 block, const Add& add, float* const* partial) {
  if (Block == 128) {
GW_ROLLED
    for (int j = 0; j < 16; ++j) {
      float lane[4][N] = {};
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        add(j + 16 * k, lane[k]);
        add(j + 16 * k + 64, lane[k]);
      }
      for (int s = 0; s < N; ++s) partial[s][j] = (lane[0][s] + lane[2][s]) + (lane[1][s] + lane[3][s]);
    }
    return;
  }
  alignas(64) float lanes[N][kSumLanes] = {};
  for (i64 i = 0; i < block; i += 32)
    for (int j = 0; j < 32; ++j) {
      float lane[N];
      for (int s = 0; s < N; ++s) lane[s] = lanes[s][i % kSumLanes + j];
      add(i + j, lane);
      for (int s = 0; s < N; ++s) lanes[s][i % kSumLanes + j] = lane[s];
    }
  GW_SETTLE(lanes);
  for (int s = 0; s < N; ++s)
GW_ROLLED
    for (int j = 0; j < 16; ++j)
      partial[s][j] = (lanes[s][j] + lanes[s][j + 32]) + (lanes[s][j + 16] + lanes[s][j + 48]);
}

// Asks for lines of memory that are read soon.
template <int Block, int Line, bool Written, class T>
GW_INLINE void prefetch_block(const T* from) {
  for (int at = 0; at < Block; at += Line) __builtin_prefetch(from + at, Written);
}

// Encodes whole blocks, a power of two from 32 elements on. Returns how many: all, or those before a batch that holds something
// not finite. The passes over a batch find in turn the first units, the scales, and the codes. What is found for each block
// is found for as many blocks as a batch may have, by whole vectors: a loop of another length would be one of single numbers.
// While a batch of blocks of 128 is computed the next one is asked for.
template <int Bits, bool Lloyd, bool Residual, bool Weighted, int Block>
static __attribute__((noinline)) i64 fit_batches(const float* __restrict from, float* __restrict left, const Task& t,
                                                 const u8* __restrict weights) {
  using M = Magnitudes<Bits, Lloyd>;
  constexpr i64 room = Block ? kFitted : kMaxBlock;
  constexpr int fits = int(Block ? kFitted / Block : kFits), run = Block ? Block / 2 : 16;
  alignas(64) float tile[Residual ? room : 1], by[Weighted ? room : 1];
  alignas(64) float partial[2][kFold * fits] = {}, sums[2][fits] = {}, unit[fits], scale[fits];
  alignas(64) u8 pairs[room / 2];
  alignas(64) u16 raw[fits];
  const i64 block = Block ? Block : t.q.block, half = block / 2, most = block < kFitted ? kFitted / block : 1;
  u8 *out = t.out, *scales = t.scales;
  i64 done = 0;
  while (done < t.blocks) {
    const i64 count = t.blocks - done < most ? t.blocks - done : most;
    const float* const v = Residual ? tile : from;
    for (i64 c = 0; c < count; ++c) {
      const i64 first = c * block;
      if (Weighted) {  // a loop of its own, since the next one would be one of short vectors
        for (i64 i = 0; i < block; ++i) by[first + i] = weight_of(weights[first + i]);
        GW_SETTLE(by);
      }
      const auto given_size = [&](i64 i) {
        float x = Residual ? from[first + i] + left[first + i] : from[first + i];
        if (Weighted) x = over_weight(x, by[first + i]);
        if (Residual) tile[first + i] = x;
        return size_of(x);
      };
      if (M::by_mean) {
        float* const to[1] = {partial[0] + kFold * c};
        sum_block<1, Block>(block, [&](i64 i, float* lane) { lane[0] += given_size(i); }, to);
      } else {
        i32 largest = 0;
        for (i64 i = 0; i < block; ++i) {
          const i32 size = i32(bits_of(given_size(i)));
          largest = size > largest ? size : largest;
        }
        sums[0][c] = float_of(u32(largest));
      }
    }
    GW_SETTLE(partial);
    if (M::by_mean) fold_blocks<fits>(partial[0], sums[0]);
    GW_SETTLE(sums);
    i32 all = 0;
    for (int c = 0; c < fits; ++c) {
      const i32 here = c < count ? i32(bits_of(sums[0][c])) : 0;
      all = here > all ? here : all;
    }
    if (!(double(float_of(u32(all))) < kTooLarge)) break;
    for (int c = 0; c < fits; ++c) unit[c] = first_unit<M>(double(sums[0][c]), block);
    GW_SETTLE(unit);
    for (i64 c = 0; c < count; ++c) {
      prefetch_block<Block, 16, false>(from + (count + c) * block);
      const Bounds<M> at(unit[c]);
      const float* const x = v + c * block;
      float* const to[2] = {partial[0] + kFold * c, partial[1] + kFold * c};
      sum_block<2, Block>(block, [&](i64 i, float* lane) { add_terms<M>(size_of(x[i]), at, lane[0], lane[1]); }, to);
    }
    GW_SETTLE(partial);
    for (int s = 0; s < 2; ++s) fold_blocks<fits>(partial[s], sums[s]);
    GW_SETTLE(sums);
    for (int c = 0; c < fits; ++c) {
      scale[c] = fitted_scale<M>(sums[0][c], sums[1][c]);
      unit[c] = scale[c] > 0.0f ? unit[c] : float_of(kInfBits);
    }
    GW_SETTLE(scale);
    for (int c = 0; c < fits; ++c) raw[c] = u16(bits_of(scale[c]) >> 16);
    for (int c = 0; c < fits; ++c) scale[c] = scale[c] / M::units;
    GW_SETTLE(raw);
    __builtin_memcpy(scales, raw, size_t(2 * count));
    u8* const codes = Bits == 4 ? out : pairs;
    for (i64 c = 0; c < count; ++c) {
      const Bounds<M> at(unit[c]);
      const Values<M> to(scale[c]);
      const float *const x = v + c * block, *const y = x + half;
      float* const rest = left + (Residual ? c * block : 0);
      const float* const w = by + (Weighted ? c * block : 0);
      if (Residual) prefetch_block<Block, 16, true>(left + (count + c) * block);
      if (Weighted) prefetch_block<Block, 64, false>(weights + (count + c) * block);
      for (i64 j = 0; j < half; j += run) {
        alignas(64) u32 both[run];
#pragma GCC ivdep
        for (int l = 0; l < run; ++l) {
          float lost, other;
          const u32 a = code_and_rest<Bits, Lloyd, M>(x[j + l], at, to, lost);
          const u32 b = code_and_rest<Bits, Lloyd, M>(y[j + l], at, to, other);
          both[l] = a | b << 4;
          if (Residual) {
            rest[j + l] = Weighted ? lost * w[j + l] : lost;
            rest[j + l + half] = Weighted ? other * w[j + l + half] : other;
          }
        }
        GW_SETTLE(both);
        for (int l = 0; l < run; ++l) codes[c * half + j + l] = u8(both[l]);
      }
    }
    if (Bits < 4) {
      GW_SETTLE(pairs);
      pack_batch(pairs, pairs, block, count, Bits, !Lloyd, out);
    }
    out += count * code_bytes(block, block, Bits, !Lloyd);
    if (t.q.summing) t.q.summing->along(*t.q.summing, out);
    scales += 2 * count;
    from += count * block;
    left += Residual ? count * block : 0;
    weights += Weighted ? count * block : 0;
    done += count;
  }
  return done;
}

// How runs.hpp encodes fitted levels.
template <bool Lloyd>
struct FittedCodec {
  static constexpr i64 words = 1;
  static constexpr int bits = 0;  // the segment's
  static constexpr bool ternary = !Lloyd;

  static bool fast(const Quantiser& q) { return batches(q.block); }

  // The weights of the elements of this residual.
  static GW_INLINE_MEMBER const u8* weights_at(const float* left, const Quantiser& q) {
    return q.weights ? q.weights + (left - q.residual) : nullptr;
  }

  template <bool Residual, bool Weighted, int Bits>
  static i64 several_as(const float* from, float* left, const Task& t) {
    const u8* const weights = Weighted ? weights_at(left, t.q) : nullptr;
    return t.q.block == kUnit ? fit_batches<Bits, Lloyd, Residual, Weighted, kUnit>(from, left, t, weights)
                              : fit_batches<Bits, Lloyd, Residual, Weighted, 0>(from, left, t, weights);
  }

  template <bool Residual, int Bits>
  static i64 several_of(const float* from, float* left, const Task& t) {
    if (Residual && t.q.weights) return several_as<Residual, Residual, Bits>(from, left, t);
    return several_as<Residual, false, Bits>(from, left, t);
  }

  template <bool Residual, int Bits>
  static i64 one_of(const float* v, i64 n, const Task& t, float* left) {
    alignas(64) float over[kMaxBlock];
    const u8* const weights = Residual ? weights_at(left, t.q) : nullptr;
    if (!weights) return encode_fitted<Bits, Lloyd, Residual>(v, n, t, left, nullptr);
    for (i64 i = 0; i < n; ++i) over[i] = over_weight(v[i], weight_of(weights[i]));
    return encode_fitted<Bits, Lloyd, Residual>(over, n, t, left, weights);
  }

  template <bool Residual>
  static GW_INLINE_MEMBER i64 several(const float* from, float* left, const Task& t) {
    if (t.bits == 2) return several_of<Residual, 2>(from, left, t);
    return t.bits == 3 ? several_of<Residual, 3>(from, left, t) : several_of<Residual, 4>(from, left, t);
  }

  template <bool Residual>
  static GW_INLINE_MEMBER i64 one(const float* v, i64 n, const Task& t, float* left) {
    if (t.bits == 2) return one_of<Residual, 2>(v, n, t, left);
    return t.bits == 3 ? one_of<Residual, 3>(v, n, t, left) : one_of<Residual, 4>(v, n, t, left);
  }
};

// ---- the levels of Lloyd and Max, back

// The level of a code, chosen bit by bit: whole vectors do that sooner than they look it up.
template <int Bits>
GW_INLINE float level_of(u32 code, const float* value) {
  const float low = code & 1u ? value[1] : value[0];
  float level = low;
  if (Bits > 2) {
    const float high = code & 1u ? value[3] : value[2];
    level = code & 2u ? high : low;
  }
  if (Bits > 3) {
    const float below = code & 1u ? value[5] : value[4], above = code & 1u ? value[7] : value[6];
    const float upper = code & 2u ? above : below;
    level = code & 4u ? upper : level;
  }
  return float_of(bits_of(level) ^ ((code & (1u << (Bits - 1))) << (32 - Bits)));
}

// The n codes of one block, one to a byte.
template <class T, bool Add, bool Weighted, int Bits, int N>
GW_INLINE void lloyd_values(const u8* __restrict codes, i64 n, float scale, const u8* __restrict weights, T* __restrict to) {
  using M = Magnitudes<Bits, true>;
  float value[8] = {};
  for (int k = 0; k <= M::count; ++k) value[k] = scale * M::of(k);
  const i64 count = N ? N : n;
  if (N) for (int line = 0; line < N; line += 16) __builtin_prefetch(to + kAhead + line, 1);
  for (i64 i = 0; i < count; ++i) {
    const float level = level_of<Bits>(codes[i], value), sent = Weighted ? level * weight_of(weights[i]) : level;
    from_float(Add ? to_float(to[i]) + sent : sent, to[i]);
  }
}

// Moves `scales` and `in` on. The weights are those of the elements.
template <class T, bool Add, bool Weighted, int Bits>
static __attribute__((noinline)) void lloyd_decode_run(const u8*& scales, const u8*& in, const u8* weights, T* to, i64 numel,
                                                       i64 block) {
  alignas(64) u8 codes[kMaxBlock];
  const auto next_scale = [&] {
    u16 raw;
    __builtin_memcpy(&raw, scales, 2);
    scales += 2;
    return bf16_value(raw);
  };
  const i64 most = block < kFitted ? kFitted / block : 1, blocks = batches(block) ? numel / block : 0;
  for (i64 left = blocks; left;) {
    const i64 count = left < most ? left : most;
    unpack_batch(in, block, count, Bits, false, codes);
    GW_SETTLE(codes);
    for (i64 c = 0; c < count; ++c, to += block, weights += Weighted ? block : 0) {
      const float scale = next_scale();
      if (block == kUnit) lloyd_values<T, Add, Weighted, Bits, kUnit>(codes + c * kUnit, kUnit, scale, weights, to);
      else lloyd_values<T, Add, Weighted, Bits, 0>(codes + c * block, block, scale, weights, to);
    }
    in += count * code_bytes(block, block, Bits, false);
    left -= count;
  }
  for (i64 at = blocks * block; at < numel; at += block) {
    const i64 n = numel - at < block ? numel - at : block;
    unpack(in, (n + 7) / 8 * 8, Bits, codes);
    GW_SETTLE(codes);
    lloyd_values<T, Add, Weighted, Bits, 0>(codes, n, next_scale(), weights, to);
    to += n;
    weights += Weighted ? n : 0;
    in += code_bytes(n, block, Bits, false);
  }
}

template <class T, bool Add, bool Weighted>
GW_INLINE void lloyd_decode_bits(const u8*& scales, const u8*& in, const u8* weights, T* to, i64 numel, i64 block, int bits) {
  if (bits == 2) lloyd_decode_run<T, Add, Weighted, 2>(scales, in, weights, to, numel, block);
  else if (bits == 3) lloyd_decode_run<T, Add, Weighted, 3>(scales, in, weights, to, numel, block);
  else lloyd_decode_run<T, Add, Weighted, 4>(scales, in, weights, to, numel, block);
}

// `rows`: the segments with the offsets of the weights.
template <class T, bool Add, bool Weighted>
static void lloyd_decode_to(const u8* payload, T* dst, const Segment* segments, const Segment* rows, i64 count, i64 block,
                            const u8* weights) {
  const u8* scales = payload;
  const u8* in = payload + coded_size(segments, count, block, 1, 0).scales;
  for (i64 s = 0; s < count; ++s)
    lloyd_decode_bits<T, Add, Weighted>(scales, in, Weighted ? weights + rows[s].offset : nullptr, dst + segments[s].offset,
                                        segments[s].numel, block, int(segments[s].bits));
}
