// Drives a build of the native library for ThreadSanitizer from many threads at once:
//
//   races DIR JOB [seeded]
//
//   update    callers share the team, with every storage format and every instruction set
//   forks     children of a process whose team is at work update alone, and never wait for it
//   threads   transfers by the back end of threads: round trips, faults, and a stop while calls are under way
//   rings     the same by io_uring, while memory is fixed
//   refusal   io_uring refuses a further ring while others are in flight: the rest goes on by threads
//
// What comes out is compared too: with what one thread makes of the same numbers, with what was written.  `seeded`
// breaks the one rule that callers have, two calls at once on the same memory: that must be reported.  Exit status: 66
// a race (ThreadSanitizer's own), 2 a wrong result, 77 there is no io_uring here.
#include "../../csrc/io.h"
#include "../../csrc/kernels.h"
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace offloadz;

extern "C" {
int oz_select_isa(const char *name);
void oz_update(UpdateArgs *const *spans, int64_t num_spans, int num_threads);
void *oz_io_start(int num_threads, int64_t request_bytes);
void *oz_ring_start(int depth, int num_threads, int64_t request_bytes);
void oz_io_stop(void *mover);
int oz_io_fix(void *mover, void *at, int64_t num_bytes);
int oz_io_fallen(void *mover);
int oz_io_run(void *mover, int fd, int write, void *buffer, int64_t num_bytes, int64_t offset, int64_t origin,
              int64_t *table, IoFault *fault);
}

namespace {

constexpr int kCallers = 4;

void need(bool ok, const char *what) {
  if (ok) return;
  std::fprintf(stderr, "races: %s\n", what);
  std::_Exit(2);
}

// body(0) to body(count - 1), each on a thread of its own.
template <class Body> void side_by_side(int count, Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back(body, i);
  for (std::thread &thread : threads)
    thread.join();
}

// ---- Updates ----

struct Format {
  WeightFormat weight;
  MomentFormat moment;
  bool bf16_grads;
};

constexpr Format kFormats[] = {{kWhole, kFp32, false},
                               {kSplit, kFp32, true},
                               {kSplit, kBf16, true},
                               {kSplit, kCodes, true},
                               {kAlone, kCodes, true}};
constexpr int64_t kCount = 5 * 32768 + 777; // elements: some tiles, and an odd end
constexpr int kSteps = 4;
constexpr int kForks = 60;

// The state of one span, with room for the widest format.
struct State {
  std::vector<uint8_t> weight, moments[2];
  std::vector<uint16_t> low;
  std::vector<float> scales[2];

  State() : weight(4 * kCount), low(kCount) {
    for (int i = 0; i < 2; ++i) {
      moments[i].resize(4 * kCount);
      scales[i].resize((kCount + kQuant - 1) / kQuant);
    }
  }

  bool operator==(const State &other) const {
    return weight == other.weight && low == other.low && moments[0] == other.moments[0] &&
           moments[1] == other.moments[1] && scales[0] == other.scales[0] && scales[1] == other.scales[1];
  }

  void update(const Format &format, const void *grad, int64_t step, int num_threads) {
    // In two spans of one call, or in one: the bits are the same.
    constexpr int64_t kCut = 33000 / kQuant * kQuant;
    UpdateArgs first = span(format, grad, step, 0, num_threads > 2 ? kCut : kCount);
    UpdateArgs rest = span(format, grad, step, first.count, kCount);
    UpdateArgs *const spans[] = {&rest, &first};
    oz_update(spans, 2, num_threads);
  }

