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

bool damaged(Work &work, int64_t at, int64_t piece, int64_t stored, int64_t found) {
  return work.fail({2, 0, at, stored >> 32, found >> 32, piece, stored & 0xffffffff, found & 0xffffffff});
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

void sum_pieces(Request &request, int64_t first, int64_t last) {
  for (int64_t piece = first; piece < last; ++piece) {
    int64_t done = piece * kPieceBytes, left = request.count - done, length = left < kPieceBytes ? left : kPieceBytes;
    request.sums[piece] = length << 32 | int64_t(crc32c(request.buffer + done, size_t(length)));
  }
}

bool end_request(Work &work, const Request &request) {
  const Transfer &t = work.transfer;
  if (!t.table) return true;
  const int64_t first = (request.at - t.origin) / kPieceBytes;
  for (int64_t piece = 0; piece < request.num_pieces(); ++piece) {
    int64_t &entry = t.table[first + piece];
    if (t.write)
      entry = request.sums[piece];
    else if (entry != request.sums[piece])
      return damaged(work, request.at + piece * kPieceBytes, first + piece, entry, request.sums[piece]);
  }
  return true;
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
  int64_t moved = 0;
  int error = move_rest(work, request, moved);
  if (error) return work.fail(error, request, moved);
  if (work.transfer.table) sum_pieces(request, 0, request.num_pieces());
  return end_request(work, request);
}

} // namespace offloadz
