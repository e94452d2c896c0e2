// CRC32C by the processor's own instruction, or by a table where there is none.
//
// An instruction takes 8 bytes, and the next one can begin before it ends. So three runs of kRun bytes go side by side, and are
// joined: to put kRun zero bytes behind bytes is a linear map of their checksum, which four tables hold. AVX-512 multiplies
// polynomials, four at once: 512 bytes are replaced by 512 others that leave the same remainder, and are added to the next 512.
#include "checksum.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define GW_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && !defined(__clang__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define GW_CRC_TARGET __attribute__((target("+crc")))
#endif

#include <cstring>

#include "api.hpp"

namespace gradwire {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // the bit of x^31 is the lowest
constexpr uint32_t kOne = 0x80000000u;
constexpr int kRun = 2048;

uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

// The product of two polynomials, modulo the checksum's.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit; bit >>= 1, b = times_x(b))
    if (a & bit) product ^= b;
  return product;
}

// The remainder of x^power.
uint32_t power_of_x(int power) {
  uint32_t rest = kOne;
  for (int bit = 0; bit < power; ++bit) rest = times_x(rest);
  return rest;
}

struct Tables {
  uint32_t byte[256];       // the checksum of each byte
  uint32_t behind[4][256];  // of each byte of a checksum what kRun zero bytes make of it

  Tables() {
    const uint32_t run = power_of_x(8 * kRun);
    for (uint32_t value = 0; value < 256; ++value) {
      uint32_t rest = value;
      for (int bit = 0; bit < 8; ++bit) rest = times_x(rest);
      byte[value] = rest;
      for (int at = 0; at < 4; ++at) behind[at][value] = multiply(run, value << (8 * at));
    }
  }

  uint32_t skip_run(uint32_t crc) const {
    return behind[0][crc & 255] ^ behind[1][crc >> 8 & 255] ^ behind[2][crc >> 16 & 255] ^ behind[3][crc >> 24];
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

using Crc = uint32_t (*)(uint32_t, const unsigned char*, size_t);

uint32_t by_table(uint32_t crc, const unsigned char* bytes, size_t count) {
  const Tables& table = tables();
  for (; count; --count) crc = table.byte[(crc ^ *bytes++) & 255] ^ (crc >> 8);
  return crc;
}

#ifdef GW_CRC_TARGET
GW_CRC_TARGET inline uint32_t eight(uint32_t crc, const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, 8);
#ifdef __x86_64__
  return uint32_t(_mm_crc32_u64(crc, word));
#else
  return __builtin_aarch64_crc32cx(crc, word);
#endif
}

GW_CRC_TARGET uint32_t by_instruction(uint32_t crc, const unsigned char* bytes, size_t count) {
  const Tables& table = tables();
  for (; count >= 3 * kRun; count -= 3 * kRun, bytes += 3 * kRun) {
    uint32_t second = 0, third = 0;
    for (size_t at = 0; at < kRun; at += 8) {
      crc = eight(crc, bytes + at);
      second = eight(second, bytes + kRun + at);
      third = eight(third, bytes + 2 * kRun + at);
    }
    crc = table.skip_run(table.skip_run(crc) ^ second) ^ third;
  }
  for (; count >= 8; count -= 8, bytes += 8) crc = eight(crc, bytes);
  return by_table(crc, bytes, count);
}
#endif

#ifdef GRADWIRE_HAVE_AVX512
#define GW_FOLD_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

// So many products are under way at a time; with half of them their latency is what costs.
constexpr int kRegisters = kFoldedBytes / 64;

// The polynomials of 128 bits in a register, times x^(8 * kFoldedBytes), plus the next ones. Bit k of a product stands for
// x^(126 - k), and of a register for x^(127 - k): the factors are smaller by an x, and by x^32, since they have 32 bits of 64.
GW_FOLD_TARGET inline __m512i fold(__m512i folded, __m512i factors, const unsigned char* next) {
  const __m512i low = _mm512_clmulepi64_epi128(folded, factors, 0x00), high = _mm512_clmulepi64_epi128(folded, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(next), 0x96);
}

GW_FOLD_TARGET inline void begin(__m512i* folded, const unsigned char* bytes) {
  for (int at = 0; at < kRegisters; ++at) folded[at] = _mm512_loadu_si512(bytes + 64 * at);
}

// `kFoldedBytes` at a time, up to `end`; returns where it stopped.
GW_FOLD_TARGET inline const unsigned char* fold_on(__m512i* folded, const unsigned char* bytes, const unsigned char* end) {
  static const uint32_t first = power_of_x(8 * kFoldedBytes + 31), second = power_of_x(8 * kFoldedBytes - 33);
  const __m512i factors = _mm512_set4_epi64(second, first, second, first);
  for (; end - bytes >= kFoldedBytes; bytes += kFoldedBytes)
    for (int at = 0; at < kRegisters; ++at) folded[at] = fold(folded[at], factors, bytes + 64 * at);
  return bytes;
}

GW_FOLD_TARGET uint32_t by_folding(uint32_t crc, const unsigned char* bytes, size_t count) {
  const unsigned char* const end = bytes + count;
  if (count >= 2 * kFoldedBytes) {
    __m512i folded[kRegisters];
    begin(folded, bytes);
    folded[0] = _mm512_xor_si512(folded[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
    bytes = fold_on(folded, bytes + kFoldedBytes, end);
    unsigned char rest[kFoldedBytes];
    std::memcpy(rest, folded, kFoldedBytes);
    crc = by_instruction(0, rest, kFoldedBytes);
  }
  return by_instruction(crc, bytes, size_t(end - bytes));
}

GW_FOLD_TARGET void fold_along(Summing& sum, const uint8_t* end) {
  __m512i folded[kRegisters];
  if (end - sum.next < kFoldedBytes) return;
  if (sum.next == sum.first) {
    begin(folded, sum.next);
    sum.next += kFoldedBytes;
  } else {
    begin(folded, sum.folded);
  }
  sum.next = fold_on(folded, sum.next, end);
  std::memcpy(sum.folded, folded, kFoldedBytes);
}

// The product of two polynomials, modulo the checksum's: bit k of the product of registers, moved by one, stands for x^(63 - k).
GW_FOLD_TARGET uint32_t multiply_fast(uint32_t a, uint32_t b) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(int(a)), _mm_cvtsi32_si128(int(b)), 0x00);
  const uint64_t moved = uint64_t(_mm_cvtsi128_si64(product)) << 1;
  return _mm_crc32_u32(0, uint32_t(moved)) ^ uint32_t(moved >> 32);
}

// What so many zero bytes behind bytes make of their checksum.
uint32_t skip(uint32_t crc, size_t count) {
  for (uint32_t square = power_of_x(8); count; count >>= 1, square = multiply_fast(square, square))
    if (count & 1) crc = multiply_fast(crc, square);
  return crc;
}
#endif

Crc fastest() {
#ifdef GRADWIRE_HAVE_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) return by_folding;
#endif
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return by_instruction;
#elif defined(__aarch64__) && !defined(__clang__)
  if (getauxval(AT_HWCAP) & HWCAP_CRC32) return by_instruction;
#endif
  return by_table;
}

}  // namespace

