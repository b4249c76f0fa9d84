// The transfers' part of the C functions that Python calls through ctypes; the rules are those of abi.cpp.
#include "io.h"
#include <cerrno>

using namespace offloadz;

#define OZ_API extern "C" __attribute__((visibility("default")))

// A back end, or null with errno set.
OZ_API void *oz_io_start(int num_threads, int64_t request_bytes) {
  int error = 0;
  Mover *made = start_threads(num_threads, request_bytes, error);
  errno = error;
  return made;
}

OZ_API void *oz_ring_start(int depth, int num_threads, int64_t request_bytes) {
  int error = 0;
  Mover *made = start_ring(depth, num_threads, request_bytes, error);
  errno = error;
  return made;
}

OZ_API void oz_io_stop(void *mover) {
  delete static_cast<Mover *>(mover);
}

OZ_API int oz_io_fix(void *mover, void *at, int64_t num_bytes) {
  return static_cast<Mover *>(mover)->fix(at, num_bytes);
}

OZ_API int oz_io_fallen(void *mover) {
  return static_cast<Mover *>(mover)->fallen();
}

OZ_API int oz_io_run(void *mover, int fd, int write, void *buffer, int64_t num_bytes, int64_t offset, int64_t origin,
                     int64_t *table, IoFault *fault) {
  *fault = static_cast<Mover *>(mover)->run(
      {fd, write != 0, static_cast<unsigned char *>(buffer), num_bytes, offset, origin, table});
  return fault->kind;
}
