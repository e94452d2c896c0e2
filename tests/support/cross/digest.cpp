// Prints a number for what each of some kernels makes of the same values: equal on every processor, or ranks would drift apart.
// Linked by tests/scripts/test_build.py with the library of a wheel, for this machine and, where there is a cross compiler, for another.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../../csrc/api.hpp"

using gradwire::Tensor;

extern "C" {
const char* gw_set_level(int64_t index);
const char* gw_level_name(int64_t index);
const char* gw_qsgd_encode(const Tensor*, const Tensor*, const Tensor*, const Tensor*, int64_t, int64_t, int64_t, const Tensor*);
const char* gw_fp8_encode(const Tensor*, const Tensor*, const Tensor*, int64_t, int64_t, const Tensor*);
const char* gw_natural_encode(const Tensor*, const Tensor*, const Tensor*, const Tensor*, int64_t, const Tensor*);
const char* gw_mean_sign_encode(const Tensor*, const Tensor*, const Tensor*, int64_t, int64_t, const Tensor*);
const char* gw_terngrad_encode(const Tensor*, const Tensor*, const Tensor*, const Tensor*, int64_t, double, const Tensor*);
const char* gw_topk_encode(const Tensor*, const Tensor*, const Tensor*, double, bool, double, const Tensor*);
const char* gw_cast_encode(const Tensor*, const Tensor*, int64_t, const Tensor*);
}

constexpr int64_t kNumel = 5000, kBlocks = 40;

int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

int main() {
  std::vector<float> gradient(kNumel), residual(kNumel);
  uint32_t state = 1;
  for (float& x : gradient) {
    state = state * 1664525u + 1013904223u;
    x = std::ldexp(float(int32_t(state)), -40 - int(state >> 28));
  }
  int64_t segment[5] = {0, kNumel, 7, 0, 4}, two[5] = {0, kNumel, 7, 0, 2}, numbers[4] = {3, 5, 1, 2};
  const Tensor src{gradient.data(), kNumel, 0, 1}, left{residual.data(), kNumel, 0, 1}, stream{numbers, 4, 3, 1};
  const Tensor four{segment, 5, 3, 1}, pair{two, 5, 3, 1};
  const auto show = [&](const char* name, int64_t bytes, auto encode) {
    std::vector<uint8_t> payload(static_cast<size_t>(bytes));
    const Tensor out{payload.data(), bytes, 4, 1};
    std::memset(residual.data(), 0, kNumel * sizeof(float));
    if (const char* words = encode(&out)) std::printf("%s: %s\n", name, words);
    uint64_t digest = 1469598103934665603ull;
    const auto add = [&](const void* data, size_t count) {
      for (size_t i = 0; i < count; ++i) digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211ull;
    };
    add(payload.data(), payload.size());
    add(residual.data(), kNumel * sizeof(float));
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(digest));
  };
  const int64_t scales = padded(2 * kBlocks);
  for (int64_t level = 0; gw_level_name(level); ++level) {
    gw_set_level(level);
    std::fprintf(stderr, "%s\n", gw_level_name(level));
    show("qsgd max", scales + kNumel / 2, [&](const Tensor* out) { return gw_qsgd_encode(&src, &left, &four, &stream, 128, 0, 0, out); });
    show("qsgd minmax", padded(4 * kBlocks) + kNumel / 2, [&](const Tensor* out) { return gw_qsgd_encode(&src, &left, &four, &stream, 128, 1, 1, out); });
    show("qsgd l2", scales + kNumel / 2, [&](const Tensor* out) { return gw_qsgd_encode(&src, nullptr, &four, &stream, 128, 2, 0, out); });
    show("fp8", scales + kNumel, [&](const Tensor* out) { return gw_fp8_encode(&src, &left, &four, 128, 0, out); });
    show("natural", scales + kNumel, [&](const Tensor* out) { return gw_natural_encode(&src, &left, &four, &stream, 128, out); });
    show("mean signs", padded(2) + kNumel / 8, [&](const Tensor* out) { return gw_mean_sign_encode(&src, &left, &four, 0, 1, out); });
    show("terngrad", scales + (kNumel / 8 * 13 + 7) / 8, [&](const Tensor* out) { return gw_terngrad_encode(&src, &left, &pair, &stream, 128, 2.5, out); });
    show("top-k", 50 * 4 + 54, [&](const Tensor* out) { return gw_topk_encode(&src, &left, &four, 0.01, false, 0.0, out); });
    show("float16", 2 * kNumel, [&](const Tensor* out) { return gw_cast_encode(&src, &left, 2, out); });
  }
}
