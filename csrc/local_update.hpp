// A rank's own step of weights, by its own gradient. Included inside a level's namespace.

template <class T, bool Squares, bool Mean>
static void local_update_from(const T* __restrict weight, const T* __restrict gradient, const T* __restrict squares,
                              const T* __restrict mean, const LocalUpdate& how, i64 numel, T* __restrict out) {
  const float rate = how.rate, own = how.own, momentum = how.momentum, kept = how.kept, taken = how.taken, eps = how.eps;
  for (i64 i = 0; i < numel; ++i) {
    const float g = to_float(gradient[i]);
    float along = g * own;
    if (Mean) along += to_float(mean[i]) * momentum;
    along *= rate;
    if (Squares) along /= __builtin_sqrtf(to_float(squares[i]) * kept + g * g * taken) + eps;
    from_float(to_float(weight[i]) - along, out[i]);
  }
}

template <class T>
static void local_update_dtype(const void* weight, const void* gradient, const void* squares, const void* mean,
                               const LocalUpdate& how, i64 from, i64 to, void* out) {
  const T* w = static_cast<const T*>(weight) + from;
  const T* g = static_cast<const T*>(gradient) + from;
  const T* s = squares ? static_cast<const T*>(squares) + from : nullptr;
  const T* m = mean ? static_cast<const T*>(mean) + from : nullptr;
  T* o = static_cast<T*>(out) + from;
  const i64 numel = to - from;
  if (s && m) local_update_from<T, true, true>(w, g, s, m, how, numel, o);
  else if (s) local_update_from<T, true, false>(w, g, s, nullptr, how, numel, o);
  else if (m) local_update_from<T, false, true>(w, g, nullptr, m, how, numel, o);
  else local_update_from<T, false, false>(w, g, nullptr, nullptr, how, numel, o);
}

void local_update(const void* weight, const void* gradient, const void* squares, const void* mean, Dtype dtype,
                         const LocalUpdate& how, i64 from, i64 to, void* out) {
  switch (dtype) {
    case Dtype::float32: return local_update_dtype<float>(weight, gradient, squares, mean, how, from, to, out);
    case Dtype::bfloat16: return local_update_dtype<bf16>(weight, gradient, squares, mean, how, from, to, out);
    case Dtype::float16: return local_update_dtype<f16>(weight, gradient, squares, mean, how, from, to, out);
  }
}
