// Three values an element, two bits each: thresholds (TwoBit), and TernGrad with clipping. Included inside a level's
// namespace, after signs.hpp. The meaning is src/gradwire/kernels/reference/ternary.py; this file only has to give the
// same bytes.

constexpr int kCodeRun = 64;  // bytes of codes that are found together

// n elements as float32, filled up with zeros to a multiple of 8.
template <bool Residual>
GW_INLINE void take_block(const float* from, const float* left, i64 n, float* v) {
  for (i64 i = 0; i < n; ++i) v[i] = given<float, Residual>(from, left, i);
  for (i64 i = n; i < (n + 7) / 8 * 8; ++i) v[i] = 0.0f;
}

// ---- thresholds

struct Threshold {
  float t;
  bool finite;
};

// 0: nothing is sent, 1: t, 2: -t, 3: not finite, where the threshold is fixed.
template <bool Fixed>
GW_INLINE u32 with_code(float x, float t, int shift, u32 byte) {
  byte = x >= t ? byte | (1u << shift) : byte;
  byte = x <= -t ? byte | (2u << shift) : byte;
  if (Fixed) byte = (bits_of(x) & 0x7fffffffu) >= kHuge ? byte | (3u << shift) : byte;
  return byte;
}

template <bool Fixed>
GW_INLINE float rest_of(float x, float old, float t) {
  float rest = x >= t ? x - t : x;
  rest = x <= -t ? x + t : rest;
  return Fixed && (bits_of(x) & 0x7fffffffu) >= kHuge ? old : rest;
}

template <bool Residual>
GW_INLINE Threshold find_threshold(const float* from, const float* left, i64 n, double multiple, u8* scale) {
  Sums sums;
  clear_lanes<1>(sums);
  add_run<float, Residual, 1>(from, left, n, sums);
  const double sum = double(fold(sums.up));
  u16 raw = 0x7fc0u;
  const bool finite = sum < kLargestSum;
  if (finite) {
    raw = bf16_nearest(float(sum / double(n) * multiple));
    raw = raw < 0x7f7fu ? raw : u16(0x7f7fu);
  }
  __builtin_memcpy(scale, &raw, 2);
  return {bf16_value(raw), finite};
}

// A block of n elements; returns the bytes written.
template <bool Residual, bool Fixed>
static i64 send_thresholds(const float* __restrict from, float* __restrict left, i64 n, const Threshold& threshold,
                           u8* __restrict out) {
  const i64 packed = (n + 7) / 8 * 8, stride = packed / 4;
  if (!threshold.finite) {
    __builtin_memset(out, 0, size_t(stride));
    return stride;
  }
  const float t = threshold.t > 0.0f ? threshold.t : float_of(kInfBits);  // a block of zeros sends zeros
  if (n % (4 * kCodeRun) == 0) {
    for (i64 c = 0; c < stride; c += kCodeRun) {
      alignas(64) u32 bytes[kCodeRun];
#pragma GCC ivdep
      for (int j = 0; j < kCodeRun; ++j) {
        u32 byte = 0;
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const i64 i = c + j + k * stride;
          const float x = given<float, Residual>(from, left, i);
          byte = with_code<Fixed>(x, t, 2 * k, byte);
        }
        bytes[j] = byte;
      }
      GW_SETTLE(bytes);
      for (int j = 0; j < kCodeRun; ++j) out[c + j] = u8(bytes[j]);
    }
  } else {
    alignas(64) u8 codes[kMaxBlock];
    for (i64 i = 0; i < n; ++i) codes[i] = u8(with_code<Fixed>(given<float, Residual>(from, left, i), t, 0, 0));
    for (i64 i = n; i < packed; ++i) codes[i] = 0;
    GW_SETTLE(codes);
    pack_plane<2>(codes, packed, 0, out);
  }
  if (Residual) {
    for (i64 i = 0; i < n; ++i) left[i] = rest_of<Fixed>(given<float, true>(from, left, i), left[i], t);
  }
  return stride;
}

