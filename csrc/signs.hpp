// One bit an element: signs alone, or signs of which each block has the mean magnitudes. Included inside a level's
// namespace. The meaning is src/gradwire/kernels/reference/signs.py; this file only has to give the same bytes.

constexpr int kSignUnit = 512;                // elements of which the signs are packed together
constexpr int kUnitBytes = kSignUnit / 8;
constexpr int kLanes = 64;                // partial sums
constexpr i64 kPiece = 8192;              // elements that are summed as float32
constexpr i64 kSignsAhead = 4 * kSignUnit;    // elements prefetched ahead
constexpr double kLargestSum = 0x1p126;   // from here on a block's sum counts as not finite

enum class Memory { none, residual, momentum };

// What a running mean keeps of itself, and what it takes of the gradient.
struct Decay {
  float keep, take;
};

// Whether it goes out as negative: by its sign bit, but that of signs alone -0.0 is not.
template <int Means>
GW_INLINE bool negative(float x) { return Means ? bits_of(x) >> 31 != 0 : bits_of(x) > 0x80000000u; }

// Asks for a unit's cache lines.
template <int Write, class T>
GW_INLINE void prefetch_unit(const T* at) {
#pragma GCC unroll 32
  for (int i = 0; i < kSignUnit; i += 64 / int(sizeof(T))) __builtin_prefetch(at + i, Write);
}

GW_INLINE u16 bf16_nearest(float x) {
  bf16 out;
  from_float(x, out);
  return out.raw;
}

// Sums of a block. Element i of a piece is added to lane i % kLanes, lanes are folded in halves, and pieces are added up.
struct Sums {
  alignas(64) float up[kLanes], down[kLanes];
  double above, under;  // of the elements >= 0 (with one mean: of all magnitudes), and of those < 0
  i64 below;            // how many are < 0
};

using Floats16 = float __attribute__((vector_size(64), may_alias));
using Floats4 = float __attribute__((vector_size(16), may_alias));

// By whole vectors: a loop would become a call.
template <int Means>
GW_INLINE void clear_lanes(Sums& sums) {
  for (int j = 0; j < kLanes; j += 16) {
    *reinterpret_cast<Floats16*>(sums.up + j) = Floats16{};
    if (Means == 2) *reinterpret_cast<Floats16*>(sums.down + j) = Floats16{};
  }
}

// The lanes in halves: two foldings at a time, since each goes through memory.
GW_INLINE float fold(const float* lane) {
  alignas(64) float of16[16];
GW_ROLLED
  for (int j = 0; j < 16; ++j) of16[j] = (lane[j] + lane[j + 32]) + (lane[j + 16] + lane[j + 48]);
  const auto* const quarter = reinterpret_cast<const Floats4*>(of16);
  const Floats4 of4 = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
  return (of4[0] + of4[2]) + (of4[1] + of4[3]);
}

template <int Means>
GW_INLINE void end_piece(Sums& sums) {
  sums.above += double(fold(sums.up));
  if (Means == 2) sums.under += double(fold(sums.down));
  clear_lanes<Means>(sums);
}

template <int Means>
GW_INLINE void add_to(float x, float& up, float& down) {
  if (Means == 1) up += float_of(bits_of(x) & 0x7fffffffu);
  if (Means == 2) {
    up += x < 0.0f ? 0.0f : x;  // a NaN too
    down += x < 0.0f ? x : 0.0f;
  }
}

template <class T, bool Residual>
GW_INLINE float given(const T* from, const float* left, i64 i) {
  return Residual ? to_float(from[i]) + left[i] : to_float(from[i]);
}

// Adds n elements, of which the first is at a multiple of kLanes in its piece.
template <class T, bool Residual, int Means>
GW_INLINE void add_run(const T* __restrict from, const float* __restrict left, i64 n, Sums& sums) {
  float* __restrict up = sums.up;
  float* __restrict down = sums.down;
  i64 i = 0;
  for (; i + kUnit <= n; i += kUnit) {
    for (int j = 0; j < kLanes; ++j) {
      float a = up[j], b = down[j];
#pragma GCC unroll 8
      for (int k = 0; k < kUnit; k += kLanes) add_to<Means>(given<T, Residual>(from, left, i + j + k), a, b);
      up[j] = a;
      down[j] = b;
    }
  }
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) add_to<Means>(given<T, Residual>(from, left, i + j), up[j], down[j]);
  for (i64 j = 0; i + j < n; ++j) add_to<Means>(given<T, Residual>(from, left, i + j), up[j], down[j]);
}

