// Encodes the segments of a flat buffer in blocks with scales of their own: whole blocks by the batch, the rest one by one.
// Included inside a level's namespace. A codec says how:
//   words     bfloat16 numbers that a block has before its codes
//   bits      of a code; 0: the segment's
//   ternary   whether codes of 2 bits stand for three values
//   fast      whether there are batches for these blocks
//   several   encodes whole blocks, and returns how many: all, or those before a batch that holds something not finite
//   one       encodes one block, of which v has room for a multiple of 8 elements, and returns its bytes of codes

// numel elements of one tensor, the first of which is its element `first`. Moves `scales` and `out` on.
template <class Codec, bool Residual>
static void encode_run(const float* from, float* left, i64 numel, i64 first, const Quantiser& q, int bits, u64 key, u8*& scales,
                       u8*& out) {
  alignas(64) float v[kMaxBlock];
  const i64 unit_blocks = q.block < kUnit ? kUnit / q.block : 1;
  const bool fast = Codec::fast(q);
  i64 at = 0, fast_until = 0;
  while (at < numel) {
    float* const here_left = left + (Residual ? at : 0);
    const u32 counter = u32((first + at) / 2);
    const i64 blocks = (numel - at) / q.block / unit_blocks * unit_blocks;
    const Task task{blocks, q, bits, key, counter, scales, out};
    if (blocks && fast && at >= fast_until && counter % (kUnit / 2) == 0) {
      const i64 done = Codec::template several<Residual>(from + at, here_left, task);
      at += done * q.block;
      scales += 2 * Codec::words * done;
      out += done * code_bytes(q.block, q.block, bits, Codec::ternary);
      fast_until = at + (q.block < kBatch ? kBatch : q.block);  // what is not finite is encoded block by block
      if (done) continue;
    }
    const i64 n = numel - at < q.block ? numel - at : q.block;
    for (i64 i = 0; i < n; ++i) v[i] = Residual ? from[at + i] + here_left[i] : from[at + i];
    for (i64 i = n; i < (n + 7) / 8 * 8; ++i) v[i] = 0.0f;
    out += Codec::template one<Residual>(v, n, task, here_left);
    scales += 2 * Codec::words;
    at += n;
  }
}

template <class Codec, bool Residual>
static void encode_segments(const Gradient& src, float* residual, const Segment* segments, i64 count, const Stream& stream,
                            const Quantiser& q, u8* payload) {
  alignas(64) float tile[kMaxBlock];
  constexpr i64 most = 4096;  // elements of a tile, or one block: it stays in a core's nearest cache together with the residual
  const i64 whole = q.block < most ? most / q.block * q.block : q.block;
  u8* scales = payload;
  u8* const first_code = payload + coded_size(segments, count, q.block, Codec::words, Codec::bits, Codec::ternary).scales;
  u8* out = first_code;
  if (q.summing) q.summing->first = q.summing->next = first_code;
  for (i64 s = 0; s < count; ++s) {
    const Segment& seg = segments[s];
    const u64 key = stream_key(stream, seg.key);
    const int bits = Codec::bits ? Codec::bits : int(seg.bits);
    const i64 each = read_in_place(src) ? seg.numel : whole;
    for (i64 at = 0; at < seg.numel; at += each) {
      const i64 n = seg.numel - at < each ? seg.numel - at : each;
      float* const left = Residual ? residual + seg.offset + at : nullptr;
      encode_run<Codec, Residual>(read_row(src, s, at, n, tile), left, n, seg.first + at, q, bits, key, scales, out);
    }
  }
  while (scales < first_code) *scales++ = 0;
}

template <class Codec>
static void encode_with(const Gradient& src, float* residual, const Segment* segments, i64 count, const Stream& stream,
                        const Quantiser& q, u8* payload) {
  if (residual) encode_segments<Codec, true>(src, residual, segments, count, stream, q, payload);
  else encode_segments<Codec, false>(src, nullptr, segments, count, stream, q, payload);
}
