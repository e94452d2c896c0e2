// Block Top-k: the values of all blocks, then one byte each, its place in its block. Included inside a level's namespace.
// The meaning is src/gradwire/kernels/reference/sparse.py.

constexpr i64 kMaxPlaces = 256;  // elements of a block: a place is one byte

constexpr i64 kScanLanes = 32, kFew = 16;  // lanes of a block, and how many it keeps for these to be worth while

// A key that at least k <= kScanLanes of n values reach, hardly more as a rule: the k-th largest of the lanes' largest. The
// values are filled up with zeros to a multiple of kScanLanes.
static u32 lane_bound(const float* __restrict value, i64 n, i64 k) {
  alignas(64) i32 most[kScanLanes] = {}, larger[kScanLanes] = {};
  for (i64 i = 0; i < n; i += kScanLanes)
    for (i64 j = 0; j < kScanLanes; ++j) {
      const i32 key = key_of(value[i + j]);
      most[j] = key > most[j] ? key : most[j];
    }
  for (i64 i = 0; i < kScanLanes; ++i)
    for (i64 j = 0; j < kScanLanes; ++j) larger[j] += most[i] > most[j];
  i32 low = i32(kNanKey);
  for (i64 j = 0; j < kScanLanes; ++j) low = larger[j] < k && most[j] < low ? most[j] : low;
  return u32(low);
}

template <class T, bool Residual>
static void block_select_as(const T* src, float* residual, const Segment* segments, i64 count, i64 block, double ratio,
                            u8* payload) {
  alignas(64) float value[kMaxPlaces];
  alignas(64) u8 passed[kMaxPlaces];
  u32 index[kMaxPlaces], bits[kMaxPlaces];
  u8 *values = payload, *places = payload;
  for (i64 s = 0; s < count; ++s) places += block_kept(segments[s].numel, block, ratio) * i64(sizeof(T));
  const i64 whole = kept_of(block, ratio);
  for (i64 s = 0; s < count; ++s) {
    for (i64 at = 0; at < segments[s].numel; at += block) {
      const i64 left_over = segments[s].numel - at, n = left_over < block ? left_over : block;
      const i64 kept = n == block ? whole : kept_of(n, ratio), filled = (n + kScanLanes - 1) / kScanLanes * kScanLanes;
      const T* __restrict from = src + segments[s].offset + at;
      float* __restrict left = Residual ? residual + segments[s].offset + at : nullptr;
      for (i64 i = 0; i < n; ++i) {
        const float v = Residual ? to_float(from[i]) + left[i] : to_float(from[i]);
        if (Residual) left[i] = (bits_of(v) & 0x7fffffffu) < Carried<T>::below ? v : left[i];
        value[i] = v;
      }
      for (i64 i = n; i < filled; ++i) value[i] = 0.0f;
      const u32 low = kept <= kFew ? lane_bound(value, n, kept) : u32(find_bound(value, n, kept).key);
      for (i64 i = 0; i < filled; ++i) passed[i] = u8((bits_of(value[i]) & 0x7fffffffu) >= low);
      for (i64 i = n; i < filled; ++i) passed[i] = 0;
      GW_SETTLE(passed);
      Candidates found{index, bits, 0};
      append(passed, value, n, 0, found);
      if (found.count > kept) keep_largest(found, kept);
      for (i64 i = 0; i < kept; ++i, values += sizeof(T)) {
        T sent;
        from_float(one_nan(float_of(bits[i])), sent);
        __builtin_memcpy(values, &sent, sizeof(T));
        *places++ = u8(index[i]);
        if (Residual && (bits[i] & 0x7fffffffu) < Carried<T>::below) left[index[i]] = float_of(bits[i]) - to_float(sent);
      }
    }
  }
}

template <class T>
static void block_select_dtype(const void* src, float* residual, const Segment* segments, i64 count, i64 block, double ratio,
                               u8* payload) {
  const T* from = static_cast<const T*>(src);
  if (residual) block_select_as<T, true>(from, residual, segments, count, block, ratio, payload);
  else block_select_as<T, false>(from, nullptr, segments, count, block, ratio, payload);
}

void block_topk_encode(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count,
                              int64_t block, double ratio, uint8_t* payload) {
  switch (dtype) {
    case Dtype::float32: return block_select_dtype<float>(src, residual, segments, count, block, ratio, payload);
    case Dtype::bfloat16: return block_select_dtype<bf16>(src, residual, segments, count, block, ratio, payload);
    case Dtype::float16: return block_select_dtype<f16>(src, residual, segments, count, block, ratio, payload);
  }
}

// Whether the places of every block ascend and lie in it.
static bool places_are_right(const u8* places, const Segment* segments, i64 count, i64 block, double ratio) {
  bool right = true;
  for (i64 s = 0; s < count; ++s) {
    for (i64 at = 0; at < segments[s].numel; at += block) {
      const i64 n = segments[s].numel - at < block ? segments[s].numel - at : block, kept = kept_of(n, ratio);
      for (i64 i = 1; i < kept; ++i) right &= places[i - 1] < places[i];
      right &= places[kept - 1] < n;
      places += kept;
    }
  }
  return right;
}

template <class V, class D, bool Add>
static void block_restore_as(const u8* values, const u8* places, void* dst, const Segment* segments, i64 count, i64 block,
                             double ratio) {
  const i64 whole = kept_of(block, ratio);
  for (i64 s = 0; s < count; ++s) {
    D* to = static_cast<D*>(dst) + segments[s].offset;
    if (!Add) clear(to, segments[s].numel * i64(sizeof(D)));
    for (i64 at = 0; at < segments[s].numel; at += block, to += block) {
      const i64 kept = segments[s].numel - at < block ? kept_of(segments[s].numel - at, ratio) : whole;
      for (i64 i = 0; i < kept; ++i) {
        const float value = read_value<V>(values, i);
        from_float(Add ? to_float(to[places[i]]) + value : value, to[places[i]]);
      }
      values += kept * i64(sizeof(V));
      places += kept;
    }
  }
}

template <class V>
static void block_restore(const u8* values, const u8* places, void* dst, Dtype dtype, bool add, const Segment* segments,
                          i64 count, i64 block, double ratio) {
  if (add) return block_restore_as<V, float, true>(values, places, dst, segments, count, block, ratio);
  switch (dtype) {
    case Dtype::float32: return block_restore_as<V, float, false>(values, places, dst, segments, count, block, ratio);
    case Dtype::bfloat16: return block_restore_as<V, bf16, false>(values, places, dst, segments, count, block, ratio);
    case Dtype::float16: return block_restore_as<V, f16, false>(values, places, dst, segments, count, block, ratio);
  }
}

bool block_topk_decode(const uint8_t* payload, Dtype value, void* dst, Dtype dtype, bool add, const Segment* segments,
                              int64_t count, int64_t block, double ratio) {
  const u8* places = payload;
  for (i64 s = 0; s < count; ++s)
    places += block_kept(segments[s].numel, block, ratio) * (value == Dtype::float32 ? 4 : 2);
  if (!places_are_right(places, segments, count, block, ratio)) return false;
  switch (value) {
    case Dtype::float32: block_restore<float>(payload, places, dst, dtype, add, segments, count, block, ratio); break;
    case Dtype::bfloat16: block_restore<bf16>(payload, places, dst, dtype, add, segments, count, block, ratio); break;
    case Dtype::float16: block_restore<f16>(payload, places, dst, dtype, add, segments, count, block, ratio); break;
  }
  return true;
}
