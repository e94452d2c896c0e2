// Random-k: element i of a run is drawn from its i-th stretch, [i * n / k, (i + 1) * n / k). Included inside a level's
// namespace. The meaning is src/gradwire/kernels/reference/randomk.py.

constexpr i64 kDraws = 64;  // stretches that are drawn at once

GW_INLINE u64 run_key(u64 stream, const Segment& s) { return mix64(mix64(stream ^ u64(s.key)) ^ u64(s.first)); }

// The stretches of a run, in batches.
struct Stretches {
  i64 numel, kept;
  u64 key;
  i64 done, next, whole, part, rest;  // rest: of next = done * numel / kept, the remainder
  i64 count;
  alignas(64) u32 start[kDraws + 1], place[kDraws];

  Stretches(const Segment& s, double ratio, u64 stream)
      : numel(s.numel), kept(kept_of(s.numel, ratio)), key(run_key(stream, s)), done(0), next(0),
        whole(kept ? numel / kept : 0), part(kept ? numel % kept : 0), rest(0), count(0) {}

  // Draws the next stretches: their starts, with the end of the last, and the element drawn from each.
  bool draw() {
    count = kept - done < kDraws ? kept - done : kDraws;
    if (count == 0) return false;
    const u32 low = u32(key), high = u32(key >> 32), counter = u32(done);
    start[0] = u32(next);
    for (i64 i = 0; i < count; ++i) {
      rest += part;
      const bool carry = rest >= kept;
      rest -= carry ? kept : 0;
      next += whole + carry;
      start[i + 1] = u32(next);
    }
    alignas(64) u32 word[kDraws];
    for (u32 l = 0; l < 16; ++l) {
      const u32 hash = random_hash(counter + l, low, high);
      for (int group = 0; group < 4; ++group) word[16 * group + int(l)] = random_fold(hash, group);
    }
    for (i64 i = 0; i < count; ++i) place[i] = start[i] + u32((u64(word[i]) * (start[i + 1] - start[i])) >> 32);
    done += count;
    return true;
  }
};

template <class T, bool Residual>
GW_INLINE u32 largest_magnitude(const T* __restrict from, const float* __restrict left, i64 n) {
  i32 most = 0;
  for (i64 i = 0; i < n; ++i) {
    const float v = Residual ? to_float(from[i]) + left[i] : to_float(from[i]);
    const i32 magnitude = i32(bits_of(v) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  return u32(most);
}

// A stretch that holds something that cannot be sent, as `W`, is sent as NaN and keeps its residual.
template <class T, class W, bool Residual>
static void random_gather_as(const T* src, float* residual, const Segment* segments, i64 count, double ratio, u64 stream,
                             u8* values) {
  for (i64 s = 0; s < count; ++s) {
    const T* from = src + segments[s].offset;
    float* left = Residual ? residual + segments[s].offset : nullptr;
    const auto carried = [&](i64 begin, i64 end) {
      return largest_magnitude<T, Residual>(from + begin, Residual ? left + begin : left, end - begin) < Carried<W>::below;
    };
    for (Stretches runs(segments[s], ratio, stream); runs.draw();) {
      const i64 begin = runs.start[0], end = runs.start[runs.count];
      const bool all = carried(begin, end);
      if (Residual && all) for (i64 j = begin; j < end; ++j) left[j] += to_float(from[j]);
      for (i64 i = 0; i < runs.count; ++i, values += sizeof(W)) {
        const i64 first = runs.start[i], next = runs.start[i + 1], place = runs.place[i];
        const bool right = all || carried(first, next);
        if (Residual && right && !all) for (i64 j = first; j < next; ++j) left[j] += to_float(from[j]);
        const float value = Residual ? left[place] : to_float(from[place]) * float(next - first);
        W sent;
        from_float(right ? one_nan(value) : float_of(0x7fc00000u), sent);
        __builtin_memcpy(values, &sent, sizeof(W));
        if (Residual && right) left[place] = value - to_float(sent);
      }
    }
  }
}

template <class T, class W>
static void random_gather_to(const void* src, float* residual, const Segment* segments, i64 count, double ratio, u64 stream,
                             u8* values) {
  const T* from = static_cast<const T*>(src);
  if (residual) random_gather_as<T, W, true>(from, residual, segments, count, ratio, stream, values);
  else random_gather_as<T, W, false>(from, nullptr, segments, count, ratio, stream, values);
}

u64 stream_base(const Stream& s) {
  return mix64(mix64(mix64(mix64(u64(s.seed)) ^ u64(s.step)) ^ u64(s.encode)) ^ u64(s.rank));
}

// The values drawn, as float32 or in the gradient's own dtype.
void random_gather(const void* src, Dtype dtype, float* residual, const Segment* segments, int64_t count, double ratio,
                          uint64_t stream, bool wide, uint8_t* values) {
  switch (dtype) {
    case Dtype::float32: return random_gather_to<float, float>(src, residual, segments, count, ratio, stream, values);
    case Dtype::bfloat16:
      if (wide) return random_gather_to<bf16, float>(src, residual, segments, count, ratio, stream, values);
      return random_gather_to<bf16, bf16>(src, residual, segments, count, ratio, stream, values);
    case Dtype::float16:
      if (wide) return random_gather_to<f16, float>(src, residual, segments, count, ratio, stream, values);
      return random_gather_to<f16, f16>(src, residual, segments, count, ratio, stream, values);
  }
}

template <class V, class D, bool Add>
static void random_scatter_as(const u8* values, void* dst, const Segment* segments, i64 count, double ratio, u64 stream) {
  for (i64 s = 0; s < count; ++s) {
    D* to = static_cast<D*>(dst) + segments[s].offset;
    if (!Add) clear(to, segments[s].numel * i64(sizeof(D)));
    for (Stretches runs(segments[s], ratio, stream); runs.draw(); values += runs.count * i64(sizeof(V))) {
      for (i64 i = 0; i < runs.count; ++i) {
        const float value = read_value<V>(values, i);
        from_float(Add ? to_float(to[runs.place[i]]) + value : value, to[runs.place[i]]);
      }
    }
  }
}

template <class V>
static void random_scatter_from(const u8* values, void* dst, Dtype dtype, bool add, const Segment* segments, i64 count,
                                double ratio, u64 stream) {
  if (add) return random_scatter_as<V, float, true>(values, dst, segments, count, ratio, stream);
  switch (dtype) {
    case Dtype::float32: return random_scatter_as<V, float, false>(values, dst, segments, count, ratio, stream);
    case Dtype::bfloat16: return random_scatter_as<V, bf16, false>(values, dst, segments, count, ratio, stream);
    case Dtype::float16: return random_scatter_as<V, f16, false>(values, dst, segments, count, ratio, stream);
  }
}

void random_scatter(const uint8_t* values, Dtype value, void* dst, Dtype dtype, bool add, const Segment* segments,
                           int64_t count, double ratio, uint64_t stream) {
  switch (value) {
    case Dtype::float32: return random_scatter_from<float>(values, dst, dtype, add, segments, count, ratio, stream);
    case Dtype::bfloat16: return random_scatter_from<bf16>(values, dst, dtype, add, segments, count, ratio, stream);
    case Dtype::float16: return random_scatter_from<f16>(values, dst, dtype, add, segments, count, ratio, stream);
  }
}
