// Transfers between memory and a file: what a back end is given and what it answers.
#pragma once
#include <cstdint>

namespace offloadz {

constexpr int64_t kPieceBytes = 1 << 20;               // one checksum each
constexpr int64_t kMaxRequestBytes = 16 * kPieceBytes; // one system call moves at most this much
constexpr int64_t kNeverWritten = -1;                  // table entry of a piece that reads as zeros

// What went wrong first.  kind: 0 nothing, 1 the system call failed, 2 a piece is not what was written, 3 the back end
// does not exist in this process (it is a fork).
struct IoFault {
  int32_t kind;
  int32_t error;        // errno
  int64_t offset;       // where in the file
  int64_t wanted_bytes; // of the request (kind 1) or the length stored for the piece (kind 2)
  int64_t found_bytes;
  int64_t piece; // index in the table
  int64_t wanted_crc;
  int64_t found_crc;
};

// One blocking transfer of `num_bytes` at `offset`.  `origin` is where the extent starts; `table` (may be null) has an
// entry for each piece of the extent: length << 32 | CRC32C, or kNeverWritten.  With a table the transfer begins at a
// piece.
struct Transfer {
  int fd;
  bool write;
  unsigned char *buffer;
  int64_t num_bytes;
  int64_t offset;
  int64_t origin;
  int64_t *table;
};

// A back end.  Any number of threads may call run() on one at a time.
class Mover {
public:
  virtual ~Mover() = default; // no call may be in run() any more
  // Returns when no request of this transfer is under way any more.
  virtual IoFault run(const Transfer &transfer) = 0;
  // Memory that transfers will use and that stays where it is as long as the back end lives; 0, or an errno that costs
  // nothing but the gain.
  virtual int fix(void *at, int64_t num_bytes) = 0;
  // Why this back end goes on as threads: 0 it does not, else stage << 16 | the errno, where the system refused a ring
  // (stage 1), a call on it (2) or a request (3).
  virtual int fallen() const = 0;
};

// Both are null with `error` set where the system refuses.  Requests are `request_bytes` long, a multiple of a piece.
Mover *start_threads(int num_threads, int64_t request_bytes, int &error);
// `depth` requests under way per caller; `num_threads` only where it has to go on without a ring.
Mover *start_ring(int depth, int num_threads, int64_t request_bytes, int &error);

} // namespace offloadz
