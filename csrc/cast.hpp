// Casts to half the bytes. Included inside a level's namespace.

template <class T, class Wire>
static void cast_encode_as(const T* __restrict src, float* __restrict residual, i64 numel, Wire* __restrict out) {
  if (!residual) {
    for (i64 i = 0; i < numel; ++i) from_float(to_float(src[i]), out[i]);
    return;
  }
  for (i64 i = 0; i < numel; ++i) {
    const float value = to_float(src[i]) + residual[i];
    Wire sent;
    from_float(value, sent);
    out[i] = sent;
    const float lost = value - to_float(sent);
    // what overflowed or was not a number cannot be carried: the residual stays what it was
    residual[i] = (bits_of(lost) & 0x7fffffffu) < kInfBits ? lost : residual[i];
  }
}

template <class T, class Wire>
static void cast_decode_as(const Wire* __restrict in, T* __restrict dst, bool add, i64 numel) {
  if (add) {
    for (i64 i = 0; i < numel; ++i) from_float(to_float(dst[i]) + to_float(in[i]), dst[i]);
  } else {
    for (i64 i = 0; i < numel; ++i) from_float(to_float(in[i]), dst[i]);
  }
}
