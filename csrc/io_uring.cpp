// The back end by io_uring: each caller has a ring of its own, keeps a few requests under way on it, and takes the sums
// beside them, with one thread of ours to help.
//
// [Note: going on without a ring] What the system refuses at any time (a ring, a call on it, a request) is done by
// plain calls: what the kernel has not taken is taken back, what it has is waited for, and from then on this back end
// is a team of threads.  A request that failed or fell short is finished by plain calls too, so both back ends resume
// and report alike.
//
// [Note: sums beside the drive] What is read is summed once it is there.  What is written is summed while it is under
// way: the buffer is the caller's and stays as it is until run() returns, and no drive waits for a sum.  Such a request
// ends, and its entries are stored, when it is both moved and summed.
//
// [Note: the end of a read] Of what a read has left, at most three quarters are under way.  A drive behind a hypervisor
// may answer only once its queue is empty, so everything under way comes at once; the sums of such a batch run beside
// the next one, and the last, with nothing beside it, is one request instead of a whole queue.
//
// [Note: sums on two cores] A computation that all cores share ends with its slowest thread, so a core that sums for a
// millisecond costs it a millisecond, and two that sum for half of one cost half.
#include "io_work.h"
#include "pool.h"
#include "ring.h"
#include <atomic>
#include <cerrno>
#include <new>
#include <unistd.h>

namespace offloadz {
namespace {

constexpr int kMaxDepth = 64;
constexpr int kMaxBusy = 100;                    // in one transfer
constexpr int kTogether = 2;                     // requests summed between two looks at what came
constexpr size_t kRegionBytes = size_t(1) << 30; // the most that one fixed buffer may be
enum Stage { kNone = 0, kSetup = 1, kCall = 2, kRequest = 3 };

// Errors that say "not like this" rather than "the drive failed".
bool is_refusal(int error) {
  return error == EINVAL || error == EOPNOTSUPP || error == ENOSYS || error == EPERM || error == EACCES ||
         error == ENOMEM || error == EBADF || error == EFAULT;
}

// Requests to be summed by halves.
struct Sums {
  Request *requests[kTogether];
  int64_t count = 0;

  static bool half(void *self, int64_t index) {
    Request &request = *static_cast<Sums *>(self)->requests[index / 2];
    const int64_t all = request.num_pieces(), middle = all / 2;
    sum_pieces(request, index % 2 ? middle : 0, index % 2 ? all : middle);
    return true;
  }
};

// One transfer on one ring.
class Flight {
public:
  Flight(Ring &ring, Work &work, int depth, Pool &summing)
      : ring_(ring), work_(work), summing_(summing), sums_aside_(work.transfer.write && work.transfer.table),
        depth_(depth), at_(work.transfer.offset) {
    for (int i = 0; i < 2 * depth; ++i)
      free_[num_free_++] = i;
  }

  // Everything is done, or a fault is noted, or the ring was refused and what begins at rest() has to go another way.
  void run() {
    for (;;) {
      fill();
      if (!num_flying_ && !num_due_) return;
      if (stage_ == kNone) {
        int error = ring_.enter(!num_due_);
        if (error) give_up(error);
      } else if (!num_due_) {
        ring_.wait_outside();
      }
      if (!reap() && num_due_) sum();
    }
  }

  int64_t rest() const { return at_; }
  int stage() const { return stage_; }
  int error() const { return error_; }

private:
  bool wants_more() const {
    return stage_ == kNone && !work_.fault.kind && num_flying_ < depth_ && num_free_ && (!num_flying_ || !ends_soon());
  }

  // See [Note: the end of a read].
  bool ends_soon() const {
    const Transfer &t = work_.transfer;
    return t.table && !t.write && (num_flying_ + 4) * work_.request_bytes > 3 * (work_.end() - at_);
  }

  // Queues as many requests as there may be, so that the drive has them before anything is summed.
  void fill() {
    while (wants_more()) {
      int slot = free_[num_free_ - 1];
      Request &request = slots_[slot];
      if (!next_request(work_, at_, work_.end(), request)) return;
      --num_free_;
      ++num_flying_;
      left_[slot] = 1 + sums_aside_;
      if (sums_aside_) due_[num_due_++] = slot;
      ring_.push(work_.transfer.write, request.buffer, uint32_t(request.count), request.at, uint64_t(slot));
    }
  }

  void refused(int stage, int error) {
    if (stage_ == kNone) stage_ = stage, error_ = error;
  }

  void give_up(int error) {
    uint64_t slot;
    bool taken = false;
    while (ring_.take_back(slot)) {
      settle(int(slot), 0);
      taken = true;
    }
    // A full queue or a moment without memory is no reason to leave, unless it is always so.
    if ((error != EAGAIN && error != EBUSY) || ++num_busy_ > kMaxBusy)
      refused(kCall, error);
    else if (!taken)
      ring_.wait_outside();
  }

  // Whether anything came.
  bool reap() {
    Completion done;
    bool came = false;
    for (; ring_.reap(done); came = true) {
      const Request &request = slots_[done.tag];
      int64_t moved = done.result > 0 ? done.result : 0;
      int error = done.result < 0 ? -done.result : 0;
      bool moved_here = moved < request.count && settle(int(done.tag), moved);
      if (moved_here && is_refusal(error)) refused(kRequest, error);
      if (moved >= request.count) {
        --num_flying_;
        arrived(int(done.tag));
      }
    }
    return came;
  }

  // Ends a request by plain calls.  The slot of one that failed stays taken: nothing is begun after a fault.
  bool settle(int slot, int64_t moved) {
    --num_flying_;
    int error = move_rest(work_, slots_[slot], moved);
    if (error) return work_.fail(error, slots_[slot], moved);
    arrived(slot);
    return true;
  }