template <bool Residual, bool Fixed>
static void threshold_encode_as(const Gradient& src, float* residual, const Segment* segments, i64 count, const Ternary& q,
                                u8* payload) {
  alignas(64) float tiles[2][kMaxBlock];
  u8* scales = payload;
  u8* const first_code = payload + coded_size(segments, count, q.block, Fixed ? 0 : 1, 2).scales;
  u8* out = first_code;
  for (i64 s = 0; s < count; ++s) {
    const i64 numel = segments[s].numel;
    float* left = Residual ? residual + segments[s].offset : nullptr;
    const auto size_of = [&](i64 at) { return numel - at < q.block ? numel - at : q.block; };
    const auto read = [&](i64 at, int turn) { return read_row(src, s, at, size_of(at), tiles[turn]); };
    // a block's threshold is found before the block in front of it is sent: it is a long chain
    const auto find = [&](const float* from, i64 at) {
      if (Fixed) return Threshold{q.threshold, true};
      scales += 2;
      return find_threshold<Residual>(from, Residual ? left + at : nullptr, size_of(at), q.multiple, scales - 2);
    };
    if (!numel) continue;
    const float* next_from = read(0, 0);
    Threshold next = find(next_from, 0);
    int turn = 0;
    for (i64 at = 0; at < numel; at += q.block) {
      const float* const from = next_from;
      const Threshold now = next;
      if (at + q.block < numel) {
        next_from = read(at + q.block, turn ^= 1);
        next = find(next_from, at + q.block);
      }
      out += send_thresholds<Residual, Fixed>(from, Residual ? left + at : nullptr, size_of(at), now, out);
    }
  }
  while (scales < first_code) *scales++ = 0;
}

// What the codes stand for; a scale that is not finite makes NaNs of all of them.
GW_INLINE float threshold_value(u32 code, float t) {
  const float low = code & 1u ? t : t - t;
  const float high = code & 1u ? float_of(0x7fc00000u) : -t;
  return code & 2u ? high : low;
}

template <class T, bool Add>
static void threshold_decode_as(const u8* payload, void* dst, const Segment* segments, i64 count, const Ternary& q) {
  alignas(64) u8 codes[kMaxBlock];
  const bool fixed = q.threshold > 0.0f;
  const u8* scales = payload;
  const u8* in = payload + coded_size(segments, count, q.block, fixed ? 0 : 1, 2).scales;
  for (i64 s = 0; s < count; ++s) {
    const i64 numel = segments[s].numel;
    for (i64 at = 0; at < numel; at += q.block) {
      const i64 n = numel - at < q.block ? numel - at : q.block, packed = (n + 7) / 8 * 8, stride = packed / 4;
      T* __restrict to = static_cast<T*>(dst) + segments[s].offset + at;
      float t = q.threshold;
      if (!fixed) {
        u16 raw;
        __builtin_memcpy(&raw, scales, 2);
        scales += 2;
        t = bf16_value(raw);
      }
      if (n % (4 * kCodeRun) == 0) {
        for (i64 c = 0; c < stride; c += kCodeRun) {
          alignas(64) u32 bytes[kCodeRun];
          for (int j = 0; j < kCodeRun; ++j) bytes[j] = in[c + j];
          GW_SETTLE(bytes);
#pragma GCC ivdep
          for (int j = 0; j < kCodeRun; ++j) {
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
              T& element = to[c + j + k * stride];
              const float value = threshold_value(bytes[j] >> (2 * k), t);
              from_float(Add ? to_float(element) + value : value, element);
            }
          }
        }
      } else {
        unpack_plane<2>(in, packed, 0, true, codes);
        GW_SETTLE(codes);
        for (i64 i = 0; i < n; ++i) {
          const float value = threshold_value(codes[i], t);
          from_float(Add ? to_float(to[i]) + value : value, to[i]);
        }
      }
      in += stride;
    }
  }
}

// ---- TernGrad with clipping: the codes are those of QSGD with 2 bits, of values cut back to a smaller scale

// A block whose largest magnitude lies between these has squares that float32 can add up; others are brought there.
constexpr float kSquareLow = 0x1p-40f, kSquareHigh = 0x1p50f;

struct Clipped {
  float bound;
  bool finite;
};

template <bool Residual, bool Scaled>
GW_INLINE void add_square(const float* from, const float* left, i64 i, float by, float& sum, i32& largest) {
  const float x = given<float, Residual>(from, left, i), scaled = Scaled ? x * by : x;
  const i32 magnitude = i32(bits_of(x) & 0x7fffffffu);
  largest = magnitude > largest ? magnitude : largest;
  sum += scaled * scaled;
}

