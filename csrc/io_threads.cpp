// The back end that works everywhere: a team of threads that call pread64 and pwrite64.
//
// A transfer is cut into requests at whole pieces of its extent, so that the thread that moved a piece also sums it
// while it is in the cache.  Short transfers are resumed; what makes no progress is an error, never a loop.
#include "io.h"
#include "crc32c.h"
#include "pool.h"
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <unistd.h>

namespace offloadz {
namespace {

constexpr int64_t kAlign = 4096;      // direct I/O moves whole blocks
constexpr int kMaxStalls = 8;         // tries in a row without a byte (or a block) of progress
constexpr int kMaxTries = 4096;       // system calls for one request; a block each would take 1024
constexpr int kMaxInterrupts = 10000; // EINTR in a row

struct Work {
  Transfer transfer;
  int64_t first; // bytes of the extent before the request that holds the transfer's start
  bool direct;
  std::mutex mutex;
  IoFault fault = {};

  bool fail(const IoFault &found) {
    std::lock_guard<std::mutex> lock(mutex);
    if (fault.kind == 0 || (found.kind == fault.kind && found.offset < fault.offset)) fault = found;
    return false;
  }
};

// Moves [at, at + count) of the file; 0 or an errno, with the bytes moved in `moved`.
int move(const Work &work, unsigned char *buffer, int64_t at, int64_t count, int64_t &moved) {
  int stalls = 0, interrupts = 0;
  moved = 0;
  for (int tries = 0; moved < count; ++tries) {
    if (tries >= kMaxTries || stalls >= kMaxStalls) return EIO;
    size_t left = size_t(count - moved);
    ssize_t got = work.transfer.write ? pwrite64(work.transfer.fd, buffer + moved, left, at + moved)
                                      : pread64(work.transfer.fd, buffer + moved, left, at + moved);
    if (got < 0 && errno == EINTR && ++interrupts < kMaxInterrupts) {
      --tries;
      continue;
    }
    if (got < 0) return errno;
    if (got > int64_t(left)) return EIO;
    interrupts = 0;
    if (got == 0 && !work.transfer.write) return ENODATA; // the file ends here
    // Direct I/O can only go on at a whole block, so the part of one that a short transfer moved is moved again.
    if (work.direct && got < int64_t(left)) got -= got % kAlign;
    stalls = got == 0 ? stalls + 1 : 0;
    moved += got;
  }
  return 0;
}

bool transfer_run(Work &work, unsigned char *buffer, int64_t at, int64_t count) {
  int64_t moved = 0;
  int error = move(work, buffer, at, count, moved);
  if (error == 0) return true;
  return work.fail({1, error, at, count, moved, (at - work.transfer.origin) / kPieceBytes, 0, 0});
}

int64_t entry_of(const unsigned char *buffer, int64_t count) {
  return count << 32 | int64_t(crc32c(buffer, size_t(count)));
}

bool check_piece(Work &work, const unsigned char *buffer, int64_t at, int64_t count, int64_t stored) {
  int64_t found = entry_of(buffer, count);
  if (found == stored) return true;
  int64_t piece = (at - work.transfer.origin) / kPieceBytes;
  return work.fail({2, 0, at, stored >> 32, count, piece, stored & 0xffffffff, found & 0xffffffff});
}

// Calls step(buffer, file offset, length, table entry) for each piece of [at, at + count).
template <class Step> bool each_piece(Work &work, unsigned char *buffer, int64_t at, int64_t count, Step step) {
  for (int64_t done = 0; done < count; done += kPieceBytes) {
    int64_t length = count - done < kPieceBytes ? count - done : kPieceBytes;
    int64_t &entry = work.transfer.table[(at + done - work.transfer.origin) / kPieceBytes];
    if (!step(buffer + done, at + done, length, entry)) return false;
  }
  return true;
}

bool write_request(Work &work, unsigned char *buffer, int64_t at, int64_t count) {
  if (!work.transfer.table) return transfer_run(work, buffer, at, count);
  // The sums are taken before the write and stored after it: an entry never speaks of bytes that were not written.
  int64_t sums[kRequestBytes / kPieceBytes];
  int64_t *next = sums;
  each_piece(work, buffer, at, count, [&](unsigned char *from, int64_t, int64_t length, int64_t &) {
    *next++ = entry_of(from, length);
    return true;
  });
  if (!transfer_run(work, buffer, at, count)) return false;
  next = sums;
  return each_piece(work, buffer, at, count, [&](unsigned char *, int64_t, int64_t, int64_t &entry) {
    entry = *next++;
    return true;
  });
}

bool read_request(Work &work, unsigned char *buffer, int64_t at, int64_t count) {
  if (!work.transfer.table) return transfer_run(work, buffer, at, count);
  int64_t num_written = 0, num_pieces = 0;
  each_piece(work, buffer, at, count, [&](unsigned char *, int64_t, int64_t, int64_t &entry) {
    num_written += entry != kNeverWritten;
    ++num_pieces;
    return true;
  });
  bool whole = num_written == num_pieces; // the common case: one call for the whole request
  if (whole && !transfer_run(work, buffer, at, count)) return false;
  return each_piece(work, buffer, at, count, [&](unsigned char *to, int64_t from, int64_t length, int64_t &entry) {
    if (entry == kNeverWritten) {
      std::memset(to, 0, size_t(length));
      return true;
    }
    return (whole || transfer_run(work, to, from, length)) && check_piece(work, to, from, length, entry);
  });
}

bool request(void *arg, int64_t index) {
  Work &work = *static_cast<Work *>(arg);
  const Transfer &t = work.transfer;
  int64_t begin = t.origin + work.first + index * kRequestBytes, end = begin + kRequestBytes;
  if (begin < t.offset) begin = t.offset;
  if (end > t.offset + t.num_bytes) end = t.offset + t.num_bytes;
  return (t.write ? write_request : read_request)(work, t.buffer + (begin - t.offset), begin, end - begin);
}

} // namespace

IoFault run_transfer(Pool &pool, const Transfer &transfer) {
  Work work;
  work.transfer = transfer;
  int64_t skip = transfer.offset - transfer.origin;
  work.first = skip - skip % kRequestBytes;
  int flags = fcntl(transfer.fd, F_GETFL);
  if (flags < 0) return {1, errno, transfer.offset, transfer.num_bytes, 0, skip / kPieceBytes, 0, 0};
  work.direct = flags & O_DIRECT;
  int64_t num_requests = (skip + transfer.num_bytes - work.first + kRequestBytes - 1) / kRequestBytes;
  Job job{request, &work, transfer.num_bytes > 0 ? num_requests : 0, kMaxThreads};
  if (!pool.run(job, false)) return {3, ECHILD, transfer.offset, transfer.num_bytes, 0, 0, 0, 0};
  return work.fault;
}

} // namespace offloadz
