// PowerSGD's products, on matrices that lie row after row in a flat buffer. Included inside a level's namespace.
// M is src + residual, never stored. P is rows x rank, row after row; Q is rank rows of `columns` numbers.
// What all ranks must agree on to the last bit (orthogonalise, reconstruct) has a fixed order of operations; what is summed
// over ranks afterwards (project, back_project) has one too, so that a run can be repeated.

template <class T, bool Residual>
GW_INLINE float element(const T* src, const float* residual, i64 i) {
  return Residual ? to_float(src[i]) + residual[i] : to_float(src[i]);
}

// P[i, k] for K columns from k on: dot products in 16 lanes.
template <class T, bool Residual, int K>
static void project_columns(const T* src, const float* residual, const Matrix& m, i64 rank, i64 k, const float* q, float* p) {
  const i64 whole = m.columns / 16 * 16;
  for (i64 i = 0; i < m.rows; ++i) {
    const T* __restrict from = src + m.offset + i * m.columns;
    const float* __restrict left = Residual ? residual + m.offset + i * m.columns : nullptr;
    float lanes[K][16] = {};
    for (i64 j = 0; j < whole; j += 16) {
      float x[16];
      for (int l = 0; l < 16; ++l) x[l] = element<T, Residual>(from, left, j + l);
      for (int c = 0; c < K; ++c)
        for (int l = 0; l < 16; ++l) lanes[c][l] += x[l] * q[(k + c) * m.columns + j + l];
    }
    for (i64 j = whole; j < m.columns; ++j)
      for (int c = 0; c < K; ++c) lanes[c][j - whole] += element<T, Residual>(from, left, j) * q[(k + c) * m.columns + j];
    for (int c = 0; c < K; ++c) {
      for (int width = 8; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) lanes[c][l] += lanes[c][l + width];
      p[i * rank + k + c] = lanes[c][0];
    }
  }
}

template <class T, bool Residual>
static void project_all(const T* src, const float* residual, const Matrix* matrices, i64 count, i64 rank, const float* q,
                        float* p) {
  for (i64 at = 0; at < count; ++at) {
    const Matrix& m = matrices[at];
    i64 k = 0;
    for (; k + 4 <= rank; k += 4) project_columns<T, Residual, 4>(src, residual, m, rank, k, q + m.q_at, p + m.p_at);
    for (; k < rank; ++k) project_columns<T, Residual, 1>(src, residual, m, rank, k, q + m.q_at, p + m.p_at);
  }
}

// Q[k, j] = sum over rows of P[i, k] * M[i, j], eight rows at a time, a strip of columns at a time.
constexpr i64 kStrip = 1024;

// Adds the products of R rows, from row i on, to K rows of Q.
template <class T, bool Residual, int K, int R>
GW_INLINE void add_rows(const T* __restrict src, const float* __restrict residual, i64 columns, i64 width, const float* p,
                        i64 rank, float* __restrict q, i64 stride) {
  float factor[R][K];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < K; ++c) factor[r][c] = p[r * rank + c];
  for (i64 j = 0; j < width; ++j) {
    float sums[K] = {};
    for (int r = 0; r < R; ++r) {
      const float x = element<T, Residual>(src, residual, r * columns + j);
      for (int c = 0; c < K; ++c) sums[c] += factor[r][c] * x;
    }
    for (int c = 0; c < K; ++c) q[c * stride + j] += sums[c];
  }
}

template <class T, bool Residual, int K>
static void back_project_strip(const T* src, const float* residual, const Matrix& m, i64 rank, i64 k, i64 first, i64 width,
                               const float* p, float* q) {
  alignas(64) float strip[K * kStrip] = {};
  i64 i = 0;
  for (; i < m.rows; i += i + 8 <= m.rows ? 8 : 1) {
    const i64 start = m.offset + i * m.columns + first;
    const T* from = src + start;
    const float* left = Residual ? residual + start : nullptr;
    if (i + 8 <= m.rows) add_rows<T, Residual, K, 8>(from, left, m.columns, width, p + i * rank + k, rank, strip, kStrip);
    else add_rows<T, Residual, K, 1>(from, left, m.columns, width, p + i * rank + k, rank, strip, kStrip);
  }
  for (int c = 0; c < K; ++c) __builtin_memcpy(q + (k + c) * m.columns + first, strip + c * kStrip, size_t(width) * sizeof(float));
}

template <class T, bool Residual>
static void back_project_all(const T* src, const float* residual, const Matrix* matrices, i64 count, i64 rank, const float* p,
                             float* q) {
  for (i64 at = 0; at < count; ++at) {
    const Matrix& m = matrices[at];
    const float* from = p + m.p_at;
    float* to = q + m.q_at;
    for (i64 first = 0; first < m.columns; first += kStrip) {
      const i64 width = m.columns - first < kStrip ? m.columns - first : kStrip;
      i64 k = 0;
      for (; k + 4 <= rank; k += 4) back_project_strip<T, Residual, 4>(src, residual, m, rank, k, first, width, from, to);
      for (; k < rank; ++k) back_project_strip<T, Residual, 1>(src, residual, m, rank, k, first, width, from, to);
    }
  }
}