// Sum of the squares of n elements times `by`, in lanes as sums of magnitudes are, and the bits of the largest magnitude.
template <bool Residual, bool Scaled>
GW_INLINE float sum_squares(const float* __restrict from, const float* __restrict left, i64 n, float by, u32& largest) {
  alignas(64) float lane[kLanes] = {};
  alignas(64) i32 most[kLanes] = {};
  i64 i = 0;
  for (; i + kUnit <= n; i += kUnit) {
    for (int j = 0; j < kLanes; ++j) {
      float sum = lane[j];
      i32 top = most[j];
#pragma GCC unroll 8
      for (int k = 0; k < kUnit; k += kLanes) add_square<Residual, Scaled>(from, left, i + j + k, by, sum, top);
      lane[j] = sum;
      most[j] = top;
    }
  }
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) add_square<Residual, Scaled>(from, left, i + j, by, lane[j], most[j]);
  for (i64 j = 0; i + j < n; ++j) add_square<Residual, Scaled>(from, left, i + j, by, lane[j], most[j]);
  i32 top = 0;
  for (int j = 0; j < kLanes; ++j) top = most[j] > top ? most[j] : top;
  largest = u32(top);
  return fold(lane);
}

template <bool Residual>
GW_INLINE Clipped find_bound(const float* from, const float* left, i64 n, double clip, u8* scale) {
  u32 largest;
  float squares = sum_squares<Residual, false>(from, left, n, 1.0f, largest), by = 1.0f;
  const float most = float_of(largest);
  const bool finite = largest < kHuge;
  u16 raw = 0x7fc0u;
  if (finite) {
    if (!(most >= kSquareLow && most < kSquareHigh)) {
      const u32 exponent = largest >> 23;  // the largest becomes 1 to 2; what lies below 2^-120 is left as small as it is
      by = float_of((exponent < 7 ? 247u : 254u - exponent) << 23);
      squares = sum_squares<Residual, true>(from, left, n, by, largest);
    }
    const float limit = float(clip * __builtin_sqrt(double(squares) / double(n)) / double(by));
    const float bound = limit < most ? limit : most;
    raw = bound >= kTiny ? bf16_up(bound) : u16(0);
  }
  __builtin_memcpy(scale, &raw, 2);
  return {bf16_value(raw), finite};
}

// The code of x, as the QSGD kernels find it: 0, 1 or 2 for -bound, 0 or bound. `by` is 2^16 / bound, or a little less.
GW_INLINE u32 ternary_code(float x, float bound, float by, u32 random) {
  const float low = x < -bound ? -bound : x, cut = low > bound ? bound : low;
  return (u32(i32(cut * by + 0x1p16f)) + random) >> 16;
}

GW_INLINE float ternary_rest(float x, u32 code, float bound) { return x - float(i32(code) - 1) * bound; }

// A block of n elements of which the first takes the random number of this counter; returns the bytes written.
template <bool Residual>
static i64 send_ternary(const float* __restrict from, float* __restrict left, i64 n, i64 block, const Clipped& scale, u64 key,
                        u32 counter, u8* __restrict out) {
  alignas(64) u8 codes[kMaxBlock];
  const i64 packed = (n + 7) / 8 * 8, stride = packed / 4, half = packed / 2, nbytes = code_bytes(n, block, 2, true);
  const u32 key_low = u32(key), key_high = u32(key >> 32);
  const float bound = scale.bound, by = bound >= kTiny ? 0x1p16f * kShort / bound : 0.0f;
  if (!scale.finite) {
    __builtin_memset(out, 0, size_t(nbytes));
    return nbytes;
  }
  if (n % (4 * kCodeRun) == 0) {
    for (i64 c = 0; c < stride; c += kCodeRun) {
      alignas(64) u32 near[16], far[16];
      for (u32 l = 0; l < 16; ++l) near[l] = random_hash(counter + u32(c) + l, key_low, key_high);
      for (u32 l = 0; l < 16; ++l) far[l] = random_hash(counter + u32(c + stride) + l, key_low, key_high);
#pragma GCC ivdep
      for (int l = 0; l < 16; ++l) {
#pragma GCC unroll 4
        for (int group = 0; group < 4; ++group) {
          const u32 words[2] = {random_fold(near[l], group), random_fold(far[l], group)};
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k) {
            const i64 i = c + 16 * group + l + k * stride;
            const float x = given<float, Residual>(from, left, i);
            const u32 code = ternary_code(x, bound, by, k < 2 ? words[k] & 0xffffu : words[k - 2] >> 16);
            codes[i] = u8(code);
            if (Residual) left[i] = ternary_rest(x, code, bound);
          }
        }
      }
    }
    GW_SETTLE(codes);
    if (in_base_3(n, block, 2, true)) pack_base_3(codes, n, out);
    else pack_plane<2>(codes, n, 0, out);
    return nbytes;
  }
  alignas(64) float v[kMaxBlock];
  take_block<Residual>(from, left, n, v);
  for (i64 j = 0; j < half; j += 16) {
    const u32 group = (counter + u32(j)) / 16 % 4, base = counter + u32(j) - 16 * group;
    const i64 end = half - j < 16 ? half - j : 16;
    for (i64 l = 0; l < end; ++l) {
      const u32 word = random_fold(random_hash(base + u32(l), key_low, key_high), int(group));
      codes[j + l] = u8(ternary_code(v[j + l], bound, by, word & 0xffffu));
      codes[j + l + half] = u8(ternary_code(v[j + l + half], bound, by, word >> 16));
    }
  }
  if (Residual) for (i64 i = 0; i < n; ++i) left[i] = ternary_rest(v[i], codes[i], bound);
  for (i64 i = n; i < packed; ++i) codes[i] = 0;
  GW_SETTLE(codes);
  if (in_base_3(n, block, 2, true)) pack_base_3(codes, n, out);
  else pack_plane<2>(codes, packed, 0, out);
  return nbytes;
}

