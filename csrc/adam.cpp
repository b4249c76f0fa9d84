// Which instruction set is in use, and the update cut into tiles for a team of threads.
#include "kernels.h"
#include "floats.h"
#include "pool.h"
#include <atomic>
#include <cstring>
#include <new>

namespace offloadz {

static const Kernels *table(int level) {
#if defined(__x86_64__)
  const Kernels *tables[] = {&kernels_baseline, &kernels_avx2, &kernels_avx512};
  return tables[level];
#else
  (void)level;
  return &kernels_baseline;
#endif
}

bool isa_supported(int level) {
  if (level == 0) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (level == 1) return __builtin_cpu_supports("avx2");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

static std::atomic<const Kernels *> chosen{nullptr};

const Kernels &kernels() {
  const Kernels *now = chosen.load(std::memory_order_acquire);
  if (!now) {
    now = table(isa_supported(2) ? 2 : isa_supported(1) ? 1 : 0);
    chosen.store(now, std::memory_order_release);
  }
  return *now;
}

int select_isa(const char *name) {
  const char *names[] = {"baseline", "avx2", "avx512"};
  for (int level = 0; level < 3; ++level)
    if (std::strcmp(name, names[level]) == 0) {
      if (!isa_supported(level)) return 2;
      chosen.store(table(level), std::memory_order_release);
      return 0;
    }
  return 1;
}

constexpr int64_t kTile =
    32768; // elements: under a megabyte of state, so a thread that ends late is soon caught up with

static bool update_tile(void *arg, int64_t index) {
  const UpdateArgs &args = *static_cast<const UpdateArgs *>(arg);
  PlainFloats plain;
  int64_t begin = index * kTile, end = begin + kTile;
  kernels().update(args, begin, end < args.count ? end : args.count);
  return true;
}

static uint64_t mixed(uint64_t x) { // the finaliser of SplitMix64 (Steele, Lea and Flood 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void set_keys(UpdateArgs &args, uint64_t seed, int64_t step) {
  uint64_t a = mixed(mixed(seed + 0x9e3779b97f4a7c15u) + uint64_t(step) * 0x9e3779b97f4a7c15u);
  args.keys[0] = uint32_t(a);
  args.keys[1] = uint32_t(a >> 32);
  args.keys[2] = uint32_t(mixed(a + 0x9e3779b97f4a7c15u));
}

void update(const UpdateArgs &args, int num_threads) {
  // Never destroyed: threads that sleep at the end of the process must not be waited for.
  static Pool *team = new (std::nothrow) Pool;
  int64_t num_tiles = (args.count + kTile - 1) / kTile;
  if (num_threads > num_tiles) num_threads = int(num_tiles);
  Job job{update_tile, const_cast<UpdateArgs *>(&args), num_tiles, num_threads};
  if (team && num_threads > 1) {
    team->grow(num_threads - 1);
    team->run(job, true);
  } else {
    for (int64_t i = 0; i < num_tiles; ++i)
      update_tile(job.arg, i);
  }
}

} // namespace offloadz
