// The loops for AVX2.  Intel's header is included before the target is set: its functions bring their own.
#include "kernels.h"
#include <cstddef>

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2")
#define OFFLOADZ_LANES 8 // floats in a vector
namespace offloadz {
namespace avx2 {
#include "kernels.inl"
}
const Kernels kernels_avx2 = avx2::make_table("avx2");
} // namespace offloadz
#endif
