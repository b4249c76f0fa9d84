// A bad drive, for tests: loaded with LD_PRELOAD, it spoils calls on the swap files, checkpoints and exports below
// $SHIM_DIR as $SHIM_MODE says.
//
//   short_write, short_read   every second call moves half of what was asked
//   crumb_write, crumb_read   every call moves 512 bytes
//   stuck_write, stuck_read   the first call moves half, every later one nothing
//   interrupted               every second call of either kind is EINTR
//   enospc, eio_write         writes fail once $SHIM_AFTER bytes were written
//   eio_read                  every read fails
//   no_room                   posix_fallocate answers ENOSPC
// With $SHIM_NO_DIRECT, open() refuses O_DIRECT there with EINVAL.  The environment is read at every call, so a test
// may switch modes as it goes; setting SHIM_MODE to another value starts the counts again (see shim_reset).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static long calls, spoiled;
static long long written;

void shim_reset(void) {
  pthread_mutex_lock(&gate);
  calls = spoiled = 0;
  written = 0;
  pthread_mutex_unlock(&gate);
}
long shim_spoiled(void) { return spoiled; }

static int below(const char *path) {
  const char *dir = getenv("SHIM_DIR");
  return dir && *dir && strncmp(path, dir, strlen(dir)) == 0;
}

static int ours(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return below(path) && (strstr(path, "/state/") || strstr(path, "/scratch/") || strstr(path, ".safetensors"));
}

static int mode_is(const char *name) {
  const char *mode = getenv("SHIM_MODE");
  return mode && strcmp(mode, name) == 0;
}

// How many of `count` bytes to let through; -1 with errno set to fail.
static ssize_t allowed(int write, size_t count) {
  const char *after = getenv("SHIM_AFTER");
  long long limit = after ? atoll(after) : 0;
  ssize_t let = (ssize_t)count;
  pthread_mutex_lock(&gate);
  long call = calls++;
  if (mode_is("interrupted") && call % 2 == 0) let = -EINTR;
  if (mode_is(write ? "short_write" : "short_read") && call % 2 == 1) let = (ssize_t)(count / 2);
  if (mode_is(write ? "crumb_write" : "crumb_read") && count > 512) let = 512;
  if (mode_is(write ? "stuck_write" : "stuck_read")) let = call == 0 ? (ssize_t)(count / 2) : 0;
  if (write && mode_is("enospc") && written + (long long)count > limit) let = -ENOSPC;
  if (write && mode_is("eio_write") && written + (long long)count > limit) let = -EIO;
  if (!write && mode_is("eio_read")) let = -EIO;
  if (let != (ssize_t)count) spoiled++;
  if (write && let > 0) written += let;
  pthread_mutex_unlock(&gate);
  if (let < 0) {
    errno = (int)-let;
    return -1;
  }
  return let;
}

ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) real = (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
  if (!ours(fd)) return real(fd, buffer, count, offset);
  ssize_t let = allowed(1, count);
  return let <= 0 ? let : real(fd, buffer, (size_t)let, offset);
}
ssize_t pwrite(int fd, const void *buffer, size_t count, off_t offset) { return pwrite64(fd, buffer, count, offset); }

ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset) {
  static ssize_t (*real)(int, void *, size_t, off64_t);
  if (!real) real = (ssize_t(*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
  if (!ours(fd)) return real(fd, buffer, count, offset);
  ssize_t let = allowed(0, count);
  return let <= 0 ? let : real(fd, buffer, (size_t)let, offset);
}
ssize_t pread(int fd, void *buffer, size_t count, off_t offset) { return pread64(fd, buffer, count, offset); }

int posix_fallocate64(int fd, off64_t offset, off64_t length) {
  static int (*real)(int, off64_t, off64_t);
  if (!real) real = (int (*)(int, off64_t, off64_t))dlsym(RTLD_NEXT, "posix_fallocate64");
  int spoil = mode_is("no_room") && ours(fd);
  int answer = real(fd, offset, spoil ? length / 2 : length); // a full drive gives some of it first
  return spoil ? ENOSPC : answer;
}
int posix_fallocate(int fd, off_t offset, off_t length) { return posix_fallocate64(fd, offset, length); }

static int open_spoiled(const char *path, int flags) {
  return (flags & O_DIRECT) && getenv("SHIM_NO_DIRECT") && below(path);
}

int open64(const char *path, int flags, ...) {
  static int (*real)(const char *, int, ...);
  if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
  va_list more;
  va_start(more, flags);
  mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (open_spoiled(path, flags)) {
    errno = EINVAL;
    return -1;
  }
  return real(path, flags, mode);
}
int open(const char *path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;
  va_end(more);
  return open64(path, flags, mode);
}
