// The kernels of signs.hpp, by dtype. Included inside a level's namespace.

template <class T>
static void sign_encode_dtype(const void* src, float* momentum, const Decay& decay, const Segment* segments, i64 count,
                              u8* payload) {
  const T* from = static_cast<const T*>(src);
  if (momentum) send_signs<T, Memory::momentum>(from, momentum, decay, segments, count, payload);
  else send_signs<T, Memory::none>(from, nullptr, decay, segments, count, payload);
}

void sign_encode(const void* src, Dtype dtype, float* momentum, float keep, float take, const Segment* segments,
                        i64 count, u8* payload) {
  const Decay decay{keep, take};
  switch (dtype) {
    case Dtype::float32: return sign_encode_dtype<float>(src, momentum, decay, segments, count, payload);
    case Dtype::bfloat16: return sign_encode_dtype<bf16>(src, momentum, decay, segments, count, payload);
    case Dtype::float16: return sign_encode_dtype<f16>(src, momentum, decay, segments, count, payload);
  }
}

template <class T, bool Residual>
static void mean_sign_encode_as(const void* src, float* residual, const Segment* segments, i64 count, i64 block, int means,
                                u8* payload) {
  const T* from = static_cast<const T*>(src);
  if (means == 1) send_mean_signs<T, Residual, 1>(from, residual, segments, count, block, payload);
  else send_mean_signs<T, Residual, 2>(from, residual, segments, count, block, payload);
}

template <class T>
static void mean_sign_encode_dtype(const void* src, float* residual, const Segment* segments, i64 count, i64 block,
                                   int means, u8* payload) {
  if (residual) mean_sign_encode_as<T, true>(src, residual, segments, count, block, means, payload);
  else mean_sign_encode_as<T, false>(src, nullptr, segments, count, block, means, payload);
}

void mean_sign_encode(const void* src, Dtype dtype, float* residual, const Segment* segments, i64 count, i64 block,
                             int means, u8* payload) {
  switch (dtype) {
    case Dtype::float32: return mean_sign_encode_dtype<float>(src, residual, segments, count, block, means, payload);
    case Dtype::bfloat16: return mean_sign_encode_dtype<bf16>(src, residual, segments, count, block, means, payload);
    case Dtype::float16: return mean_sign_encode_dtype<f16>(src, residual, segments, count, block, means, payload);
  }
}

template <class T, bool Add>
static void sign_decode_as(const u8* payload, void* dst, const Segment* segments, i64 count, i64 block, int means) {
  T* to = static_cast<T*>(dst);
  switch (means) {
    case 0: return read_signs<T, Add, 0>(payload, to, segments, count, block);
    case 1: return read_signs<T, Add, 1>(payload, to, segments, count, block);
    default: return read_signs<T, Add, 2>(payload, to, segments, count, block);
  }
}

void sign_decode(const u8* payload, void* dst, Dtype dtype, bool add, const Segment* segments, i64 count, i64 block,
                        int means) {
  switch (dtype) {
    case Dtype::float32:
      if (add) return sign_decode_as<float, true>(payload, dst, segments, count, block, means);
      return sign_decode_as<float, false>(payload, dst, segments, count, block, means);
    case Dtype::bfloat16: return sign_decode_as<bf16, false>(payload, dst, segments, count, block, means);
    case Dtype::float16: return sign_decode_as<f16, false>(payload, dst, segments, count, block, means);
  }
}