  // The elements [begin, end).
  UpdateArgs span(const Format &format, const void *grad, int64_t step, int64_t begin, int64_t end) {
    UpdateArgs a = {};
    a.weight = weight.data() + begin * (format.weight == kWhole ? 4 : 2);
    a.low = low.data() + begin;
    for (int i = 0; i < 2; ++i) {
      a.moments[i] = moments[i].data() + begin * (format.moment == kFp32 ? 4 : format.moment == kBf16 ? 2 : 1);
      a.scales[i] = scales[i].data() + begin / kQuant;
    }
    a.grad = static_cast<const uint8_t *>(grad) + begin * (format.bf16_grads ? 2 : 4);
    a.count = end - begin;
    a.first_element = uint32_t(begin);
    a.seed = 7, a.step = step;
    a.rule = kAdam;
    a.weight_format = format.weight;
    a.moment_format = format.moment;
    a.num_moments = 2;
    a.grad_is_bf16 = format.bf16_grads;
    a.decoupled = 1;
    a.grad_scale = 0.5f;
    a.keep = 0.999f;
    a.beta1 = 0.9f, a.one_minus_beta1 = 0.1f;
    a.beta2 = 0.99f, a.one_minus_beta2 = 0.01f;
    a.inverse_root2 = 1.0f, a.eps = 1e-8f;
    a.minus_step_size = -0.01f;
    a.into_first = 0.05f, a.into_second = 0.05f;
    a.root_eps = 1e-8f, a.root_step = -0.01f;
    return a;
  }
};

// Numbers around one of both signs, as float32 or bfloat16.
std::vector<uint32_t> gradients(bool bf16) {
  std::vector<uint32_t> out(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    uint32_t bits = 0x3f000000u | (uint32_t(i) * 2654435761u & 0x80ff0000u);
    out[i] = bf16 ? bits | bits >> 16 : bits;
  }
  return out;
}

void update_job(const char *isa, const Format &format, bool seeded) {
  const std::vector<uint32_t> grad = gradients(format.bf16_grads);
  State alone, shared;
  for (int step = 1; step <= kSteps; ++step)
    alone.update(format, grad.data(), step, 1);
  side_by_side(kCallers, [&](int caller) {
    State own;
    State &state = seeded ? shared : own;
    for (int step = 1; step <= kSteps; ++step)
      state.update(format, grad.data(), step, 1 + (caller + step) % 4); // the team grows under way
    need(seeded || state == alone, isa);
  });
}

void updates(bool seeded) {
  for (const char *isa : {"baseline", "avx2", "avx512"})
    if (oz_select_isa(isa) == 0)
      for (const Format &format : kFormats)
        update_job(isa, format, seeded);
}

// A fork may be made while a thread of the team holds its mutex; there that thread does not exist.
void forks() {
  const std::vector<uint32_t> grad = gradients(true);
  State alone;
  alone.update(kFormats[3], grad.data(), 1, 3); // from here on there is a team
  std::atomic<bool> over{false};
  std::thread parent([&] {
    side_by_side(kCallers, [&](int) {
      for (State own; !over;)
        own.update(kFormats[3], grad.data(), 1, 3);
    });
  });
  for (int i = 0; i < kForks; ++i) {
    State own;
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      own.update(kFormats[3], grad.data(), 1, 3);
      _exit(own == alone ? 0 : 1);
    }
    int status = -1;
    need(waitpid(child, &status, 0) == child && status == 0, "a fork waited for the team, or was wrong");
  }
  over = true;
  parent.join();
}

// ---- Transfers ----

constexpr int64_t kBytes = 6 * kPieceBytes + 4096; // of an extent: seven requests of a piece, the last one short
constexpr int64_t kPieces = 7;
constexpr int64_t kOrigin = 8192;

// An extent in a file of its own, its table, and memory to write from and to read into.
struct Extent {
  int fd, closed_to_writes;
  std::vector<unsigned char> bytes, back;
  std::vector<int64_t> table;
  IoFault fault = {};

  Extent(const std::string &directory, int number) : bytes(kBytes), back(kBytes), table(kPieces, kNeverWritten) {
    const std::string path = directory + "/extent" + std::to_string(number);
    fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    closed_to_writes = open(path.c_str(), O_RDONLY);
    need(fd >= 0 && closed_to_writes >= 0, "no file could be opened");
  }
  ~Extent() {
    close(fd);
    close(closed_to_writes);
  }

  // Pieces [first, last), the extent's end at most; the kind of the fault.
  int move(void *mover, bool write, int64_t first = 0, int64_t last = kPieces) {
    const int64_t begin = first * kPieceBytes, end = std::min(last * kPieceBytes, kBytes);
    unsigned char *at = (write ? bytes : back).data() + begin;
    return oz_io_run(mover, fd, write, at, end - begin, kOrigin + begin, kOrigin, table.data(), &fault);
  }

  void fill(int value) {
    for (int64_t i = 0; i < kBytes; i += 512)
      std::memset(&bytes[size_t(i)], value + int(i / 512 + i / kPieceBytes), 512);
  }
  void read_back(void *mover) {
    std::fill(back.begin(), back.end(), 0);
    need(move(mover, false) == 0 && back == bytes, "what was written is not what was read");
  }
  void round_trip(void *mover, int value) {
    fill(value);
    need(move(mover, true) == 0, "a write failed");
    read_back(mover);
  }
};

using Extents = std::vector<std::unique_ptr<Extent>>;

Extents extents(const std::string &directory) {
  Extents out;
  for (int i = 0; i < kCallers; ++i)
    out.push_back(std::make_unique<Extent>(directory, i));
  return out;
}

