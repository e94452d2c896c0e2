// The table of one SIMD level's kernels.
#include "kernels.hpp"

#define GW_TEXT_(x) #x
#define GW_TEXT(x) GW_TEXT_(x)
#define GW_ROW(name) name,

namespace gradwire {
namespace GRADWIRE_LEVEL {

extern const Kernels kernels;
const Kernels kernels = {GW_TEXT(GRADWIRE_LEVEL), GW_KERNELS(GW_ROW)};

}  // namespace GRADWIRE_LEVEL
}  // namespace gradwire