// A whole unit: packs its signs, and adds it to the sums.
template <class T, Memory M, int Means>
GW_INLINE void send_unit(const T* __restrict from, float* __restrict kept, const Decay& decay, Sums& sums,
                         u8* __restrict out) {
  prefetch_unit<0>(from + kSignsAhead);
  if (M != Memory::none) prefetch_unit<1>(kept + kSignsAhead);
  alignas(64) u32 bytes[kUnitBytes];
  const float keep = decay.keep, take = decay.take;
  for (int c = 0; c < kUnitBytes; c += 16) {  // 16 at a time: all addresses are constants away from one
GW_ROLLED
    for (int j = c; j < c + 16; ++j) {
      u32 byte = 0;
      float up = Means ? sums.up[j] : 0.0f, down = Means == 2 ? sums.down[j] : 0.0f;
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        const int i = j + k * kUnitBytes;
        float x = given<T, M == Memory::residual>(from, kept, i);
        if (M == Memory::momentum) {
          const float old = kept[i], mean = keep * old + take * x;
          const bool finite = (bits_of(mean) & 0x7fffffffu) < kInfBits;
          kept[i] = finite ? mean : old;
          x = finite ? mean : x;
        }
        if (Means) byte |= (bits_of(x) >> (31 - k)) & (1u << k);
        else byte = negative<0>(x) ? byte | (1u << k) : byte;
        add_to<Means>(x, up, down);
      }
      bytes[j] = byte;
      if (Means) sums.up[j] = up;
      if (Means == 2) sums.down[j] = down;
    }
  }
  GW_SETTLE(bytes);
  for (int j = 0; j < kUnitBytes; ++j) out[j] = u8(bytes[j]);
}

template <int Means>
GW_INLINE void count_below(const u8* bytes, i64 n, Sums& sums) {
  if (Means != 2) return;
  for (i64 i = 0; i + 8 <= n; i += 8) {
    u64 word;
    __builtin_memcpy(&word, bytes + i, 8);
    sums.below += __builtin_popcountll(word);
  }
  for (i64 i = n / 8 * 8; i < n; ++i) sums.below += __builtin_popcount(bytes[i]);
}

// Packs the signs of at most kSignUnit values; returns the bytes written.
template <int Means>
GW_INLINE i64 pack_signs(const float* v, i64 n, u8* out) {
  alignas(64) u8 codes[kSignUnit];
  const i64 packed = (n + 7) / 8 * 8;
  for (i64 i = 0; i < n; ++i) codes[i] = u8(negative<Means>(v[i]));
  for (i64 i = n; i < packed; ++i) codes[i] = 0;
  GW_SETTLE(codes);
  pack_plane<1>(codes, packed, 0, out);
  return packed / 8;
}

// What the last elements of a run send, fewer than a unit.
template <class T, Memory M>
GW_INLINE void take_tail(const T* from, float* kept, const Decay& decay, i64 n, float* v) {
  for (i64 i = 0; i < n; ++i) {
    float x = given<T, M == Memory::residual>(from, kept, i);
    if (M == Memory::momentum) {
      const float old = kept[i], mean = decay.keep * old + decay.take * x;
      const bool finite = (bits_of(mean) & 0x7fffffffu) < kInfBits;
      kept[i] = finite ? mean : old;
      x = finite ? mean : x;
    }
    v[i] = x;
  }
}

template <class T, Memory M>
static void send_signs(const T* src, float* kept, const Decay& decay, const Segment* segments, i64 count, u8* out) {
  alignas(64) float v[kSignUnit];
  Sums unused;
  for (i64 s = 0; s < count; ++s) {
    const T* from = src + segments[s].offset;
    float* memory = M == Memory::none ? nullptr : kept + segments[s].offset;
    const i64 numel = segments[s].numel, whole = numel / kSignUnit * kSignUnit;
    for (i64 at = 0; at < whole; at += kSignUnit, out += kUnitBytes)
      send_unit<T, M, 0>(from + at, M == Memory::none ? nullptr : memory + at, decay, unused, out);
    take_tail<T, M>(from + whole, M == Memory::none ? nullptr : memory + whole, decay, numel - whole, v);
    out += pack_signs<0>(v, numel - whole, out);
  }
}

