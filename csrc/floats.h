// The rounding mode and the treatment of tiny numbers belong to a thread; a caller may have changed his own
// (torch.set_flush_denormal).  Results must not depend on which thread does a tile, so every loop runs in the plain
// mode.
#pragma once
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace offloadz {

struct PlainFloats {
#if defined(__SSE__)
  unsigned before = _mm_getcsr();
  PlainFloats() { _mm_setcsr(0x1f80); }
  ~PlainFloats() { _mm_setcsr(before); }
#else
  PlainFloats() {}
#endif
};

} // namespace offloadz
