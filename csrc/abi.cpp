// The C functions that Python calls through ctypes.  They check nothing: offloadz/runtime/native.py has, before it took
// a pointer.  No exception leaves them, and none ends the process.
#include "crc32c.h"
#include "floats.h"
#include "heap.h"
#include "kernels.h"
#include <cstring>

using namespace offloadz;

#define OZ_API extern "C" __attribute__((visibility("default")))

OZ_API int oz_abi_version() {
  return 2;
}

OZ_API const char *oz_isa() {
  return kernels().name;
}

OZ_API int oz_select_isa(const char *name) {
  return select_isa(name);
}

OZ_API int oz_isa_supported(int level) {
  return isa_supported(level);
}

OZ_API void oz_update(UpdateArgs *const *spans, int64_t num_spans, int num_threads) {
  update(spans, num_spans, num_threads);
}

OZ_API int64_t oz_quant_block() {
  return kQuant;
}

OZ_API void oz_encode_moment(uint8_t *codes, float *scales, const float *in, int64_t count, int second) {
  PlainFloats plain;
  kernels().encode[second != 0](codes, scales, in, count);
}

OZ_API void oz_decode_moment(float *out, const uint8_t *codes, const float *scales, int64_t count, int second) {
  PlainFloats plain;
  kernels().decode[second != 0](out, codes, scales, count);
}

OZ_API void oz_split_master(uint16_t *weight, uint16_t *low, const uint32_t *master, int64_t count) {
  kernels().split_master(weight, low, master, count);
}

OZ_API void oz_join_master(uint32_t *master, const uint16_t *weight, const uint16_t *low, int64_t count) {
  kernels().join_master(master, weight, low, count);
}

OZ_API void oz_widen(uint32_t *out, const uint16_t *in, int64_t count) {
  kernels().widen(out, in, count);
}

OZ_API void oz_narrow(uint16_t *out, const uint32_t *in, int64_t count) {
  kernels().narrow(out, in, count);
}

OZ_API double oz_drain_bf16(uint16_t *out, const float *grad, int64_t count) {
  PlainFloats plain;
  return kernels().drain(out, grad, count);
}

OZ_API double oz_drain_fp32(float *out, const float *grad, int64_t count) {
  PlainFloats plain;
  return kernels().drain_copy(out, grad, count);
}

OZ_API double oz_sum_squares_bf16(const uint16_t *in, int64_t count) {
  PlainFloats plain;
  return kernels().sum_squares_bf16(in, count);
}

OZ_API double oz_sum_squares_fp32(const float *in, int64_t count) {
  PlainFloats plain;
  return kernels().sum_squares_fp32(in, count);
}

OZ_API void oz_copy(void *out, const void *in, int64_t num_bytes) {
  std::memcpy(out, in, size_t(num_bytes));
}

OZ_API void oz_fill(void *out, int value, int64_t num_bytes) {
  std::memset(out, value, size_t(num_bytes));
}

OZ_API uint32_t oz_crc32c(const void *data, int64_t num_bytes) {
  return crc32c(data, size_t(num_bytes));
}

OZ_API int oz_fill_holes() {
  return fill_holes();
}
