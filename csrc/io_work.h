// What both back ends do alike: a transfer cut into requests, their checksums, and the plain calls that finish what a
// request left undone.
#pragma once
#include "io.h"
#include <mutex>

namespace offloadz {

class Pool;

// A run of whole pieces inside one request's bounds, and the sum of each.
struct Request {
  unsigned char *buffer;
  int64_t at;
  int64_t count;
  int64_t sums[kMaxRequestBytes / kPieceBytes];

  int64_t num_pieces() const { return (count + kPieceBytes - 1) / kPieceBytes; }
};

struct Work {
  Transfer transfer;
  int64_t request_bytes;
  bool direct = false;
  std::mutex mutex = {};
  IoFault fault = {};

  Work(const Transfer &transfer, int64_t request_bytes);
  int64_t end() const { return transfer.offset + transfer.num_bytes; }
  // Keeps the first fault of the lowest offset; always false.
  bool fail(const IoFault &found);
  bool fail(int error, const Request &request, int64_t moved);
};

// The next request at or after `at`, below `limit`: it ends at a border of requests (counted from the extent's start)
// or before a piece never written; such pieces are filled with zeros on the way.  Moves `at` on; false at the limit.
bool next_request(const Work &work, int64_t &at, int64_t limit, Request &out);

// Takes the sums of a request's pieces from `first` to below `last`: of a write at any time before its end, of a read
// once it is moved.
void sum_pieces(Request &request, int64_t first, int64_t last);
// Once a request is moved and summed: compares (reads), or stores its sums (writes: an entry never speaks of bytes that
// were not written); false where a piece is not what was written, which is noted.
bool end_request(Work &work, const Request &request);

// Moves the rest of a request, of which `moved` bytes are done, by pread64 or pwrite64; 0 or an errno.
int move_rest(const Work &work, const Request &request, int64_t &moved);

// A whole request by plain calls, with its checksums; false after a failure, which is noted.
bool plain_request(Work &work, Request &request);

// The whole transfer by the threads of a pool (or, with `help`, by this thread too).
IoFault run_by_threads(Pool &pool, const Transfer &transfer, int64_t request_bytes, bool help);

} // namespace offloadz
