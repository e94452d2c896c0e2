// The counter-based random stream: a 32-bit word is a pure function of (key, counter). Included inside a level's namespace.
// An element takes 16 bits. In a block of m elements (m rounded up to a multiple of 8) that begins at element `first` of
// its tensor, elements j and j + m/2 share the word whose counter is first/2 + j; the first of them takes the low half.

GW_INLINE u64 mix64(u64 x) {  // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

GW_INLINE u64 stream_key(const Stream& s, i64 tensor) {
  u64 key = mix64(u64(s.seed));
  key = mix64(key ^ u64(s.step));
  key = mix64(key ^ u64(s.encode));
  key = mix64(key ^ u64(s.rank));
  return mix64(key ^ u64(tensor));
}

// Counters 64k + l, + 16, + 32 and + 48 (l < 16) share one hash: the first word is the hash itself, the others a step of
// a linear congruence from it, folded. Better than hashing each in every test tried, and 2.5 times cheaper.
GW_INLINE u32 random_hash(u32 counter, u32 key_low, u32 key_high) {
  u32 x = counter ^ key_low;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x += key_high;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

constexpr u32 kMultiply[4] = {1u, 0x915f77f5u, 0x93d765ddu, 0xadb4a92du};
constexpr u32 kAdd[4] = {0u, 0x9e3779b9u, 0x3c6ef372u, 0xdaa66d2bu};

GW_INLINE u32 random_fold(u32 hash, int group) {  // group: counter / 16 % 4
  const u32 x = hash * kMultiply[group] + kAdd[group];
  return group ? x ^ (x >> 16) : x;
}
