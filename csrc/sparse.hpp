// Top-k, Threshold and DGC: values of the elements selected, then their indices. Included inside a level's namespace.
// The meaning is src/gradwire/kernels/reference/sparse.py.

enum class Remember { nothing, residual, momentum };

// What rounds to something finite in the gradient's dtype, by the bits of its magnitude: all else cannot be carried.
template <class T> struct Carried;
template <> struct Carried<float> { static constexpr u32 below = kInfBits; };
template <> struct Carried<bf16> { static constexpr u32 below = 0x7f7f8000u; };
template <> struct Carried<f16> { static constexpr u32 below = 0x477ff000u; };

GW_INLINE float one_nan(float x) { return x == x ? x : float_of(0x7fc00000u); }

// A gradient and what is remembered of it, from some element on.
template <class T>
struct Source {
  const T* src;
  float *residual, *momentum;
  float scale, decay;  // of the gradient, of the momentum

  Source at(i64 offset) const {
    return {src + offset, residual ? residual + offset : nullptr, momentum ? momentum + offset : nullptr, scale, decay};
  }
};

// n elements: value = gradient plus memory, which it becomes; passed = its magnitude has at least the bits `low`.
template <class T, Remember R>
static void gather(const Source<T>& from, i64 n, u32 low, float* __restrict value, u8* __restrict passed) {
  const T* __restrict src = from.src;
  float* __restrict residual = from.residual;
  float* __restrict momentum = from.momentum;
  const float scale = from.scale, decay = from.decay;
  for (i64 i = 0; i < n; ++i) {
    float v = to_float(src[i]), u = 0.0f;
    if (R != Remember::residual) v *= scale;
    if (R == Remember::residual) v += residual[i];
    if (R == Remember::momentum) {
      u = decay * momentum[i] + v;
      v = residual[i] + u;
    }
    const u32 magnitude = bits_of(v) & 0x7fffffffu;
    const bool carried = magnitude < Carried<T>::below;
    if (R != Remember::nothing) residual[i] = carried ? v : residual[i];
    if (R == Remember::momentum) momentum[i] = carried ? u : momentum[i];
    value[i] = v;
    passed[i] = magnitude >= low;
  }
}

// The same values once more, after `gather`, of elements whose bits are below `high`. What cannot be carried is wrong here.
template <class T, Remember R>
static void gather_below(const Source<T>& from, i64 n, u32 low, u32 high, float* __restrict value, u8* __restrict passed) {
  for (i64 i = 0; i < n; ++i) {
    const float v = R == Remember::nothing ? to_float(from.src[i]) * from.scale : from.residual[i];
    const u32 magnitude = bits_of(v) & 0x7fffffffu;
    value[i] = v;
    passed[i] = (magnitude >= low) & (magnitude < high);
  }
}

// A group of segments: its elements are numbered in their order.
template <class T>
struct Group {
  const Segment* segments;
  i64 count, numel, kept;
  Source<T> source;
};

// What brings the norm of a run back to the bound, if it is larger and finite. Summed in 16 lanes, folded.
template <class T>
static float clipping(const T* src, i64 numel, double bound) {
  double lane[16] = {};
  for (i64 i = 0; i < numel / 16 * 16; i += 16)
    for (int j = 0; j < 16; ++j) lane[j] += double(to_float(src[i + j])) * double(to_float(src[i + j]));
  for (i64 i = numel / 16 * 16; i < numel; ++i) lane[i % 16] += double(to_float(src[i])) * double(to_float(src[i]));
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  const double norm = __builtin_sqrt(lane[0]);
  return norm > bound && norm < __builtin_inf() ? float(bound / norm) : 1.0f;
}

constexpr i64 kSample = 16384, kSampled = 4096;  // elements of a sample at most; groups that are sampled at least

// A bound that usually more than `kept` elements reach, by three standard deviations; 0 where a sample says nothing.
template <class T, Remember R>
static u32 sampled_bound(const Group<T>& group) {
  u32 sample[kSample];
  if (group.numel < kSampled) return 0;
  const i64 wanted = group.numel / 64 < 1024 ? 1024 : group.numel / 64 < kSample ? group.numel / 64 : kSample;
  const i64 stride = (group.numel / wanted - 1) | 1;  // odd: not along the columns of a matrix
  const double expected = double(group.kept) / double(stride);
  i64 count = 0, skip = 0;
  for (i64 s = 0; s < group.count; ++s) {
    const Segment& seg = group.segments[s];
    const Source<T> from = group.source.at(seg.offset);
    for (; skip < seg.numel && count < kSample; skip += stride) {
      float v = to_float(from.src[skip]);
      if (R == Remember::residual) v += from.residual[skip];
      if (R != Remember::residual) v *= from.scale;
      if (R == Remember::momentum) v = from.residual[skip] + (from.decay * from.momentum[skip] + v);
      sample[count++] = bits_of(v);
    }
    skip -= seg.numel;
  }
  const i64 rank = i64(expected + 3.0 * __builtin_sqrt(expected)) + 4;
  return rank < count ? u32(find_bound(sample, count, rank).key) : 0;
}