thread_local Encoded* asked = nullptr;

Summing summing() {
  Summing sum;
  sum.along = nullptr;
#ifdef GRADWIRE_HAVE_AVX512
  if (fastest() == by_folding) sum.along = fold_along;
#endif
  sum.first = sum.next = nullptr;
  return sum;
}

uint32_t checksum_of(const Summing& sum, const void* payload, size_t count) {
#ifdef GRADWIRE_HAVE_AVX512
  if (sum.next != sum.first) {
    const unsigned char* const bytes = static_cast<const unsigned char*>(payload);
    const uint32_t before = by_folding(~0u, bytes, size_t(sum.first - bytes));
    const uint32_t codes = by_instruction(by_instruction(0, sum.folded, kFoldedBytes), sum.next, count - size_t(sum.next - bytes));
    return ~(skip(before, count - size_t(sum.first - bytes)) ^ codes);
  }
#endif
  (void)sum;
  return crc32c(0, payload, count);
}

uint32_t crc32c(uint32_t before, const void* bytes, size_t count) {
  static const Crc chosen = fastest();
  return ~chosen(~before, static_cast<const unsigned char*>(bytes), count);
}

}  // namespace gradwire

// The checksum of these bytes. `by_table`: without the processor's instruction.
extern "C" __attribute__((visibility("default"))) uint32_t gw_crc32c(const void* bytes, int64_t count, bool by_table) {
  using namespace gradwire;
  if (by_table) return ~gradwire::by_table(~0u, static_cast<const unsigned char*>(bytes), size_t(count));
  return crc32c(0, bytes, size_t(count));
}

// Runs an encode in its packed form. Returns the checksum of its payload, which it has computed on its way; -1 where it cannot do
// that, or refuses its arguments.
extern "C" __attribute__((visibility("default"))) int64_t gw_sum_encode(const char* (*encode)(const int64_t*),
                                                                         const int64_t* words) {
  gradwire::Encoded encoded{};
  gradwire::asked = &encoded;
  const char* const refused = encode(words);
  gradwire::asked = nullptr;
  return refused || !encoded.payload ? -1 : int64_t(encoded.checksum);
}