  void arrived(int slot) {
    if (sums_aside_ || !work_.transfer.table)
      finish(slot);
    else
      due_[num_due_++] = slot;
  }

  // See [Note: sums on two cores].
  void sum() {
    const int from = num_due_ < kTogether ? 0 : num_due_ - kTogether, before = num_due_;
    Sums sums;
    while (num_due_ > from)
      sums.requests[sums.count++] = &slots_[due_[--num_due_]];
    Job job{Sums::half, &sums, 2 * sums.count, 2};
    summing_.run(job, true);
    for (int i = from; i < before; ++i)
      finish(due_[i]);
  }

  void finish(int slot) {
    if (--left_[slot]) return;
    end_request(work_, slots_[slot]);
    free_[num_free_++] = slot;
  }

  Ring &ring_;
  Work &work_;
  Pool &summing_;
  const bool sums_aside_; // see [Note: sums beside the drive]
  int num_busy_ = 0;
  int depth_, num_flying_ = 0, num_due_ = 0, num_free_ = 0;
  int64_t at_;
  int stage_ = kNone, error_ = 0;
  Request slots_[2 * kMaxDepth];
  int left_[2 * kMaxDepth];                      // how often finish() is called before a request ends
  int free_[2 * kMaxDepth], due_[2 * kMaxDepth]; // due: to be summed, the one that came last is the next
};

class Rings final : public Mover {
public:
  Rings(int depth, int num_threads, int64_t request_bytes)
      : depth_(depth < kMaxDepth ? depth : kMaxDepth), num_threads_(num_threads), request_bytes_(request_bytes) {}

  ~Rings() override { drop_idle(); }

  // The first ring, so that a refusal is known before the first transfer.
  bool start(int &error) {
    idle_ = open_ring(error);
    return idle_;
  }

  int fix(void *at, int64_t num_bytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    char *next = static_cast<char *>(at);
    for (size_t left = size_t(num_bytes); left;) {
      if (num_regions_ >= kMaxRegions) return ENOSPC;
      size_t part = left < kRegionBytes ? left : kRegionBytes;
      regions_[num_regions_++] = {next, part};
      next += part, left -= part;
    }
    return 0;
  }

  int fallen() const override { return fell_; }

  IoFault run(const Transfer &transfer) override {
    if (owner_ != getpid()) return {3, ECHILD, transfer.offset, transfer.num_bytes, 0, 0, 0, 0};
    Work work(transfer, request_bytes_);
    if (work.fault.kind || transfer.num_bytes <= 0) return work.fault;
    Ring *ring = take();
    if (!ring) return by_threads(transfer);
    int64_t rest = fly(*ring, work);
    give(ring);
    if (work.fault.kind || rest >= work.end()) return work.fault;
    Transfer left = transfer;
    left.buffer += rest - transfer.offset;
    left.num_bytes -= rest - transfer.offset;
    left.offset = rest;
    return by_threads(left);
  }

private:
  int64_t fly(Ring &ring, Work &work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ring.seen_fixes != num_regions_) ring.use_buffers(regions_, num_regions_);
      ring.seen_fixes = num_regions_;
    }
    ring.use_file(work.transfer.fd);
    summing_.grow(1);
    Flight flight(ring, work, depth_, summing_);
    flight.run();
    ring.use_file(-1);
    if (flight.stage()) refuse(flight.stage(), flight.error());
    return flight.rest();
  }

  void refuse(int stage, int error) {
    int stands = 0;
    fell_.compare_exchange_strong(stands, stage << 16 | error); // the first refusal is told
  }

  Ring *open_ring(int &error) {
    Ring *ring = new (std::nothrow) Ring;
    error = ring ? ring->open(unsigned(depth_)) : ENOMEM;
    if (!error) return ring;
    delete ring;
    return nullptr;
  }

  // A ring for one call; null once the back end has fallen.
  Ring *take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (fell_) return nullptr;
      Ring *ring = idle_;
      if (ring) {
        idle_ = ring->next;
        return ring;
      }
    }
    int error = 0;
    Ring *ring = open_ring(error);
    if (!ring) refuse(kSetup, error);
    return ring;
  }

  void give(Ring *ring) {
    std::lock_guard<std::mutex> lock(mutex_);
    ring->next = idle_;
    idle_ = ring;
    if (fell_) drop_idle();
  }

  void drop_idle() {
    while (Ring *ring = idle_) {
      idle_ = ring->next;
      delete ring;
    }
  }

  IoFault by_threads(const Transfer &transfer) {
    bool alone = pool_.grow(num_threads_) == 0; // not even a thread: then this one
    return run_by_threads(pool_, transfer, request_bytes_, alone);
  }

  const int depth_, num_threads_;
  const int64_t request_bytes_;
  const pid_t owner_ = getpid();
  std::mutex mutex_;
  Ring *idle_ = nullptr; // a list
  Region regions_[kMaxRegions];
  unsigned num_regions_ = 0;
  std::atomic<int> fell_{0}; // what fallen() answers, in one word: a refusal is never read by halves
  Pool pool_;
  Pool summing_{0, true}; // one thread, which helps all callers
};

} // namespace

Mover *start_ring(int depth, int num_threads, int64_t request_bytes, int &error) {
  Rings *made = new (std::nothrow) Rings(depth, num_threads, request_bytes);
  error = ENOMEM;
  if (made && made->start(error)) return made;
  delete made;
  return nullptr;
}

} // namespace offloadz
