// Signs and ternary codes, at one SIMD level. See kernels.hpp.
#include "kernels.hpp"

#include <cstddef>

namespace gradwire {
namespace GRADWIRE_LEVEL {

#include "numbers.hpp"
#include "random.hpp"
#include "planes.hpp"
#include "scales.hpp"
#include "signs.hpp"
#include "signs_dtypes.hpp"
#include "ternary.hpp"

}  // namespace GRADWIRE_LEVEL
}  // namespace gradwire
