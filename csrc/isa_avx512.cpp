#include "kernels.h"
#include <cstddef>

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
namespace offloadz {
namespace avx512 {
#include "kernels.inl"
}
const Kernels kernels_avx512 = avx512::make_table("avx512");
} // namespace offloadz
#endif
