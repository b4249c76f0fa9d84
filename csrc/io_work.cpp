// What both back ends do alike.  Short transfers are resumed; what makes no progress is an error, never a loop.
#include "io_work.h"
#include "crc32c.h"
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

namespace offloadz {
namespace {

constexpr int64_t kAlign = 4096;      // direct I/O moves whole blocks
constexpr int kMaxStalls = 8;         // tries in a row without a byte (or a block) of progress
constexpr int kMaxTries = 4096;       // system calls for one request; a block each would take 4096 of 16 MiB
constexpr int kMaxInterrupts = 10000; // EINTR in a row

int64_t entry_of(const unsigned char *buffer, int64_t count) {
  return count << 32 | int64_t(crc32c(buffer, size_t(count)));
}

bool check_piece(Work &work, const unsigned char *buffer, int64_t at, int64_t count, int64_t stored) {
  int64_t found = entry_of(buffer, count);
  if (found == stored) return true;
  int64_t piece = (at - work.transfer.origin) / kPieceBytes;
  return work.fail({2, 0, at, stored >> 32, count, piece, stored & 0xffffffff, found & 0xffffffff});
}

// Calls step(buffer, file offset, length, table entry, index) for each piece of a request.
template <class Step> bool each_piece(const Work &work, const Request &request, Step step) {
  for (int64_t done = 0, index = 0; done < request.count; done += kPieceBytes, ++index) {
    int64_t length = request.count - done < kPieceBytes ? request.count - done : kPieceBytes;
    int64_t &entry = work.transfer.table[(request.at + done - work.transfer.origin) / kPieceBytes];
    if (!step(request.buffer + done, request.at + done, length, entry, index)) return false;
  }
  return true;
}

} // namespace

Work::Work(const Transfer &given, int64_t bytes) : transfer(given), request_bytes(bytes) {
  int flags = fcntl(given.fd, F_GETFL);
  direct = flags >= 0 && (flags & O_DIRECT);
  if (flags < 0)
    fault = {1, errno, given.offset, given.num_bytes, 0, (given.offset - given.origin) / kPieceBytes, 0, 0};
}

bool Work::fail(const IoFault &found) {
  std::lock_guard<std::mutex> lock(mutex);
  if (fault.kind == 0 || (found.kind == fault.kind && found.offset < fault.offset)) fault = found;
  return false;
}

bool Work::fail(int error, const Request &request, int64_t moved) {
  return fail({1, error, request.at, request.count, moved, (request.at - transfer.origin) / kPieceBytes, 0, 0});
}

bool next_request(const Work &work, int64_t &at, int64_t limit, Request &out) {
  const Transfer &t = work.transfer;
  while (at < limit) {
    int64_t skip = at - t.origin, border = t.origin + (skip / work.request_bytes + 1) * work.request_bytes;
    int64_t end = border < limit ? border : limit;
    out.buffer = t.buffer + (at - t.offset);
    out.at = at;
    if (t.table && !t.write) {
      bool hole = t.table[skip / kPieceBytes] == kNeverWritten;
      int64_t stop = at + kPieceBytes;
      while (stop < end && (t.table[(stop - t.origin) / kPieceBytes] == kNeverWritten) == hole)
        stop += kPieceBytes;
      if (stop < end) end = stop;
      if (hole) {
        std::memset(out.buffer, 0, size_t(end - at));
        at = end;
        continue;
      }
    }
    out.count = end - at;
    at = end;
    return true;
  }
  return false;
}

void sum_request(const Work &work, Request &request) {
  if (!work.transfer.table || !work.transfer.write) return;
  each_piece(work, request, [&](unsigned char *from, int64_t, int64_t length, int64_t &, int64_t index) {
    request.sums[index] = entry_of(from, length);
    return true;
  });
}

bool end_request(Work &work, const Request &request) {
  if (!work.transfer.table) return true;
  bool write = work.transfer.write;
  return each_piece(work, request, [&](unsigned char *to, int64_t at, int64_t length, int64_t &entry, int64_t index) {
    if (!write) return check_piece(work, to, at, length, entry);
    entry = request.sums[index];
    return true;
  });
}

int move_rest(const Work &work, const Request &request, int64_t &moved) {
  int stalls = 0, interrupts = 0;
  const Transfer &t = work.transfer;
  // Direct I/O can only go on at a whole block, so the part of one that a short transfer moved is moved again.
  if (work.direct && moved < request.count) moved -= moved % kAlign;
  for (int tries = 0; moved < request.count; ++tries) {
    if (tries >= kMaxTries || stalls >= kMaxStalls) return EIO;
    size_t left = size_t(request.count - moved);
    ssize_t got = t.write ? pwrite64(t.fd, request.buffer + moved, left, request.at + moved)
                          : pread64(t.fd, request.buffer + moved, left, request.at + moved);
    if (got < 0 && errno == EINTR && ++interrupts < kMaxInterrupts) {
      --tries;
      continue;
    }
    if (got < 0) return errno;
    if (got > int64_t(left)) return EIO;
    interrupts = 0;
    if (got == 0 && !t.write) return ENODATA; // the file ends here
    if (work.direct && got < int64_t(left)) got -= got % kAlign;
    stalls = got == 0 ? stalls + 1 : 0;
    moved += got;
  }
  return 0;
}

bool plain_request(Work &work, Request &request) {
  sum_request(work, request);
  int64_t moved = 0;
  int error = move_rest(work, request, moved);
  return error ? work.fail(error, request, moved) : end_request(work, request);
}

} // namespace offloadz
