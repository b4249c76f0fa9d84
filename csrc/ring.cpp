// One io_uring by raw system calls.  No polling thread in the kernel (it would take a core that computes), and no flag
// newer than the first kernels with plain reads and writes (5.6).
#include "ring.h"
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

namespace offloadz {
namespace {

constexpr long kSetup = 425, kEnter = 426, kRegister = 427; // the same on every architecture but Alpha
constexpr uint8_t kReadFixed = 4, kWriteFixed = 5, kRead = 22, kWrite = 23;
constexpr uint8_t kFixedFile = 1;
constexpr unsigned kGetEvents = 1;
constexpr unsigned kSingleMmap = 1, kNoDrop = 2;
constexpr unsigned kRegisterBuffers = 0, kUnregisterBuffers = 1, kRegisterFiles = 2, kUpdateFiles = 6;
constexpr off_t kQueuesAt = 0, kSubmissionsAt = 0x10000000;
constexpr size_t kPage = 4096, kLeastFixed = size_t(1) << 20; // less than this saves nothing worth a call

struct SubmissionOffsets { // struct io_sqring_offsets
  uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
  uint64_t address;
};
struct CompletionOffsets { // struct io_cqring_offsets
  uint32_t head, tail, mask, entries, overflow, entries_at, flags, reserved;
  uint64_t address;
};
struct Parameters { // struct io_uring_params
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SubmissionOffsets sq;
  CompletionOffsets cq;
};
struct FilesUpdate { // struct io_uring_rsrc_update
  uint32_t offset, reserved;
  uint64_t fds;
};
static_assert(sizeof(Parameters) == 120, "the kernel's layout");

unsigned load(const unsigned *at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

void store(unsigned *at, unsigned value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

template <class T> T *in(void *area, uint32_t offset) {
  return reinterpret_cast<T *>(static_cast<char *>(area) + offset);
}

void *map(int fd, size_t num_bytes, off_t at) {
  void *area = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, at);
  if (area == MAP_FAILED) return nullptr;
  madvise(area, num_bytes, MADV_DONTFORK); // a forked child has no business in the queues
  return area;
}

} // namespace

int Ring::open(unsigned num_entries) {
  Parameters p;
  std::memset(&p, 0, sizeof p);
  long fd = syscall(kSetup, num_entries, &p);
  if (fd < 0) return errno;
  fd_ = int(fd);
  if ((p.features & (kSingleMmap | kNoDrop)) != (kSingleMmap | kNoDrop)) return ENOSYS; // before 5.5
  size_t sq_bytes = p.sq.array + p.sq_entries * sizeof(unsigned);
  size_t cq_bytes = p.cq.entries_at + p.cq_entries * sizeof(Completion);
  queues_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
  queues_ = map(fd_, queues_bytes_, kQueuesAt);
  if (!queues_) return errno;
  sqes_bytes_ = p.sq_entries * sizeof(Submission);
  void *sqes = map(fd_, sqes_bytes_, kSubmissionsAt);
  if (!sqes) return errno;
  sqes_ = static_cast<Submission *>(sqes);
  sq_head_ = in<unsigned>(queues_, p.sq.head);
  sq_tail_ = in<unsigned>(queues_, p.sq.tail);
  sq_array_ = in<unsigned>(queues_, p.sq.array);
  sq_mask_ = *in<unsigned>(queues_, p.sq.mask);
  cq_head_ = in<unsigned>(queues_, p.cq.head);
  cq_tail_ = in<unsigned>(queues_, p.cq.tail);
  cqes_ = in<Completion>(queues_, p.cq.entries_at);
  cq_mask_ = *in<unsigned>(queues_, p.cq.mask);
  tail_ = load(sq_tail_);
  int none = -1;
  has_file_slot_ = syscall(kRegister, fd_, kRegisterFiles, &none, 1) == 0;
  return 0;
}

Ring::~Ring() {
  if (sqes_) munmap(sqes_, sqes_bytes_);
  if (queues_) munmap(queues_, queues_bytes_);
  if (fd_ >= 0) close(fd_);
}

void Ring::use_file(int fd) {
  file_ = fd;
  if (!has_file_slot_ || (fd < 0 && !file_in_slot_)) return;
  FilesUpdate update = {0, 0, reinterpret_cast<uint64_t>(&fd)};
  file_in_slot_ = syscall(kRegister, fd_, kUpdateFiles, &update, 1) == 1 && fd >= 0;
}

// The kernel takes all that it is given or nothing, and does not say how much it would take.  Only where it was too
// much (ENOMEM) less may do.
void Ring::use_buffers(const Region *regions, unsigned count) {
  if (num_fixed_) syscall(kRegister, fd_, kUnregisterBuffers, nullptr, 0);
  num_fixed_ = 0;
  size_t total = 0;
  for (unsigned i = 0; i < count; ++i)
    total += regions[i].num_bytes;
  size_t most = total;
  while (most >= kLeastFixed && !fix_first(regions, most) && errno == ENOMEM)
    most = most / 2 / kPage * kPage;
}

// Registers the first `most_bytes` of what the regions hold.
bool Ring::fix_first(const Region *regions, size_t most_bytes) {
  unsigned count = 0;
  for (size_t left = most_bytes; left; left -= fixed_[count++].num_bytes)
    fixed_[count] = {regions[count].at, left < regions[count].num_bytes ? left : regions[count].num_bytes};
  bool taken = syscall(kRegister, fd_, kRegisterBuffers, fixed_, count) == 0;
  num_fixed_ = taken ? count : 0;
  return taken;
}

// The fixed buffer in which all of this lies, or -1.
int Ring::fixed_index(const void *at, size_t num_bytes) const {
  const char *first = static_cast<const char *>(at);
  for (unsigned i = 0; i < num_fixed_; ++i)
    if (first >= fixed_[i].at && first + num_bytes <= fixed_[i].at + fixed_[i].num_bytes) return int(i);
  return -1;
}

void Ring::push(bool write, void *buffer, uint32_t length, int64_t offset, uint64_t tag) {
  Submission &s = sqes_[tail_ & sq_mask_];
  std::memset(&s, 0, sizeof s);
  int buffer_index = fixed_index(buffer, length);
  bool fixed = buffer_index >= 0;
  s.opcode = fixed ? (write ? kWriteFixed : kReadFixed) : (write ? kWrite : kRead);
  s.fd = file_in_slot_ ? 0 : file_;
  s.flags = file_in_slot_ ? kFixedFile : 0;
  s.offset = uint64_t(offset);
  s.address = reinterpret_cast<uint64_t>(buffer);
  s.length = length;
  s.buffer_index = fixed ? uint16_t(buffer_index) : 0;
  s.tag = tag;
  sq_array_[tail_ & sq_mask_] = tail_ & sq_mask_;
  store(sq_tail_, ++tail_);
}

bool Ring::ready() const {
  return load(cq_tail_) != *cq_head_;
}

int Ring::enter(bool wait) {
  for (;;) {
    unsigned queued = tail_ - load(sq_head_);
    bool waits = wait && !ready();
    if (!queued && !waits) return 0;
    long got = syscall(kEnter, fd_, queued, waits ? 1 : 0, waits ? kGetEvents : 0, nullptr, 0);
    if (got < 0 && errno != EINTR) return errno;
    if (got == 0 && queued) return EAGAIN;
  }
}

bool Ring::take_back(uint64_t &tag) {
  if (tail_ == load(sq_head_)) return false;
  tag = sqes_[--tail_ & sq_mask_].tag;
  store(sq_tail_, tail_);
  return true;
}

bool Ring::reap(Completion &out) {
  if (!ready()) return false;
  out = cqes_[*cq_head_ & cq_mask_];
  store(cq_head_, *cq_head_ + 1);
  return true;
}

void Ring::wait_outside() {
  pollfd event = {fd_, POLLIN, 0};
  if (!ready()) poll(&event, 1, 20); // a time limit: the file may not be one that can be waited for
}

} // namespace offloadz