template <bool Residual>
static void terngrad_encode_as(const Gradient& src, float* residual, const Segment* segments, i64 count, const Stream& stream,
                               i64 block, double clip, u8* payload) {
  alignas(64) float tiles[2][kMaxBlock];
  u8* scales = payload;
  u8* const first_code = payload + coded_size(segments, count, block, 1, 2, true).scales;
  u8* out = first_code;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    const u64 key = stream_key(stream, seg.key);
    float* left = Residual ? residual + seg.offset : nullptr;
    const auto size_of = [&](i64 at) { return seg.numel - at < block ? seg.numel - at : block; };
    const auto read = [&](i64 at, int turn) { return read_row(src, s, at, size_of(at), tiles[turn]); };
    const auto find = [&](const float* from, i64 at) {
      scales += 2;
      return find_bound<Residual>(from, Residual ? left + at : nullptr, size_of(at), clip, scales - 2);
    };
    if (!seg.numel) continue;
    const float* next_from = read(0, 0);
    Clipped next = find(next_from, 0);
    int turn = 0;
    for (i64 at = 0; at < seg.numel; at += block) {
      const float* const from = next_from;
      const Clipped now = next;
      if (at + block < seg.numel) {
        next_from = read(at + block, turn ^= 1);
        next = find(next_from, at + block);
      }
      const u32 counter = u32((seg.first + at) / 2);
      out += send_ternary<Residual>(from, Residual ? left + at : nullptr, size_of(at), block, now, key, counter, out);
    }
  }
  while (scales < first_code) *scales++ = 0;
}

// ---- by dtype

void threshold_encode(const Gradient& src, float* residual, const Segment* segments, i64 count, const Ternary& q, u8* payload) {
  const bool fixed = q.threshold > 0.0f;
  if (residual && fixed) threshold_encode_as<true, true>(src, residual, segments, count, q, payload);
  else if (residual) threshold_encode_as<true, false>(src, residual, segments, count, q, payload);
  else if (fixed) threshold_encode_as<false, true>(src, nullptr, segments, count, q, payload);
  else threshold_encode_as<false, false>(src, nullptr, segments, count, q, payload);
}

void threshold_decode(const u8* payload, void* dst, Dtype dtype, bool add, const Segment* segments, i64 count,
                             const Ternary& q) {
  switch (dtype) {
    case Dtype::float32:
      if (add) return threshold_decode_as<float, true>(payload, dst, segments, count, q);
      return threshold_decode_as<float, false>(payload, dst, segments, count, q);
    case Dtype::bfloat16: return threshold_decode_as<bf16, false>(payload, dst, segments, count, q);
    case Dtype::float16: return threshold_decode_as<f16, false>(payload, dst, segments, count, q);
  }
}

void terngrad_encode(const Gradient& src, float* residual, const Segment* segments, i64 count, const Stream& stream, i64 block,
                            double clip, u8* payload) {
  if (residual) terngrad_encode_as<true>(src, residual, segments, count, stream, block, clip, payload);
  else terngrad_encode_as<false>(src, nullptr, segments, count, stream, block, clip, payload);
}
