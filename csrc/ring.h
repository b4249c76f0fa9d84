// One io_uring by raw system calls: the few structures of the kernel's interface that are used, and the two queues.
//
// Declared here and not taken from <linux/io_uring.h>, which the machine that builds a wheel may not have.
#pragma once
#include <cstdint>
#include <cstddef>

namespace offloadz {

struct Submission { // struct io_uring_sqe
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, rw_flags;
  uint64_t tag; // comes back with the completion
  uint16_t buffer_index, personality;
  int32_t splice_fd;
  uint64_t pad[2];
};

struct Completion { // struct io_uring_cqe
  uint64_t tag;
  int32_t result; // bytes, or a negative errno
  uint32_t flags;
};

static_assert(sizeof(Submission) == 64 && sizeof(Completion) == 16, "the kernel's layout");

struct Region { // struct iovec
  char *at;
  size_t num_bytes;
};

constexpr unsigned kMaxRegions = 64;

// Used by one thread at a time.  Every function answers 0 or an errno.
class Ring {
public:
  ~Ring(); // nothing may be under way
  int open(unsigned num_entries);
  // The file that calls are for, registered where that is allowed: they go on with it whatever becomes of the number.
  void use_file(int fd);
  // The fixed buffers, at most kMaxRegions: as much of them as the limit of locked memory allows, from the first on.
  void use_buffers(const Region *regions, unsigned count);
  unsigned seen_fixes = 0; // how many regions use_buffers() was last called with
  Ring *next = nullptr;    // of a list of the owner's

  // Queues one request; the caller keeps at most `num_entries` under way.
  void push(bool write, void *buffer, uint32_t length, int64_t offset, uint64_t tag);
  // Hands what is queued to the kernel; with `wait` there is a completion afterwards.
  int enter(bool wait);
  // The last queued request that the kernel has not taken, out of the queue again.
  bool take_back(uint64_t &tag);
  // The next completion, if there is one.
  bool reap(Completion &out);
  // Waits for a completion without the system call that submits (it may be forbidden by now).
  void wait_outside();

private:
  bool ready() const;
  bool fix_first(const Region *regions, size_t most_bytes);
  int fixed_index(const void *at, size_t num_bytes) const;
  int fd_ = -1;
  int file_ = -1;
  bool has_file_slot_ = false, file_in_slot_ = false;
  Region fixed_[kMaxRegions]; // as registered: of the last one maybe only its beginning
  unsigned num_fixed_ = 0;
  unsigned tail_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr;
  unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  Submission *sqes_ = nullptr;
  Completion *cqes_ = nullptr;
  void *queues_ = nullptr;
  size_t queues_bytes_ = 0, sqes_bytes_ = 0;
};

} // namespace offloadz
