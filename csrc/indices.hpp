// Ascending indices below n in few bytes: a bitmap, or Elias and Fano's form. Included inside a level's namespace.
// Elias-Fano: the `low` lowest bits of each index, packed, up to a whole byte; then a row of bits in which the i-th index
// sets bit (index >> low) + i, up to a whole byte. Bits count from the lowest of the first byte.

GW_INLINE void clear(void* from, i64 bytes) {
  if (bytes > 0) __builtin_memset(from, 0, size_t(bytes));  // of nothing there may be no pointer
}

static void write_indices(const u32* index, i64 k, i64 n, u8* out) {
  const int low = index_low_bits(k, n);
  if (low < 0) {
    clear(out, (n + 7) / 8);
    for (i64 i = 0; i < k; ++i) out[index[i] >> 3] = u8(out[index[i] >> 3] | (1u << (index[i] & 7)));
    return;
  }
  u8* const unary = out + (k * low + 7) / 8;
  u64 pending = 0;
  int held = 0;
  for (i64 i = 0; i < k; ++i) {
    pending |= u64(index[i] & ((1u << low) - 1)) << held;
    for (held += low; held >= 8; held -= 8, pending >>= 8) *out++ = u8(pending);
  }
  if (held) *out = u8(pending);
  clear(unary, (k + (n >> low) + 7) / 8);
  for (i64 i = 0; i < k; ++i) {
    const i64 bit = i64(index[i] >> low) + i;
    unary[bit >> 3] = u8(unary[bit >> 3] | (1u << (bit & 7)));
  }
}

GW_INLINE u64 bits_at(const u8* in, i64 at, i64 bytes) {  // 8 bytes from in + at, zeros where there are none
  u64 word = 0;
  if (at + 8 <= bytes) __builtin_memcpy(&word, in + at, 8);
  else if (at < bytes) __builtin_memcpy(&word, in + at, size_t(bytes - at));
  return word;
}

// Reads k indices. False: there are not exactly k, they do not ascend, or one is not below n.
static bool read_indices(const u8* in, i64 k, i64 n, u32* index) {
  const int low = index_low_bits(k, n);
  const i64 unary = low < 0 ? 0 : (k * low + 7) / 8, bytes = index_bytes(k, n);
  const u64 mask = low < 0 ? 0 : (u64(1) << low) - 1;
  i64 found = 0, last = -1;
  for (i64 at = unary; at < bytes; at += 8) {
    for (u64 word = bits_at(in, at, bytes); word; word &= word - 1) {
      if (found == k) return false;
      const i64 bit = 8 * (at - unary) + __builtin_ctzll(word);
      i64 next = bit;
      if (low >= 0) {
        const i64 place = found * low;
        next = ((bit - found) << low) | i64((bits_at(in, place >> 3, bytes) >> (place & 7)) & mask);
      }
      if (next <= last || next >= n) return false;
      last = next;
      index[found++] = u32(next);
    }
  }
  return found == k;
}
