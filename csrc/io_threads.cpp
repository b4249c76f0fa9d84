// The back end that works everywhere: a team of threads that call pread64 and pwrite64.
//
// A transfer is cut into requests at whole pieces of its extent, so that the thread that moved a piece also sums it
// while it is in the cache.
#include "io_work.h"
#include "pool.h"
#include <cerrno>
#include <new>

namespace offloadz {
namespace {

// Request `index` of a transfer; a read may leave pieces out, so it can be several calls.
bool one_request(void *arg, int64_t index) {
  Work &work = *static_cast<Work *>(arg);
  const Transfer &t = work.transfer;
  int64_t skip = t.offset - t.origin;
  int64_t at = t.origin + (skip / work.request_bytes + index) * work.request_bytes, limit = at + work.request_bytes;
  if (at < t.offset) at = t.offset;
  if (limit > work.end()) limit = work.end();
  Request request;
  while (next_request(work, at, limit, request))
    if (!plain_request(work, request)) return false;
  return true;
}

class Threads final : public Mover {
public:
  explicit Threads(int64_t request_bytes) : request_bytes_(request_bytes) {}
  bool start(int num_threads) { return pool_.grow(num_threads) > 0; }
  IoFault run(const Transfer &transfer) override { return run_by_threads(pool_, transfer, request_bytes_, false); }
  int fix(void *, int64_t) override { return EOPNOTSUPP; }
  int fallen() const override { return 0; }

private:
  Pool pool_;
  int64_t request_bytes_;
};

} // namespace

IoFault run_by_threads(Pool &pool, const Transfer &transfer, int64_t request_bytes, bool help) {
  Work work(transfer, request_bytes);
  if (work.fault.kind) return work.fault;
  int64_t skip = transfer.offset - transfer.origin, first = skip - skip % request_bytes;
  int64_t num_requests = (skip + transfer.num_bytes - first + request_bytes - 1) / request_bytes;
  Job job{one_request, &work, transfer.num_bytes > 0 ? num_requests : 0, kMaxThreads};
  if (!pool.run(job, help)) return {3, ECHILD, transfer.offset, transfer.num_bytes, 0, 0, 0, 0};
  return work.fault;
}

Mover *start_threads(int num_threads, int64_t request_bytes, int &error) {
  Threads *made = new (std::nothrow) Threads(request_bytes);
  if (made && made->start(num_threads)) return made;
  delete made;
  error = EAGAIN;
  return nullptr;
}

} // namespace offloadz
