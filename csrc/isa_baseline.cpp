#include "kernels.h"
#include <cstddef>

namespace offloadz {
namespace baseline {
#include "kernels.inl"
}
const Kernels kernels_baseline = baseline::make_table("baseline");
} // namespace offloadz
