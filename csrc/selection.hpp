// The k elements of largest magnitude, of equal ones the first, without sorting. Included inside a level's namespace.
//
// A magnitude is compared by its bits, which have the same order; all NaN count as one number above Inf. The search goes
// through the elements once with a lower bound on what is among the largest, and keeps what passes as candidates. When
// their room is full it keeps the k largest of them, and the bound rises. A good first bound comes from a sample.

constexpr u32 kNanKey = kInfBits + 1;

GW_INLINE i32 key_of(u32 bits) {
  const i32 magnitude = i32(bits & 0x7fffffffu);
  return magnitude < i32(kNanKey) ? magnitude : i32(kNanKey);
}

struct Candidates {
  u32* index;
  u32* bits;  // of the value, a float
  i64 count;
};

GW_INLINE i32 key_of(float value) { return key_of(bits_of(value)); }

template <class V>
static i64 count_from(const V* __restrict value, i64 count, i32 low) {
  i32 found = 0;
  for (i64 i = 0; i < count; ++i) found += key_of(value[i]) >= low;
  return found;
}

struct Bound {
  i32 key;       // the largest for which at least k keys are as large
  i64 at_least;  // how many are; more than k: some of exactly this key are too many
};

// Of count >= k >= 1 values, or their bits. Halves the range of keys until k are found, or one key is left.
template <class V>
static Bound find_bound(const V* value, i64 count, i64 k) {
  i32 low = 0, most = 0;
  for (i64 i = 0; i < count; ++i) most = key_of(value[i]) > most ? key_of(value[i]) : most;
  i32 high = most + 1;  // at least k keys are >= low, fewer than k are >= high
  i64 found = count;
  while (found != k && high - low > 1) {
    const i32 middle = low + (high - low) / 2;
    const i64 above = count_from(value, count, middle);
    if (above >= k) {
      low = middle;
      found = above;
    } else {
      high = middle;
    }
  }
  return {low, found};
}

// Drops all but the k largest. Returns the key from which on later elements are still among the largest.
static u32 keep_largest(Candidates& c, i64 k) {
  const Bound bound = find_bound(c.bits, c.count, k);
  i64 ties = bound.at_least == k ? c.count : k - count_from(c.bits, c.count, bound.key + 1), kept = 0;
  for (i64 i = 0; i < c.count; ++i) {
    const u32 bits = c.bits[i], index = c.index[i];
    const i32 key = key_of(bits);
    const bool tie = key == bound.key;
    c.bits[kept] = bits;
    c.index[kept] = index;
    kept += (key > bound.key) | (tie & (ties > 0));
    ties -= tie;
  }
  c.count = kept;
  return u32(bound.key) + 1;
}

// Appends the elements that passed, n <= kChunk of them: passed[i] is 1 or 0, and 0 up to the next multiple of 8.
GW_INLINE void append(const u8* passed, const float* value, i64 n, u32 base, Candidates& c) {
  u8 hits[kChunk / 8];
  i64 found = 0;
  for (i64 w = 0; w < (n + 7) / 8; ++w) {
    u64 word;
    __builtin_memcpy(&word, passed + 8 * w, 8);
    hits[found] = u8(w);
    found += word != 0;
  }
  i64 count = c.count;
  for (i64 h = 0; h < found; ++h) {
    u64 word;
    __builtin_memcpy(&word, passed + 8 * hits[h], 8);
    do {
      const i64 at = 8 * hits[h] + __builtin_ctzll(word) / 8;
      c.index[count] = base + u32(at);
      c.bits[count++] = bits_of(value[at]);
      word &= word - 1;
    } while (word);
  }
  c.count = count;
}

// Moves all of `from` into `to`, which has the room; both ascend and share no index.
static void merge(Candidates& to, const Candidates& from) {
  i64 a = to.count - 1, b = from.count - 1;
  to.count += from.count;
  for (i64 out = to.count - 1; b >= 0; --out) {
    const bool first = a >= 0 && to.index[a] > from.index[b];
    to.index[out] = first ? to.index[a] : from.index[b];
    to.bits[out] = first ? to.bits[a] : from.bits[b];
    (first ? a : b) -= 1;
  }
}
