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

constexpr int64_t kTile = 32768; // elements: some ten microseconds, so no thread waits longer for the last one

// The tiles that a thread still has to do, one after the other.  A thread walks its own stretch of the arrays: where
// neighbouring tiles went to different threads, each began on lines that the other's processor had fetched ahead.
struct alignas(64) Strand {
  std::atomic<uint64_t> rest{0}; // the first in the high half, behind the last in the low half

  static uint64_t range(uint64_t begin, uint64_t end) { return begin << 32 | end; }

  // Takes tiles from the front, or (`half`) the later half; false where there are none.
  bool take(bool half, uint64_t &begin, uint64_t &end) {
    uint64_t now = rest.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t first = now >> 32, last = now & 0xffffffffu;
      if (first >= last) return false;
      begin = half ? first + (last - first) / 2 : first;
      end = half ? last : first + 1;
      if (rest.compare_exchange_weak(now, half ? range(first, begin) : range(end, last), std::memory_order_relaxed))
        return true;
    }
  }
};

struct Tiles {
  const UpdateArgs &args;
  int num_strands;
  Strand strands[kMaxThreads] = {};
};

static void update_strand(const UpdateArgs &args, Strand &own) {
  uint64_t tile, next;
  while (own.take(false, tile, next)) {
    const int64_t begin = int64_t(tile) * kTile, end = begin + kTile;
    kernels().update(args, begin, end < args.count ? end : args.count);
  }
}

// Part `index` of an update: a strand of tiles, then halves of what others have left.
static bool update_part(void *arg, int64_t index) {
  Tiles &tiles = *static_cast<Tiles *>(arg);
  PlainFloats plain;
  update_strand(tiles.args, tiles.strands[index]);
  for (int i = 1; i < tiles.num_strands; ++i) {
    uint64_t begin, end;
    while (tiles.strands[(index + i) % tiles.num_strands].take(true, begin, end)) {
      tiles.strands[index].rest.store(Strand::range(begin, end), std::memory_order_relaxed);
      update_strand(tiles.args, tiles.strands[index]);
    }
  }
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

constexpr int64_t kWatchNs = 100000; // longer than Python takes from one part to the next

void update(const UpdateArgs &args, int num_threads) {
  // Never destroyed: threads that sleep at the end of the process must not be waited for.
  static Pool *team = new (std::nothrow) Pool(kWatchNs);
  const int64_t num_tiles = (args.count + kTile - 1) / kTile;
  if (num_threads > num_tiles) num_threads = int(num_tiles);
  if (!team || num_threads < 1) num_threads = 1;
  Tiles tiles{args, num_threads};
  for (int i = 0; i < num_threads; ++i)
    tiles.strands[i].rest =
        Strand::range(uint64_t(num_tiles * i / num_threads), uint64_t(num_tiles * (i + 1) / num_threads));
  Job job{update_part, &tiles, num_threads, num_threads};
  if (num_threads > 1) {
    team->grow(num_threads - 1);
    team->run(job, true);
  } else {
    update_part(&tiles, 0);
  }
}

} // namespace offloadz
