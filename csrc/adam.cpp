// Which instruction set is in use, and updates cut into tiles for a team of threads.
#include "kernels.h"
#include "floats.h"
#include "pool.h"
#include <algorithm>
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

static int64_t tiles_of(int64_t count) {
  return (count + kTile - 1) / kTile;
}

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

// The tiles of all spans, numbered through.
struct Tiles {
  UpdateArgs *const *spans;
  int64_t num_spans;
  int num_strands;
  Strand strands[kMaxThreads] = {};
};

// The last span that begins at or before a tile: one of no elements has none, and the next begins where it does.
static const UpdateArgs &span_of(const Tiles &tiles, int64_t tile) {
  UpdateArgs *const *behind =
      std::upper_bound(tiles.spans, tiles.spans + tiles.num_spans, tile,
                       [](int64_t wanted, const UpdateArgs *span) { return wanted < span->first_tile; });
  return *behind[-1];
}

static void update_strand(const Tiles &tiles, Strand &own) {
  uint64_t tile, next;
  while (own.take(false, tile, next)) {
    const UpdateArgs &span = span_of(tiles, int64_t(tile));
    const int64_t begin = (int64_t(tile) - span.first_tile) * kTile;
    kernels().update(span, begin, std::min(begin + kTile, span.count));
  }
}

// Part `index` of the work: a strand of tiles, then halves of what others have left.
static bool update_part(void *arg, int64_t index) {
  Tiles &tiles = *static_cast<Tiles *>(arg);
  PlainFloats plain;
  update_strand(tiles, tiles.strands[index]);
  for (int i = 1; i < tiles.num_strands; ++i) {
    uint64_t begin, end;
    while (tiles.strands[(index + i) % tiles.num_strands].take(true, begin, end)) {
      tiles.strands[index].rest.store(Strand::range(begin, end), std::memory_order_relaxed);
      update_strand(tiles, tiles.strands[index]);
    }
  }
  return true;
}

static uint64_t mixed(uint64_t x) { // the finaliser of SplitMix64 (Steele, Lea and Flood 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static void set_keys(UpdateArgs &args) {
  const uint64_t a = mixed(mixed(args.seed + 0x9e3779b97f4a7c15u) + uint64_t(args.step) * 0x9e3779b97f4a7c15u);
  args.keys[0] = uint32_t(a);
  args.keys[1] = uint32_t(a >> 32);
}

constexpr int64_t kWatchNs = 100000; // longer than Python takes from one call to the next

void update(UpdateArgs *const *spans, int64_t num_spans, int num_threads) {
  // Never destroyed: threads that sleep at the end of the process must not be waited for.
  static Pool *team = new (std::nothrow) Pool(kWatchNs, true);
  int64_t num_tiles = 0, num_elements = 0;
  for (int64_t i = 0; i < num_spans; ++i) {
    set_keys(*spans[i]);
    spans[i]->first_tile = num_tiles;
    num_tiles += tiles_of(spans[i]->count);
    num_elements += spans[i]->count;
  }
  num_threads = int(std::min<int64_t>(num_threads, tiles_of(num_elements))); // a thread for a few elements costs more
  if (!team || num_threads < 1) num_threads = 1;
  Tiles tiles{spans, num_spans, num_threads};
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
