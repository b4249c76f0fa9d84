// Transfers between memory and a file: what a back end is given and what it answers.
#pragma once
#include <cstdint>

namespace offloadz {

constexpr int64_t kPieceBytes = 1 << 20;           // one checksum each
constexpr int64_t kRequestBytes = 4 * kPieceBytes; // one system call each
constexpr int64_t kNeverWritten = -1;              // table entry of a piece that reads as zeros

// What went wrong first.  kind: 0 nothing, 1 the system call failed, 2 a piece is not what was written, 3 the threads
// do not exist in this process (it is a fork).
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

class Pool;

// Returns when no request of this transfer runs any more.  Any number of threads may call it on one pool.
IoFault run_transfer(Pool &pool, const Transfer &transfer);

} // namespace offloadz
