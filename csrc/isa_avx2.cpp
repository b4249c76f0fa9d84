#include "kernels.h"
#include <cstddef>

#if defined(__x86_64__)
#pragma GCC target("avx2")
namespace offloadz {
namespace avx2 {
#include "kernels.inl"
}
const Kernels kernels_avx2 = avx2::make_table("avx2");
} // namespace offloadz
#endif
