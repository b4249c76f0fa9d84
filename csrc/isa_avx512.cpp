// The loops for AVX512.  Intel's header is included before the target is set: its functions bring their own.
#include "kernels.h"
#include <cstddef>

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // in the header itself: gcc 12 warns of its own "undefined"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define OFFLOADZ_LANES 16 // floats in a vector
namespace offloadz {
namespace avx512 {
#include "kernels.inl"
}
const Kernels kernels_avx512 = avx512::make_table("avx512");
} // namespace offloadz
#endif