// What a block's elements decode to, as they travel; false where the block is not finite.
template <int Means>
GW_INLINE bool means_of(const Sums& sums, i64 n, u16* raw) {
  const bool finite = sums.above < kLargestSum && (Means == 1 || -sums.under < kLargestSum);  // false for a NaN
  if (!finite) {
    raw[0] = raw[Means - 1] = 0x7fc0u;
  } else if (Means == 1) {
    raw[0] = bf16_nearest(float(sums.above / double(n)));
  } else {
    const i64 above = n - sums.below;
    raw[0] = above ? bf16_nearest(float(sums.above / double(above))) : u16(0);
    raw[1] = sums.below ? bf16_nearest(float(sums.under / double(sums.below))) : u16(0);
  }
  return finite;
}

struct Values {
  float above, under;  // what elements >= 0 and < 0 decode to
};

template <int Means>
GW_INLINE Values values_of(const u16* raw) {
  const float above = bf16_value(raw[0]);
  return {above, Means == 1 ? -above : bf16_value(raw[1])};
}

// What is left of n elements after they were sent. From the last piece to the first: the last is the one still in cache.
template <class T, int Means>
GW_INLINE void keep_rest(const T* src, float* residual, i64 n, const Values& values) {
  const float above = values.above, under = values.under;
  for (i64 at = (n - 1) / kPiece * kPiece; at >= 0; at -= kPiece) {
    const T* __restrict from = src + at;
    float* __restrict left = residual + at;
    const i64 count = n - at < kPiece ? n - at : kPiece;
    for (i64 i = 0; i < count; ++i) {
      const float x = to_float(from[i]) + left[i];
      left[i] = x - (Means == 1 ? float_of(bits_of(above) ^ (bits_of(x) & 0x80000000u)) : negative<2>(x) ? under : above);
    }
  }
}

// Blocks of whole units. A block's residual is found after the sums of the next: they are a long chain to its means.
template <class T, bool Residual, int Means>
static void send_blocks(const T* from, float* left, i64 numel, i64 block, u8*& scales, u8*& out) {
  alignas(64) float v[kSignUnit];
  constexpr Memory memory = Residual ? Memory::residual : Memory::none;
  Sums sums;
  Values values{};
  i64 waiting = -1, wait_count = 0;  // the block whose residual is still to be found
  for (i64 at = 0; at < numel; at += block) {
    const i64 n = numel - at < block ? numel - at : block, whole = n / kSignUnit * kSignUnit;
    u8* const first = out;
    clear_lanes<Means>(sums);
    sums.above = sums.under = 0.0;
    sums.below = 0;
    for (i64 i = 0; i < whole; i += kSignUnit, out += kUnitBytes) {
      if (i && i % kPiece == 0) end_piece<Means>(sums);
      send_unit<T, memory, Means>(from + at + i, Residual ? left + at + i : nullptr, {}, sums, out);
    }
    if (whole < n) {
      if (whole && whole % kPiece == 0) end_piece<Means>(sums);
      take_tail<T, memory>(from + at + whole, Residual ? left + at + whole : nullptr, {}, n - whole, v);
      add_run<float, false, Means>(v, nullptr, n - whole, sums);
      out += pack_signs<Means>(v, n - whole, out);
    }
    end_piece<Means>(sums);
    count_below<Means>(first, out - first, sums);
    u16 raw[2];
    const bool finite = means_of<Means>(sums, n, raw);
    __builtin_memcpy(scales, raw, 2 * Means);
    scales += 2 * Means;
    if (!finite) __builtin_memset(first, 0, size_t(out - first));
    if (Residual) {
      if (waiting >= 0) keep_rest<T, Means>(from + waiting, left + waiting, wait_count, values);
      waiting = finite ? at : -1;
      wait_count = n;
      values = values_of<Means>(raw);
    }
  }
  if (Residual && waiting >= 0) keep_rest<T, Means>(from + waiting, left + waiting, wait_count, values);
}

