// Casts to half the bytes, and copies times a factor. Included inside a level's namespace.

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

template <class T, class To, bool Add>
static void scale_into_as(const T* __restrict from, float factor, To* __restrict to, i64 numel) {
  for (i64 i = 0; i < numel; ++i) {
    T scaled;
    from_float(to_float(from[i]) * factor, scaled);
    from_float(Add ? to_float(to[i]) + to_float(scaled) : to_float(scaled), to[i]);
  }
}

template <class T>
static void scale_into_dtype(const void* from, float factor, void* to, bool wide, bool add, i64 numel) {
  const T* const source = static_cast<const T*>(from);
  if (add) scale_into_as<T, float, true>(source, factor, static_cast<float*>(to), numel);
  else if (wide) scale_into_as<T, float, false>(source, factor, static_cast<float*>(to), numel);
  else scale_into_as<T, T, false>(source, factor, static_cast<T*>(to), numel);
}