// Every kind of fault, found by several threads of one transfer.
void faults(void *mover, Extent &own) {
  own.round_trip(mover, 1);
  for (int64_t piece = 0; piece < kPieces; ++piece)
    need(pwrite(own.fd, "x", 1, kOrigin + piece * kPieceBytes + 5) == 1, "no byte could be changed");
  need(own.move(mover, false) == 2, "changed pieces were not found");
  need(ftruncate(own.fd, kOrigin + kPieceBytes / 2) == 0, "a file could not be cut");
  need(own.move(mover, false) == 1 && own.fault.error == ENODATA, "the end of the file was not found");
  std::swap(own.fd, own.closed_to_writes);
  need(own.move(mover, true) == 1 && own.fault.error == EBADF, "a file open for reading was written");
  std::swap(own.fd, own.closed_to_writes);
  own.round_trip(mover, 2);
}

void transfers(void *mover, const std::string &directory, bool seeded) {
  const Extents all = extents(directory);
  Extent &shared = *all[0];
  shared.fill(3);
  side_by_side(kCallers, [&](int caller) { // parts of one extent, with one table
    need(shared.move(mover, true, seeded ? 0 : caller * 2, seeded ? kPieces : caller * 2 + 2) == 0, "a part failed");
  });
  shared.read_back(mover);
  side_by_side(kCallers, [&](int caller) {
    Extent &own = *all[caller];
    for (int round = 0; round < 3; ++round) {
      oz_io_fix(mover, own.back.data(), kBytes); // grows the list while others fly
      own.round_trip(mover, caller + round);
      need(oz_io_fallen(mover) == 0, "the back end fell");
    }
    faults(mover, own);
  });
}

// The rule of TransferPool in runtime/native_io.py: no call begins after a stop, and the stop waits for those under
// way.
class Door {
public:
  bool enter() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_) return false;
    ++inside_;
    changed_.notify_all();
    return true;
  }
  void leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    --inside_;
    changed_.notify_all();
  }
  void wait_for(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return inside_ == count; });
  }
  void shut() {
    std::lock_guard<std::mutex> lock(mutex_);
    shut_ = true;
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  bool shut_ = false;
};

// Stopped while all callers are inside, right behind the last of them.
template <class Start> void stops(const std::string &directory, Start start) {
  const Extents all = extents(directory);
  for (int round = 0; round < 12; ++round) {
    void *mover = start();
    Door door;
    std::thread stopper([&] {
      door.wait_for(kCallers);
      door.shut();
      door.wait_for(0);
      oz_io_stop(mover);
    });
    side_by_side(kCallers, [&](int caller) {
      for (Extent &own = *all[caller]; door.enter(); door.leave())
        own.round_trip(mover, round);
    });
    stopper.join();
  }
}

template <class Start> void back_end(const std::string &directory, Start start, bool seeded) {
  void *mover = start();
  transfers(mover, directory, seeded);
  oz_io_stop(mover);
  stops(directory, start);
}

void *started_threads() {
  void *mover = oz_io_start(3, kPieceBytes);
  need(mover, "no thread could be started");
  return mover;
}

void *started_ring() {
  if (void *mover = oz_ring_start(5, 3, kPieceBytes)) return mover;
  std::printf("io_uring is refused here: %s\n", std::strerror(errno));
  std::exit(77);
}

// From now on there is no number for a new file, so for no new ring.
void refuse_files() {
  const int lowest = dup(0);
  close(lowest);
  const rlimit limit = {rlim_t(lowest), rlim_t(lowest)};
  need(setrlimit(RLIMIT_NOFILE, &limit) == 0, "the limit could not be set");
}

// The mover has the one ring it began with, so the second caller inside makes it fall.
void refusal(const std::string &directory) {
  void *mover = started_ring();
  const Extents all = extents(directory);
  refuse_files();
  side_by_side(kCallers, [&](int caller) {
    bool fell = false;
    for (int round = 0; round < 200 && !fell; ++round) {
      const int found = oz_io_fallen(mover);
      fell = found == (1 << 16 | EMFILE);
      need(fell || found == 0, "half a refusal was told");
      all[caller]->round_trip(mover, round);
    }
    need(fell, "no ring was refused");
  });
  oz_io_stop(mover);
}

} // namespace

int main(int count, char **words) {
  need(count >= 3, "a directory and a job are needed");
  const std::string directory = words[1], job = words[2];
  const bool seeded = count > 3;
  if (job == "update")
    updates(seeded);
  else if (job == "forks")
    forks();
  else if (job == "threads")
    back_end(directory, started_threads, seeded);
  else if (job == "rings")
    back_end(directory, started_ring, seeded);
  else if (job == "refusal")
    refusal(directory);
  else
    need(false, "no such job");
  return 0;
}
