// A team of threads that sleeps until it is asked, shared by the transfers and by the optimizer's update.
//
// Why not OpenMP: torch has loaded its own libgomp long before this library, so the wait policy cannot be set any more
// and the team of every calling thread spins after each region; and libgomp ends the process when a thread cannot be
// created. Here a waiting thread sleeps in the kernel, and a thread that cannot be created only makes the team smaller.
// To be woken costs some 50 us, so a team whose calls follow one another may look on for a while before it sleeps, and
// gives its core to whoever wants it meanwhile.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <sys/types.h>

namespace offloadz {

constexpr int kMaxThreads = 256; // of a team; MAX_THREADS in runtime/threads.py is the same

// One call's work: `part(arg, i)` for i in [0, num_parts), each once, in any order, on at most `limit` threads at a
// time. It lives on the caller's stack.  A part that returns false keeps the parts not yet begun from being handed out.
struct Job {
  bool (*part)(void *arg, int64_t index);
  void *arg;
  int64_t num_parts;
  int limit;
  int64_t next = 0;
  int running = 0;
  Job *after = nullptr;
  std::atomic<uint32_t> ended{0};
  std::condition_variable done = {};
};

class Pool {
public:
  // `watch_ns`: how long a thread without work looks on.  `yields`: the threads leave the core of a caller that works
  // too to him.
  explicit Pool(int64_t watch_ns = 0, bool yields = false) : watch_ns_(watch_ns), yields_(yields) {}
  ~Pool(); // joins the threads; no call may be in run() any more
  // Starts threads until there are `num_threads`; returns how many there are (fewer when the system refuses one).
  int grow(int num_threads);
  // Returns when every part handed out has ended: nothing goes on behind the caller's back.  With `help` the caller
  // works too.  False when this process is a fork of the one that started the threads (they do not exist here) and
  // `help` is off.
  bool run(Job &job, bool help);

private:
  void work();
  Job *claim(int64_t &index);
  bool take(Job &job, int64_t &index);
  void finish(Job &job, bool ok);
  void unlink(Job &job);
  void watch(std::unique_lock<std::mutex> &lock, const std::atomic<uint32_t> &value);
  void keep_off(int core);

  const int64_t watch_ns_;
  const bool yields_;
  int kept_off_ = -1;              // the core that the threads leave to the caller
  std::atomic<uint32_t> calls_{0}; // grows whenever there may be something to do
  std::mutex mutex_;
  std::condition_variable wake_;
  Job *head_ = nullptr;
  bool stop_ = false;
  int num_threads_ = 0;
  pthread_t threads_[kMaxThreads];
  std::atomic<pid_t> owner_{0};
};

} // namespace offloadz