// The `kept` largest of a group, ascending by index; residual and momentum become what they and the gradient make.
template <class T, Remember R>
static void select_group(const Group<T>& group, const Scratch& scratch, Candidates& found) {
  alignas(64) float value[kChunk];
  alignas(64) u8 passed[kChunk];
  const i64 full = scratch.capacity - kChunk;
  Candidates rest{scratch.room + 2 * scratch.capacity, scratch.room + 3 * scratch.capacity, 0};
  const u32 sampled = sampled_bound<T, R>(group), high = sampled < Carried<T>::below ? sampled : Carried<T>::below;
  for (int pass = 0; pass < 2; ++pass) {
    // the second, of all that is below the sampled bound, only where that was too high
    if (pass && found.count >= group.kept) break;
    Candidates& to = pass ? rest : found;
    const i64 wanted = pass ? group.kept - found.count : group.kept;
    u32 low = pass ? 0 : high, base = 0;
    for (i64 s = 0, met = 0; s < group.count; base += u32(group.segments[s++].numel)) {
      const Segment& seg = group.segments[s];
      const Source<T> source = group.source.at(seg.offset);
      for (i64 at = 0; at < seg.numel; at += kChunk) {
        const i64 n = seg.numel - at < kChunk ? seg.numel - at : kChunk;
        for (i64 i = n; i < (n + 7) / 8 * 8; ++i) passed[i] = 0;
        if (!pass) gather<T, R>(source.at(at), n, low, value, passed);
        else gather_below<T, R>(source.at(at), n, low, high, value, passed);
        const u32 first = base + u32(at);
        if (pass) for (; met < found.count && found.index[met] < first + u32(n); ++met) passed[found.index[met] - first] = 0;
        GW_SETTLE(passed);
        if (to.count > full) low = keep_largest(to, wanted);
        append(passed, value, n, first, to);
      }
    }
    if (to.count > wanted) keep_largest(to, wanted);
  }
  merge(found, rest);
}

// Writes a group's values and takes what was sent out of memory. What is smaller than the threshold stays there.
template <class T, Remember R>
static void send_group(const Group<T>& group, const Candidates& found, float threshold, u8* values) {
  const i32 least = threshold > 0.0f ? i32(bits_of(threshold)) : 0;
  u32 base = 0;
  for (i64 s = 0, i = 0; s < group.count; base += u32(group.segments[s++].numel)) {
    const Source<T> from = group.source.at(group.segments[s].offset);
    for (; i < found.count && found.index[i] - base < u32(group.segments[s].numel); ++i, values += sizeof(T)) {
      const bool large = key_of(found.bits[i]) >= least;
      const float value = large ? one_nan(float_of(found.bits[i])) : 0.0f;
      T sent;
      from_float(value, sent);
      __builtin_memcpy(values, &sent, sizeof(T));
      if (R == Remember::nothing || !large || (found.bits[i] & 0x7fffffffu) >= Carried<T>::below) continue;
      from.residual[found.index[i] - base] = value - to_float(sent);
      if (R == Remember::momentum) from.momentum[found.index[i] - base] = 0.0f;
    }
  }
}

static i64 numel_of(const Segment* segments, i64 count) {
  i64 numel = 0;
  for (i64 s = 0; s < count; ++s) numel += segments[s].numel;
  return numel;
}

// Calls each(segments, how many, elements) for every group.
template <class Each>
GW_INLINE void for_groups(const Segment* segments, i64 count, bool together, Each each) {
  if (together) each(segments, count, numel_of(segments, count));
  else for (i64 s = 0; s < count; ++s) each(segments + s, i64(1), segments[s].numel);
}

template <class T, Remember R>
static void select_as(const Source<T>& source, const Segment* segments, i64 count, const Selector& selector,
                      const Scratch& scratch, u8* payload) {
  u8 *values = payload, *indices = payload;
  for_groups(segments, count, selector.together, [&](const Segment*, i64, i64 numel) {
    indices += kept_of(numel, selector.ratio) * i64(sizeof(T));
  });
  for_groups(segments, count, selector.together, [&](const Segment* rows, i64 rows_count, i64 numel) {
    Group<T> group{rows, rows_count, numel, kept_of(numel, selector.ratio), source};
    if (selector.bound > 0.0) group.source.scale = clipping(source.src + rows->offset, rows->numel, selector.bound);
    Candidates found{scratch.room, scratch.room + scratch.capacity, 0};
    select_group<T, R>(group, scratch, found);
    send_group<T, R>(group, found, selector.threshold, values);
    write_indices(found.index, group.kept, numel, indices);
    values += group.kept * i64(sizeof(T));
    indices += index_bytes(group.kept, numel);
  });
}

