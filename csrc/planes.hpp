// Packing b-bit codes. A code is cut into planes of 4, 2 and 1 bits (7 = 4 + 2 + 1), so every width packs truly and by
// whole vectors: the plane of width w of m codes takes m*w/8 bytes, and byte j holds codes j, j+S, j+2S.. with S = m*w/8.
// m is a multiple of 8. Included inside a level's namespace.

template <int W>
GW_INLINE void pack_plane(const u8* __restrict codes, i64 m, int shift, u8* __restrict out) {
  const i64 stride = m * W / 8;
  constexpr u8 mask = u8((1 << W) - 1);
  for (i64 j = 0; j < stride; ++j) {
    u8 byte = 0;
    for (int k = 0; k < 8 / W; ++k) byte = u8(byte | (((codes[j + k * stride] >> shift) & mask) << (k * W)));
    out[j] = byte;
  }
}

template <int W>
GW_INLINE void unpack_plane(const u8* __restrict in, i64 m, int shift, bool first, u8* __restrict codes) {
  const i64 stride = m * W / 8;
  constexpr u8 mask = u8((1 << W) - 1);
  for (int k = 0; k < 8 / W; ++k) {
    u8* __restrict to = codes + k * stride;
    if (first) {
      for (i64 j = 0; j < stride; ++j) to[j] = u8(((in[j] >> (k * W)) & mask) << shift);
    } else {
      for (i64 j = 0; j < stride; ++j) to[j] = u8(to[j] | (((in[j] >> (k * W)) & mask) << shift));
    }
  }
}

GW_INLINE void pack(const u8* codes, i64 m, int bits, u8* out) {
  if (bits == 8) {
    __builtin_memcpy(out, codes, size_t(m));
    return;
  }
  int shift = 0;
  if (bits & 4) { pack_plane<4>(codes, m, shift, out); out += m / 2; shift += 4; }
  if (bits & 2) { pack_plane<2>(codes, m, shift, out); out += m / 4; shift += 2; }
  if (bits & 1) { pack_plane<1>(codes, m, shift, out); }
}

GW_INLINE void unpack(const u8* in, i64 m, int bits, u8* codes) {
  if (bits == 8) {
    __builtin_memcpy(codes, in, size_t(m));
    return;
  }
  int shift = 0;
  if (bits & 4) { unpack_plane<4>(in, m, shift, shift == 0, codes); in += m / 2; shift += 4; }
  if (bits & 2) { unpack_plane<2>(in, m, shift, shift == 0, codes); in += m / 4; shift += 2; }
  if (bits & 1) { unpack_plane<1>(in, m, shift, shift == 0, codes); }
}
