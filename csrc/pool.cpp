#include "pool.h"
#include <pthread.h>
#include <sched.h>
#include <chrono>
#include <csignal>
#include <unistd.h>

namespace offloadz {

int Pool::grow(int num_threads) {
  // Before the mutex: in a fork it may be held for ever, by a thread that does not exist there.
  pid_t owner = 0;
  if (!owner_.compare_exchange_strong(owner, getpid()) && owner != getpid()) return 0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_threads > kMaxThreads) num_threads = kMaxThreads;
  // Signals stay with the threads Python knows: a Ctrl-C must interrupt the main thread, not a transfer.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto body = [](void *self) -> void * {
    static_cast<Pool *>(self)->work();
    return nullptr;
  };
  while (num_threads_ < num_threads && pthread_create(&threads_[num_threads_], nullptr, body, this) == 0) {
    ++num_threads_;
    kept_off_ = -1;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return num_threads_;
}

Pool::~Pool() {
  if (owner_ != getpid()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  for (int i = 0; i < num_threads_; ++i)
    pthread_join(threads_[i], nullptr);
}

// All below up to run() is called with the mutex held.

void Pool::unlink(Job &job) {
  for (Job **at = &head_; *at; at = &(*at)->after)
    if (*at == &job) {
      *at = job.after;
      job.after = nullptr;
      return;
    }
}

bool Pool::take(Job &job, int64_t &index) {
  if (job.next >= job.num_parts || job.running >= job.limit) return false;
  index = job.next++;
  ++job.running;
  return true;
}

// Takes a part of the first job that has one and moves that job behind the others, so that every call gets its turn.
Job *Pool::claim(int64_t &index) {
  for (Job *job = head_; job; job = job->after)
    if (take(*job, index)) {
      unlink(*job);
      if (job->next < job->num_parts) {
        Job **at = &head_;
        while (*at)
          at = &(*at)->after;
        *at = job;
      }
      return job;
    }
  return nullptr;
}

void Pool::finish(Job &job, bool ok) {
  --job.running;
  if (!ok) {
    job.next = job.num_parts;
    unlink(job);
  }
  // A job at its limit of threads was passed over; now it may have a part for a sleeping thread, or be done.
  if (job.next < job.num_parts) {
    ++calls_;
    wake_.notify_one();
  } else if (job.running == 0) {
    job.ended = 1;
    job.done.notify_all();
  }
}

// Lets the mutex go until `value` changes, for watch_ns_ at most.
void Pool::watch(std::unique_lock<std::mutex> &lock, const std::atomic<uint32_t> &value) {
  if (watch_ns_ == 0) return;
  const uint32_t before = value;
  lock.unlock();
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(watch_ns_);
  while (value == before && std::chrono::steady_clock::now() < end)
    sched_yield();
  lock.lock();
}

void Pool::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (bool watched = false; !stop_;) {
    int64_t index = 0;
    Job *job = claim(index);
    if (!job) {
      if (watched)
        wake_.wait(lock);
      else
        watch(lock, calls_);
      watched = !watched;
      continue;
    }
    watched = false;
    lock.unlock();
    bool ok = job->part(job->arg, index);
    lock.lock();
    finish(*job, ok);
  }
}

// Leaves the caller's core to him.  A thread woken there waits until he is done, be another core idle or not: on a
// system that was busy just now, Linux does not look for one, and evens out only at the next tick.
void Pool::keep_off(int core) {
  if (core == kept_off_) return;
  cpu_set_t cores;
  if (core < 0 || sched_getaffinity(0, sizeof(cores), &cores) != 0 || CPU_COUNT(&cores) < 2) return;
  CPU_CLR(core, &cores);
  for (int i = 0; i < num_threads_; ++i)
    pthread_setaffinity_np(threads_[i], sizeof(cores), &cores);
  kept_off_ = core;
}

bool Pool::run(Job &job, bool help) {
  if (job.num_parts <= 0) return true;
  if (owner_ != getpid()) { // a fork, or a pool that never had a thread
    if (!help) return false;
    for (int64_t i = 0; i < job.num_parts; ++i)
      if (!job.part(job.arg, i)) break;
    return true;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (yields_ && help) keep_off(sched_getcpu());
  job.after = head_;
  head_ = &job;
  ++calls_;
  wake_.notify_all();
  int64_t index = 0;
  while (help && take(job, index)) {
    lock.unlock();
    bool ok = job.part(job.arg, index);
    lock.lock();
    finish(job, ok);
  }
  if (job.next >= job.num_parts) unlink(job);
  if (job.running > 0) watch(lock, job.ended);
  while (job.running > 0 || job.next < job.num_parts)
    job.done.wait(lock);
  return true;
}

} // namespace offloadz
