// Payloads of blocks with one bfloat16 scale each: what FP8, Natural and QSGD's exponential levels share. A coder says what
// a block's scale is and how its elements are coded. Included inside a level's namespace.

constexpr u16 kBadScale = 0x7fc0u;  // NaN: of a block that holds something not finite

// src (+ residual) of n elements into v, and the largest magnitude as an integer.
template <class T, bool Residual>
GW_INLINE i32 load_block(const T* __restrict from, const float* __restrict left, i64 n, float* __restrict v) {
  i32 most = 0;
  for (i64 i = 0; i < n; ++i) {
    const float value = Residual ? to_float(from[i]) + left[i] : to_float(from[i]);
    const i32 magnitude = i32(bits_of(value) & 0x7fffffffu);
    v[i] = value;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

template <class Coder, class T, bool Residual>
static void scaled_encode_from(const T* src, float* residual, const Segment* segments, i64 count, const Stream& stream, i64 block,
                          Coder coder, u8* payload) {
  alignas(64) float v[kMaxBlock];
  alignas(64) i32 largest[kCells];
  alignas(64) u16 raw[kCells];
  u8* scales = payload;
  u8* const first_code = payload + coded_size(segments, count, block, Coder::size_bits).scales;
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
        for (i64 line = 0; line < n; line += 16) {
          __builtin_prefetch(from + c * n + line + 2 * kBatch);
          if (Residual) __builtin_prefetch(left + c * n + line + 2 * kBatch, 1);
        }
        largest[c] = load_block<T, Residual>(from + c * n, left + (Residual ? c * n : 0), n, v + c * n);
      }
      for (i64 i = n; i < packed; ++i) v[i] = 0.0f;
      for (i64 c = 0; c < cells; ++c)
        raw[c] = u32(largest[c]) >= kHuge ? kBadScale : coder.scale_of(v + c * n, n, largest[c]);
      __builtin_memcpy(scales, raw, size_t(2 * cells));
      scales += 2 * cells;
      for (i64 c = 0; c < cells; ++c, at += n) {
        if (raw[c] == kBadScale || raw[c] == 0) {
          __builtin_memset(out, 0, size_t(packed / 8 * coder.bits));
          // nothing of a block of zeros was sent; one that could not be sent keeps the residual it had
          if (Residual && raw[c] == 0) __builtin_memcpy(left + c * n, v + c * n, size_t(n) * sizeof(float));
        } else coder.template encode<Residual>(v + c * n, n, raw[c], u32((seg.first + at) / 2), out, left + (Residual ? c * n : 0));
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
  const u8* in = payload + coded_size(segments, count, block, Coder::size_bits).scales;
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
