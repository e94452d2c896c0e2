// A rank's own step of weights, by its own gradient, and its own second moments. Included inside a level's namespace.

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

template <class T>
static void lower_second_moment_from(const T* __restrict gradient, const T* __restrict first, const LowerMoment& how, i64 numel,
                                     T* __restrict second) {
  const float unbiased = how.unbiased, left = how.left, whole = how.whole, taken = how.taken;
  for (i64 i = 0; i < numel; ++i) {
    const float g = to_float(gradient[i]), m = to_float(first[i]) * unbiased, squares = g * g;
    const float signal = (m * m - squares * left) * whole;
    const float noise = squares - (signal < 0.0f ? 0.0f : signal);
    const float lower = to_float(second[i]) - (noise - noise == 0.0f ? noise : 0.0f) * taken;
    from_float(lower < 0.0f ? 0.0f : lower, second[i]);
  }
}

void lower_second_moment(const void* gradient, const void* first, Dtype dtype, const LowerMoment& how, i64 from, i64 to,
                                void* second) {
#define GW_LOWER(T)                                                                                             \
  return lower_second_moment_from<T>(static_cast<const T*>(gradient) + from, static_cast<const T*>(first) + from, how, to - from, \
                                     static_cast<T*>(second) + from)
  switch (dtype) {
    case Dtype::float32: GW_LOWER(float);
    case Dtype::bfloat16: GW_LOWER(bf16);
    case Dtype::float16: GW_LOWER(f16);
  }
#undef GW_LOWER
}
