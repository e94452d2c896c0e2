// Chooses the SIMD level at run time.
// A build has any of the newer levels, or none.
#if defined(GRADWIRE_HAVE_AVX2) || defined(GRADWIRE_HAVE_AVX512)
#define GRADWIRE_HAVE_NEWER
#include <cpuid.h>
#endif

#include <atomic>

#include "api.hpp"

namespace gradwire {

namespace baseline { extern const Kernels kernels; }
#ifdef GRADWIRE_HAVE_AVX2
namespace avx2 { extern const Kernels kernels; }
#endif
#ifdef GRADWIRE_HAVE_AVX512
namespace avx512 { extern const Kernels kernels; }
#endif

namespace {

#ifdef GRADWIRE_HAVE_NEWER
// Where LZCNT is hidden, as by some hypervisors, it runs as BSR and counts wrongly; not all compilers know it by name.
bool counts_leading_zeros() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c >> 5 & 1u);
}
#endif

// Levels that this machine can run, slowest first.
struct Levels {
  const Kernels* of[3] = {&baseline::kernels};
  int64_t count = 1;

  Levels() {
#ifdef GRADWIRE_HAVE_NEWER
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && counts_leading_zeros();
#endif
#ifdef GRADWIRE_HAVE_AVX2
    if (v3) of[count++] = &avx2::kernels;
#endif
#ifdef GRADWIRE_HAVE_AVX512
    if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
      of[count++] = &avx512::kernels;
#endif
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_relaxed);
  return current ? *current : *levels().of[levels().count - 1];
}

}  // namespace gradwire

// The name of a level, slowest first; NULL past the last.
GW_API gw_level_name(int64_t index) {
  const gradwire::Levels& all = gradwire::levels();
  return index >= 0 && index < all.count ? all.of[index]->level : nullptr;
}

GW_API gw_set_level(int64_t index) {
  using namespace gradwire;
  return guarded([&] {
    GW_CHECK(index >= 0 && index < levels().count, "SIMD level %lld does not run here; there are %lld", Long(index),
             Long(levels().count));
    chosen.store(levels().of[index]);
  });
}
