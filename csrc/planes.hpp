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

// Whole blocks of 32, 64, 128.. elements, 4 bytes at a time. Half a block's codes are two nibbles of one byte: byte j of
// `pairs` holds the low or the high bits of code j and, above them, of code j + m/2; the planes fold out of it.
using Word = u32 __attribute__((aligned(1), may_alias));

// The plane of 2 bits that begins at bit `shift` of the nibbles; m/2 bytes to m/4.
template <int Shift>
GW_INLINE void fold_two(const u8* pairs, i64 m, u8* out) {
  const Word* from = reinterpret_cast<const Word*>(pairs);
  Word* to = reinterpret_cast<Word*>(out);
  const i64 stride = m / 16;
#pragma GCC ivdep
  for (i64 j = 0; j < stride; ++j)
    to[j] = ((from[j] >> Shift) & 0x33333333u) | (((from[j + stride] >> Shift) & 0x33333333u) << 2);
}

template <int Shift>
GW_INLINE void fold_one(const u8* pairs, i64 m, u8* out) {
  const Word* from = reinterpret_cast<const Word*>(pairs);
  Word* to = reinterpret_cast<Word*>(out);
  const i64 stride = m / 32;
#pragma GCC ivdep
  for (i64 j = 0; j < stride; ++j) {
    u32 word = 0;
    for (int k = 0; k < 4; ++k) word |= ((from[j + k * stride] >> Shift) & 0x11111111u) << k;
    to[j] = word;
  }
}

// Pairs of codes of Bits <= 4 bits to their planes.
template <int Bits>
GW_INLINE void fold_pairs(const u8* pairs, i64 m, u8* out) {
  if (Bits & 2) { fold_two<0>(pairs, m, out); out += m / 4; }
  if (Bits & 1) fold_one<Bits & 2>(pairs, m, out);
}

// Codes of blocks of m elements (N of them when N is known to the compiler): pairs in `first` for Bits < 4, else one byte
// each, the first half of each block in `first` and the other in `second`.
template <int Bits, int N>
static void pack_blocks(const u8* __restrict first, const u8* __restrict second, i64 count, i64 blocks, u8* __restrict out) {
  alignas(64) u8 high[N ? N / 2 : kMaxBlock / 2];
  const i64 m = N ? N : count;
  for (i64 b = 0; b < blocks; ++b, out += m / 8 * Bits, first += m / 2, second += m / 2) {
    if (Bits < 4) {
      fold_pairs<Bits>(first, m, out);
    } else if (Bits == 8) {
      __builtin_memcpy(out, first, size_t(m / 2));
      __builtin_memcpy(out + m / 2, second, size_t(m / 2));
    } else {
      const Word *x = reinterpret_cast<const Word*>(first), *y = reinterpret_cast<const Word*>(second);
      Word *low = reinterpret_cast<Word*>(out), *above = reinterpret_cast<Word*>(high);
#pragma GCC ivdep
      for (i64 j = 0; j < m / 8; ++j) {
        low[j] = (x[j] & 0x0f0f0f0fu) | ((y[j] & 0x0f0f0f0fu) << 4);
        above[j] = ((x[j] >> 4) & 0x0f0f0f0fu) | (y[j] & 0xf0f0f0f0u);
      }
      GW_SETTLE(high);
      fold_pairs<Bits & 3>(high, m, out + m / 2);
    }
  }
}

// The other way: pairs out of the planes below the one of 4 bits.
template <int Bits>
GW_INLINE void unfold_pairs(const u8* __restrict in, i64 m, u8* __restrict pairs) {
  const Word *two = reinterpret_cast<const Word*>(in), *one = two + (Bits & 2 ? m / 16 : 0);
  Word* to = reinterpret_cast<Word*>(pairs);
  const i64 stride = m / 32;
  for (int k = 0; k < 4; ++k)
#pragma GCC ivdep
    for (i64 j = 0; j < stride; ++j) {
      const u32 lower = Bits & 2 ? (two[j + k % 2 * stride] >> (k / 2 * 2)) & 0x33333333u : 0u;
      const u32 upper = Bits & 1 ? ((one[j] >> k) & 0x11111111u) << (Bits & 2) : 0u;
      to[j + k * stride] = lower | upper;
    }
}

