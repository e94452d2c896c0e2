// Payloads of blocks with one bfloat16 scale each: what FP8, Natural and QSGD's exponential levels share. A coder says what
// a block's scale is and how its elements are coded. Included inside a level's namespace.

constexpr u16 kBadScale = 0x7fc0u;  // NaN: of a block that holds something not finite

// src (+ residual) of n elements into v, if it is asked for, and the largest magnitude as an integer.
template <class T, bool Residual, bool Keep>
GW_INLINE i32 load_run(const T* __restrict from, const float* __restrict left, i64 n, float* __restrict v) {
  i32 most = 0;
  for (i64 i = 0; i < n; ++i) {
    const float value = Residual ? to_float(from[i]) + left[i] : to_float(from[i]);
    const i32 magnitude = i32(bits_of(value) & 0x7fffffffu);
    if (Keep) v[i] = value;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

template <class T, bool Residual, bool Keep>
GW_INLINE i32 load_block(const T* from, const float* left, i64 n, float* v) {
  i32 most = 0;
  i64 i = 0;
  for (; i + kUnit <= n; i += kUnit) {
    constexpr int lines = int(kUnit * sizeof(T) / 64);
    for (int line = 0; line < lines; ++line) __builtin_prefetch(from + i + 2 * kBatch + line * (kUnit / lines));
    if (Residual) for (int line = 0; line < 8; ++line) __builtin_prefetch(left + i + 2 * kBatch + line * 16, 1);
    const i32 here = load_run<T, Residual, Keep>(from + i, left + (Residual ? i : 0), kUnit, v + (Keep ? i : 0));
    most = here > most ? here : most;
  }
  const i32 rest = load_run<T, Residual, Keep>(from + i, left + (Residual ? i : 0), n - i, v + (Keep ? i : 0));
  return rest > most ? rest : most;
}

template <class Coder, class T, bool Residual>
static void scaled_encode_from(const T* src, float* residual, const Segment* segments, i64 count, const Stream& stream, i64 block,
                          Coder coder, u8* payload) {
  constexpr bool reads_src = sizeof(T) == sizeof(float) && !Residual;  // whole blocks need no copy
  alignas(64) float v[kMaxBlock];
  alignas(64) i32 largest[kCells];
  alignas(64) u16 raw[kCells];
  u8* scales = payload;
  u8* const first_code = payload + coded_size(segments, count, block, 1, Coder::size_bits).scales;
  u8* out = first_code;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    coder.begin(seg, stream);
    const i64 most = block < kBatch ? kBatch / block : 1;
    for (i64 at = 0; at < seg.numel;) {
      const T* from = src + seg.offset + at;
      float* left = Residual ? residual + seg.offset + at : nullptr;
      const i64 full = (seg.numel - at) / block, cells = full ? (full < most ? full : most) : 1;
      const i64 n = full ? block : seg.numel - at, packed = (n + 7) / 8 * 8;
      for (i64 c = 0; c < cells; ++c) {
        const T* const block_from = from + c * n;
        const float* const block_left = left + (Residual ? c * n : 0);
        largest[c] = reads_src && full ? load_block<T, Residual, false>(block_from, block_left, n, v)
                                       : load_block<T, Residual, true>(block_from, block_left, n, v + c * n);
      }
      const float* const values = reads_src && full ? reinterpret_cast<const float*>(from) : v;
      for (i64 i = n; i < packed; ++i) v[i] = 0.0f;
      for (i64 c = 0; c < cells; ++c)
        raw[c] = u32(largest[c]) >= kHuge ? kBadScale : coder.scale_of(values + c * n, n, largest[c]);
      __builtin_memcpy(scales, raw, size_t(2 * cells));
      scales += 2 * cells;
      for (i64 c = 0; c < cells; ++c, at += n) {
        float* const block_left = left + (Residual ? c * n : 0);
        if (raw[c] == kBadScale || raw[c] == 0) {
          __builtin_memset(out, 0, size_t(packed / 8 * coder.bits));
          // nothing of a block of zeros was sent; one that could not be sent keeps the residual it had
          if (Residual && raw[c] == 0) __builtin_memcpy(block_left, v + c * n, size_t(n) * sizeof(float));
        } else {
          coder.template encode<Residual>(values + c * n, n, raw[c], u32((seg.first + at) / 2), out, block_left);
        }
        out += packed / 8 * coder.bits;
      }
    }
  }
  while (scales < first_code) *scales++ = 0;
}

template <class Coder, class T, bool Add>
static void scaled_decode_to(const u8* payload, T* dst, const Segment* segments, i64 count, i64 block) {
  Coder coder{};
  const u8* scales = payload;
  const u8* in = payload + coded_size(segments, count, block, 1, Coder::size_bits).scales;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    coder.begin(seg, {});
    for (i64 at = 0; at < seg.numel; at += block, scales += 2) {
      const i64 n = seg.numel - at < block ? seg.numel - at : block;
      u16 raw;
      __builtin_memcpy(&raw, scales, 2);
      coder.template decode<T, Add>(in, n, raw, dst + seg.offset + at);
      in += (n + 7) / 8 * coder.bits;
    }
  }
}
