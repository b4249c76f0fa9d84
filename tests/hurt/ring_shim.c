// A bad io_uring, for tests: loaded with LD_PRELOAD, it stands between the library and the system calls on a ring and
// spoils them as $RING_MODE says.  What it changes are real requests, so the kernel itself answers short or refuses.
//
//   half         every second request is cut to half its length
//   crumb        every request is cut to 4096 bytes
//   bad_request  every request has an operation no kernel knows
//   eio          every second request ends with EIO: it goes to where this process has no memory
//   eio_stays    every request does, and pread64 and pwrite64 fail alike
//   busy         every second submission is refused with EAGAIN
//   no_ring      io_uring_setup is refused with EPERM
//   no_call      io_uring_enter is refused with ENOSYS, from the call after $RING_AFTER on
//   no_wait      io_uring_enter takes requests and refuses to wait for them
//   no_register  io_uring_register is refused with the error numbered $RING_AFTER, or with ENOMEM
// The environment is read at every call, so a test may switch modes as it goes.  `ring_flying()` is how many requests
// were under way when the last one was handed in, itself included; `ring_first()` how many the first call handed in;
// `ring_fixes()` how often buffers were to be fixed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RINGS = 1024, SQE_BYTES = 64, TAIL_AT = 84 }; // where io_uring_params says where the count of completions lies
static struct {
  unsigned char *requests, *queues;
  unsigned entries, taken, done_at;
} rings[RINGS];
static long spoiled, calls, flying, first, fixes;

long ring_spoiled(void) { return spoiled; }
long ring_flying(void) { return flying; }
long ring_first(void) { return first; }
long ring_fixes(void) { return fixes; }
void ring_reset(void) { spoiled = calls = first = fixes = 0; }

static int mode_is(const char *name) {
  const char *mode = getenv("RING_MODE");
  return mode && strcmp(mode, name) == 0;
}

static long refuse(int error) {
  __sync_fetch_and_add(&spoiled, 1);
  errno = error;
  return -1;
}

void *mmap(void *at, size_t count, int rights, int flags, int fd, off_t offset) {
  static void *(*real)(void *, size_t, int, int, int, off_t);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "mmap");
  void *area = real(at, count, rights, flags, fd, offset);
  if (offset == 0 && fd >= 0 && fd < RINGS) rings[fd].queues = area;
  if (offset == 0x10000000 && fd >= 0 && fd < RINGS && area != MAP_FAILED) {
    rings[fd].requests = area;
    rings[fd].entries = count / SQE_BYTES;
    rings[fd].taken = 0;
  }
  return area;
}

// The request to address 0 of this process's memory, by plain numbers of file and buffer: the kernel answers EIO.
static void break_request(unsigned char *request) {
  static int memory = -1;
  if (memory < 0) memory = open("/proc/self/mem", O_RDWR);
  int writes = request[0] == 5 || request[0] == 23;
  request[0] = writes ? 23 : 22;
  request[1] = 0;
  *(int32_t *)(request + 4) = memory;
  *(uint64_t *)(request + 8) = 0;
  *(uint16_t *)(request + 40) = 0;
}

static void spoil(int fd, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    unsigned char *request = rings[fd].requests + (rings[fd].taken + i) % rings[fd].entries * SQE_BYTES;
    uint32_t *length = (uint32_t *)(request + 24);
    if (mode_is("bad_request"))
      request[0] = 250;
    else if (mode_is("eio_stays") || (mode_is("eio") && (rings[fd].taken + i) % 2))
      break_request(request);
    else if (mode_is("half") && (rings[fd].taken + i) % 2 && *length > 4096)
      *length = *length / 2 / 4096 * 4096;
    else if (mode_is("crumb") && *length > 4096)
      *length = 4096;
    else
      continue;
    __sync_fetch_and_add(&spoiled, 1);
  }
}

static void count(int fd, unsigned queued) {
  unsigned done = __atomic_load_n((unsigned *)(rings[fd].queues + rings[fd].done_at), __ATOMIC_ACQUIRE);
  if (queued) flying = rings[fd].taken + queued - done;
  if (!first) first = queued;
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "syscall");
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i)
    a[i] = va_arg(list, long);
  va_end(list);
  if (number == 425 && mode_is("no_ring")) return refuse(EPERM);
  const char *after = getenv("RING_AFTER");
  if (number == 427 && a[1] == 0) __sync_fetch_and_add(&fixes, 1);
  if (number == 427 && mode_is("no_register")) return refuse(after && *after ? atoi(after) : ENOMEM);
  if (number != 426) {
    long got = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == 425 && got >= 0 && got < RINGS) rings[got].done_at = *(unsigned *)(a[1] + TAIL_AT);
    return got;
  }
  long call = __sync_fetch_and_add(&calls, 1);
  if (mode_is("no_call") && call >= (after ? atol(after) : 0)) return refuse(ENOSYS);
  if (mode_is("busy") && a[1] && call % 2) return refuse(EAGAIN);
  if (mode_is("no_wait")) {
    if (a[2] && !a[1]) return refuse(EINVAL);
    a[2] = a[3] = 0;
  }
  spoil((int)a[0], (unsigned)a[1]);
  count((int)a[0], (unsigned)a[1]);
  long got = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (got > 0) rings[a[0]].taken += (unsigned)got;
  return got;
}

ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset) {
  static ssize_t (*real)(int, void *, size_t, off64_t);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pread64");
  return mode_is("eio_stays") ? refuse(EIO) : real(fd, buffer, count, offset);
}

ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwrite64");
  return mode_is("eio_stays") ? refuse(EIO) : real(fd, buffer, count, offset);
}