// All pairs of a batch come first: what is stored in halves cannot be read back whole at once.
template <int Bits, int N>
static void unpack_blocks(const u8* __restrict in, i64 count, i64 blocks, u8* __restrict codes) {
  alignas(64) u8 pairs[kMaxBlock / 2];
  const i64 m = N ? N : count;
  if (Bits & 3) {
    const u8* const planes = in + (Bits > 4 ? m / 2 : 0);
    for (i64 b = 0; b < blocks; ++b) unfold_pairs<Bits & 3>(planes + b * (m / 8 * Bits), m, pairs + b * m / 2);
    GW_SETTLE(pairs);
  }
  for (i64 b = 0; b < blocks; ++b, in += m / 8 * Bits, codes += m) {
    Word *first = reinterpret_cast<Word*>(codes), *second = reinterpret_cast<Word*>(codes + m / 2);
    const Word *low = reinterpret_cast<const Word*>(in), *folded = reinterpret_cast<const Word*>(pairs + b * m / 2);
    const Word* const both = Bits == 4 ? low : folded;
#pragma GCC ivdep
    for (i64 j = 0; j < m / 8; ++j) {
      const u32 below = Bits > 4 ? low[j] : both[j], above = Bits > 4 ? folded[j] : 0u;
      first[j] = (below & 0x0f0f0f0fu) | ((above & 0x0f0f0f0fu) << 4);
      second[j] = ((below >> 4) & 0x0f0f0f0fu) | (above & 0xf0f0f0f0u);
    }
  }
}

// ---- codes of three values, in base 3: 8 of them in 13 bits. A block's m codes, a multiple of 64, are cut into eight pieces of
// S = m/8. Byte j has the codes j of the first five pieces as digits, the first piece's lowest. The digits of the other three are
// a code of 5 bits, and these S codes follow in planes.

template <int N>
GW_INLINE void pack_rest(const u8* rest, i64 pieces, u8* out) {
  if (N != 128) {
    pack(rest, pieces, 5, out);
    return;
  }
  const Word* from = reinterpret_cast<const Word*>(rest);
  Word* to = reinterpret_cast<Word*>(out);
  u32 top = 0;
  for (int j = 0; j < 4; ++j) top |= ((from[j] >> 4) & 0x01010101u) << (2 * j);
  for (int j = 0; j < 2; ++j) to[j] = (from[j] & 0x0f0f0f0fu) | ((from[j + 2] & 0x0f0f0f0fu) << 4);
  const u16 plane = u16(top | (top >> 16 << 1));
  __builtin_memcpy(out + 8, &plane, 2);
}

template <int N>
GW_INLINE void unpack_rest(const u8* in, i64 pieces, u8* rest) {
  if (N != 128) {
    unpack(in, pieces, 5, rest);
    return;
  }
  u64 low;
  u16 plane;
  __builtin_memcpy(&low, in, 8);
  __builtin_memcpy(&plane, in + 8, 2);
  u64 top = (plane & 0xffu) * 0x0001000100010001ull | (plane >> 8) * 0x0100010001000100ull;
  for (int half = 0; half < 2; ++half, low >>= 4, top >>= 4) {
    const u64 bits = ((top & 0x0808040402020101ull) + 0x0f0f0f0f0f0f0f0full) & 0x1010101010101010ull;
    const u64 codes = (low & 0x0f0f0f0f0f0f0f0full) | bits;
    __builtin_memcpy(rest + 8 * half, &codes, 8);
  }
}

// One block of codes, one to a byte.
GW_INLINE void pack_base_3(const u8* codes, i64 m, u8* out) {
  alignas(64) u8 rest[kMaxBlock / 8];
  const i64 s = m / 8;
  for (i64 j = 0; j < s; ++j) {
    const u8* const c = codes + j;
    out[j] = u8(c[0] + 3 * (c[s] + 3 * (c[2 * s] + 3 * (c[3 * s] + 3 * c[4 * s]))));
    rest[j] = u8(c[5 * s] + 3 * (c[6 * s] + 3 * c[7 * s]));
  }
  GW_SETTLE(rest);
  pack(rest, s, 5, out + s);
}