// Blocks of which a unit holds several.
template <class T, bool Residual, int Means>
static void send_small_blocks(const T* from, float* left, i64 numel, i64 block, u8*& scales, u8*& out) {
  alignas(64) float v[kSignUnit];
  Sums sums;
  for (i64 at = 0; at < numel; at += kSignUnit) {
    const i64 count = numel - at < kSignUnit ? numel - at : kSignUnit;
    take_tail<T, Residual ? Memory::residual : Memory::none>(from + at, Residual ? left + at : nullptr, {}, count, v);
    for (i64 b = 0; b < count; b += block) {
      const i64 n = count - b < block ? count - b : block;
      clear_lanes<Means>(sums);
      sums.above = sums.under = 0.0;
      sums.below = 0;
      add_run<float, false, Means>(v + b, nullptr, n, sums);
      end_piece<Means>(sums);
      if (Means == 2) for (i64 i = b; i < b + n; ++i) sums.below += negative<2>(v[i]);
      u16 raw[2];
      const bool finite = means_of<Means>(sums, n, raw);
      __builtin_memcpy(scales, raw, 2 * Means);
      scales += 2 * Means;
      if (!finite) for (i64 i = b; i < b + n; ++i) v[i] = 0.0f;
      else if (Residual) keep_rest<T, Means>(from + at + b, left + at + b, n, values_of<Means>(raw));
    }
    out += pack_signs<Means>(v, count, out);
  }
}

template <class T, bool Residual, int Means>
static void send_mean_signs(const T* src, float* residual, const Segment* segments, i64 count, i64 block, u8* payload) {
  u8* scales = payload;
  u8* const first_code = payload + coded_size(segments, count, block, Means, 1).scales;
  u8* out = first_code;
  for (i64 s = 0; s < count; ++s) {
    const T* from = src + segments[s].offset;
    float* left = Residual ? residual + segments[s].offset : nullptr;
    const i64 numel = segments[s].numel;
    if (block && block < kSignUnit) send_small_blocks<T, Residual, Means>(from, left, numel, block, scales, out);
    else send_blocks<T, Residual, Means>(from, left, numel, block ? block : numel, scales, out);
  }
  while (scales < first_code) *scales++ = 0;
}

// A whole unit of one block.
template <class T, bool Add>
GW_INLINE void read_unit(const u8* __restrict in, T* __restrict to, const Values& values) {
  const float above = values.above, under = values.under;
  prefetch_unit<1>(to + kSignsAhead);
  alignas(64) u32 bytes[kUnitBytes];
  for (int j = 0; j < kUnitBytes; ++j) bytes[j] = in[j];
  GW_SETTLE(bytes);
  for (int j = 0; j < kUnitBytes; ++j) {
    const u32 byte = bytes[j];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      T& element = to[j + k * kUnitBytes];
      const float value = byte & (1u << k) ? under : above;
      from_float(Add ? to_float(element) + value : value, element);
    }
  }
}

// Means 0: -1 and 1. A block of 0 elements is a whole run.
template <class T, bool Add, int Means>
static void read_signs(const u8* payload, T* dst, const Segment* segments, i64 count, i64 block) {
  alignas(64) u8 codes[kSignUnit];
  const u8* scales = payload;
  const u8* in = payload + coded_size(segments, count, block, Means, 1).scales;
  Values values{1.0f, -1.0f};
  for (i64 s = 0; s < count; ++s) {
    T* const first = dst + segments[s].offset;
    const i64 numel = segments[s].numel, whole_block = block ? block : numel;
    i64 block_end = Means ? 0 : numel;  // of the block whose values are known
    for (i64 at = 0; at < numel;) {
      const i64 unit_end = at + kSignUnit < numel ? at + kSignUnit : numel, packed = (unit_end - at + 7) / 8;
      const i64 start = at;
      if (unit_end - at < kSignUnit || (block && block < kSignUnit)) unpack_plane<1>(in, 8 * packed, 0, true, codes);
      while (at < unit_end) {
        if (at == block_end) {
          u16 raw[2] = {};
          __builtin_memcpy(raw, scales, 2 * Means);
          scales += 2 * Means;
          values = values_of<Means>(raw);
          block_end = at + whole_block < numel ? at + whole_block : numel;
        }
        const i64 end = block_end < unit_end ? block_end : unit_end;
        T* __restrict to = first + at;
        if (end - at == kSignUnit) {
          read_unit<T, Add>(in, to, values);
        } else {
          for (i64 i = 0; i < end - at; ++i) {
            const float value = codes[at - start + i] ? values.under : values.above;
            from_float(Add ? to_float(to[i]) + value : value, to[i]);
          }
        }
        at = end;
      }
      in += packed;
    }
  }
}