// dst = P * Q of all ranks; residual becomes M less P * Q of this one. A matrix whose Q is not finite on any rank keeps its
// residual: one bad step must not poison the next.
template <class T, bool Residual>
static void reconstruct_all(T* dst, float* residual, const Matrix* matrices, i64 count, i64 rank, const float* p,
                            const float* q_sum, const float* q_own) {
  for (i64 at = 0; at < count; ++at) {
    const Matrix& m = matrices[at];
    u32 largest = 0;
    for (i64 j = 0; j < rank * m.columns; ++j) {
      const u32 magnitude = bits_of(q_sum[m.q_at + j]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    const bool finite = largest < kInfBits;
    alignas(64) float all[kStrip], own[kStrip];
    for (i64 first = 0; first < m.columns; first += kStrip) {
      const i64 width = m.columns - first < kStrip ? m.columns - first : kStrip;
      for (i64 i = 0; i < m.rows; ++i) {
        T* __restrict to = dst + m.offset + i * m.columns + first;
        float* __restrict left = Residual ? residual + m.offset + i * m.columns + first : nullptr;
        for (i64 j = 0; j < width; ++j) all[j] = own[j] = 0.0f;
        for (i64 k = 0; k < rank; ++k) {
          const float factor = p[m.p_at + i * rank + k];
          const float* __restrict sums = q_sum + m.q_at + k * m.columns + first;
          const float* __restrict owns = q_own + m.q_at + k * m.columns + first;
          for (i64 j = 0; j < width; ++j) all[j] += factor * sums[j];
          if (Residual) for (i64 j = 0; j < width; ++j) own[j] += factor * owns[j];
        }
        if (Residual && finite) for (i64 j = 0; j < width; ++j) left[j] = to_float(to[j]) + left[j] - own[j];
        for (i64 j = 0; j < width; ++j) from_float(all[j], to[j]);
      }
    }
  }
}

// Makes the columns of each P orthonormal, by Gram and Schmidt's way in double precision, each column cleared of the others
// twice. A column of which nothing is left is replaced by one of pseudo-random signs, and is orthonormal too.
static double fixed_dot(const float* p, i64 rows, i64 rank, i64 a, i64 b) {
  double lanes[8] = {};
  for (i64 i = 0; i < rows; ++i) lanes[i % 8] += double(p[i * rank + a]) * double(p[i * rank + b]);
  for (int width = 4; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

static void clear_of_others(float* p, i64 rows, i64 rank, i64 k) {
  for (i64 other = 0; other < k; ++other) {
    const double along = fixed_dot(p, rows, rank, other, k);
    for (i64 i = 0; i < rows; ++i) p[i * rank + k] = float(double(p[i * rank + k]) - along * double(p[i * rank + other]));
  }
}

static bool scale_to_one(float* p, i64 rows, i64 rank, i64 k, double least) {
  const double norm = __builtin_sqrt(fixed_dot(p, rows, rank, k, k));
  if (!(norm > least)) return false;
  for (i64 i = 0; i < rows; ++i) p[i * rank + k] = float(double(p[i * rank + k]) / norm);
  return true;
}

void orthogonalise(float* factors, const Matrix* matrices, i64 count, i64 rank) {
  for (i64 at = 0; at < count; ++at) {
    float* p = factors + matrices[at].p_at;
    const i64 rows = matrices[at].rows;
    u32 largest = 0;
    for (i64 i = 0; i < rows * rank; ++i) {
      const u32 magnitude = bits_of(p[i]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= kInfBits) {  // no direction is meant: everything becomes NaN, and is seen
      for (i64 i = 0; i < rows * rank; ++i) p[i] = float_of(0x7fc00000u);
      continue;
    }
    for (i64 k = 0; k < rank; ++k) {
      bool whole = scale_to_one(p, rows, rank, k, 0.0);
      if (whole) {
        clear_of_others(p, rows, rank, k);
        whole = scale_to_one(p, rows, rank, k, 1e-6);
      }
      for (u32 attempt = 0; !whole; ++attempt) {
        for (i64 i = 0; i < rows; ++i)
          p[i * rank + k] = random_hash(u32(i), u32(k), attempt) & 1u ? 1.0f : -1.0f;
        scale_to_one(p, rows, rank, k, 0.0);
        clear_of_others(p, rows, rank, k);
        whole = scale_to_one(p, rows, rank, k, 1e-3);
      }
      clear_of_others(p, rows, rank, k);
      scale_to_one(p, rows, rank, k, 0.0);
    }
  }
}