// Whole blocks, of pairs of codes as in pack_blocks.
template <int N>
static void pack_blocks_base_3(const u8* __restrict pairs, i64 count, i64 blocks, u8* __restrict out) {
  constexpr u32 low = 0x0f0f0f0fu;
  alignas(64) u8 rest[N ? N / 8 : kMaxBlock / 8];
  const i64 m = N ? N : count, words = m / 32;
  for (i64 b = 0; b < blocks; ++b, out += m / 64 * 13, pairs += m / 2) {
    const Word* from = reinterpret_cast<const Word*>(pairs);
    Word *to = reinterpret_cast<Word*>(out), *others = reinterpret_cast<Word*>(rest);
#pragma GCC ivdep
    for (i64 j = 0; j < words; ++j) {
      const u32 p = from[j], q = from[j + words], r = from[j + 2 * words], t = from[j + 3 * words];
      to[j] = (p & low) + 3 * ((q & low) + 3 * ((r & low) + 3 * ((t & low) + 3 * ((p >> 4) & low))));
      others[j] = ((q >> 4) & low) + 3 * (((r >> 4) & low) + 3 * ((t >> 4) & low));
    }
    GW_SETTLE(rest);
    pack_rest<N>(rest, m / 8, out + m / 8);
  }
}

// The digit of this worth, from 0 to 3, which is taken off x.
GW_INLINE u8 take_digit(u8& x, u8 worth) {
  const u8 digit = u8(u8(x >= worth) + u8(x >= u8(2 * worth)) + u8(x >= u8(3 * worth)));
  x = u8(x - digit * worth);
  return digit;
}

// Several blocks at once: there are too few bytes in one for a whole vector.
template <int N>
static void unpack_blocks_base_3(const u8* __restrict in, i64 count, i64 blocks, u8* __restrict codes) {
  constexpr i64 most = N ? 1024 : kMaxBlock;  // elements
  alignas(64) u8 first[most / 8], rest[most / 8], digits[8][most / 8];
  const i64 m = N ? N : count, s = m / 8, several = N ? most / N : 1;
  while (blocks) {
    const i64 now = blocks < several ? blocks : several;
    for (i64 b = 0; b < now; ++b, in += m / 64 * 13) {
      __builtin_memcpy(first + b * s, in, size_t(s));
      unpack_rest<N>(in + s, s, rest + b * s);
    }
    GW_SETTLE(first);
    GW_SETTLE(rest);
    for (i64 j = 0; j < now * s; ++j) {
      u8 x = first[j], y = rest[j];
      digits[4][j] = take_digit(x, 81);
      digits[3][j] = take_digit(x, 27);
      digits[2][j] = take_digit(x, 9);
      digits[1][j] = take_digit(x, 3);
      digits[0][j] = x;
      digits[7][j] = take_digit(y, 9);
      digits[6][j] = take_digit(y, 3);
      digits[5][j] = y;
    }
    GW_SETTLE(digits);
    for (i64 b = 0; b < now; ++b)
      for (int k = 0; k < 8; ++k, codes += s) __builtin_memcpy(codes, digits[k] + b * s, size_t(s));
    blocks -= now;
  }
}

template <int N>
static void pack_width(const u8* first, const u8* second, i64 m, i64 blocks, int bits, u8* out) {
  switch (bits) {
    case 2: return pack_blocks<2, N>(first, second, m, blocks, out);
    case 3: return pack_blocks<3, N>(first, second, m, blocks, out);
    case 5: return pack_blocks<5, N>(first, second, m, blocks, out);
    case 6: return pack_blocks<6, N>(first, second, m, blocks, out);
    case 8: return pack_blocks<8, N>(first, second, m, blocks, out);
    case 7: return pack_blocks<7, N>(first, second, m, blocks, out);
  }
}

template <int N>
static void unpack_width(const u8* in, i64 m, i64 blocks, int bits, u8* codes) {
  switch (bits) {
    case 2: return unpack_blocks<2, N>(in, m, blocks, codes);
    case 3: return unpack_blocks<3, N>(in, m, blocks, codes);
    case 4: return unpack_blocks<4, N>(in, m, blocks, codes);
    case 5: return unpack_blocks<5, N>(in, m, blocks, codes);
    case 6: return unpack_blocks<6, N>(in, m, blocks, codes);
    case 7: return unpack_blocks<7, N>(in, m, blocks, codes);
  }
}