template <class T>
static void select_dtype(const void* src, float* residual, float* momentum, const Segment* segments, i64 count,
                         const Selector& selector, const Scratch& scratch, u8* payload) {
  const Source<T> source{static_cast<const T*>(src), residual, momentum, 1.0f, selector.momentum};
  if (momentum) select_as<T, Remember::momentum>(source, segments, count, selector, scratch, payload);
  else if (residual) select_as<T, Remember::residual>(source, segments, count, selector, scratch, payload);
  else select_as<T, Remember::nothing>(source, segments, count, selector, scratch, payload);
}

void select_encode(const void* src, Dtype dtype, float* residual, float* momentum, const Segment* segments,
                          int64_t count, const Selector& selector, const Scratch& scratch, uint8_t* payload) {
  switch (dtype) {
    case Dtype::float32: return select_dtype<float>(src, residual, momentum, segments, count, selector, scratch, payload);
    case Dtype::bfloat16: return select_dtype<bf16>(src, residual, momentum, segments, count, selector, scratch, payload);
    case Dtype::float16: return select_dtype<f16>(src, residual, momentum, segments, count, selector, scratch, payload);
  }
}

template <class V>
GW_INLINE float read_value(const u8* values, i64 i) {
  V value;
  __builtin_memcpy(&value, values + i * i64(sizeof(V)), sizeof(V));
  return to_float(value);
}

// Writes or adds the value of each index, counted from the start of a group's segments, which were cleared if not added to.
template <class V, class D, bool Add>
static void scatter(const u8* values, const u32* index, i64 kept, const Segment* segments, i64 count, D* dst) {
  u32 base = 0;
  for (i64 s = 0, i = 0; s < count; base += u32(segments[s++].numel)) {
    D* to = dst + segments[s].offset;
    for (; i < kept && index[i] - base < u32(segments[s].numel); ++i) {
      const float value = read_value<V>(values, i);
      from_float(Add ? to_float(to[index[i] - base]) + value : value, to[index[i] - base]);
    }
  }
}

template <class V, class D, bool Add>
static void restore_as(const u8* payload, const u32* index, void* dst, const Segment* segments, i64 count,
                       const Selector& selector) {
  D* to = static_cast<D*>(dst);
  if (!Add)
    for (i64 s = 0; s < count; ++s) clear(to + segments[s].offset, segments[s].numel * i64(sizeof(D)));
  for_groups(segments, count, selector.together, [&](const Segment* rows, i64 rows_count, i64 numel) {
    const i64 kept = kept_of(numel, selector.ratio);
    scatter<V, D, Add>(payload, index, kept, rows, rows_count, to);
    payload += kept * i64(sizeof(V));
    index += kept;
  });
}

template <class V>
static void restore(const u8* payload, const u32* index, void* dst, Dtype dtype, bool add, const Segment* segments,
                    i64 count, const Selector& selector) {
  if (add) return restore_as<V, float, true>(payload, index, dst, segments, count, selector);
  switch (dtype) {
    case Dtype::float32: return restore_as<V, float, false>(payload, index, dst, segments, count, selector);
    case Dtype::bfloat16: return restore_as<V, bf16, false>(payload, index, dst, segments, count, selector);
    case Dtype::float16: return restore_as<V, f16, false>(payload, index, dst, segments, count, selector);
  }
}

// All indices are read and checked before the first element is written.
bool select_decode(const uint8_t* payload, Dtype value, void* dst, Dtype dtype, bool add, const Segment* segments,
                          int64_t count, const Selector& selector, uint32_t* index) {
  const u8* in = payload;
  for_groups(segments, count, selector.together, [&](const Segment*, i64, i64 numel) {
    in += kept_of(numel, selector.ratio) * (value == Dtype::float32 ? 4 : 2);
  });
  bool right = true;
  u32* next = index;
  for_groups(segments, count, selector.together, [&](const Segment*, i64, i64 numel) {
    const i64 kept = kept_of(numel, selector.ratio);
    right = right && read_indices(in, kept, numel, next);
    in += index_bytes(kept, numel);
    next += kept;
  });
  if (!right) return false;
  switch (value) {
    case Dtype::float32: restore<float>(payload, index, dst, dtype, add, segments, count, selector); break;
    case Dtype::bfloat16: restore<bf16>(payload, index, dst, dtype, add, segments, count, selector); break;
    case Dtype::float16: restore<f16>(payload, index, dst, dtype, add, segments, count, selector); break;
  }
  return true;
}
