// Two ways to the same number: the processor's instruction over three strands at once (its latency is three cycles, its
// rate one), and tables eight bytes at a time.
#include "crc32c.h"
#include "kernels.h"
#include <cstring>

namespace offloadz {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;
// Bytes per strand; joining two costs four look-ups.  The long strands are two pages each, so that the processor sees
// three streams and fetches ahead: bytes fresh from a drive are summed at 10.0 GB/s, as fast as one core reads them at
// all, against 6.5 with short strands only.
constexpr size_t kStrands[2] = {8192, 2048};

struct Tables {
  uint32_t bytes[8][256];   // bytes[k][b]: byte b followed by k zero bytes
  uint32_t skip[2][4][256]; // state advanced over kStrands[...] zero bytes, by byte of the state
  Tables() {
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t crc = b;
      for (int bit = 0; bit < 8; ++bit)
        crc = (crc >> 1) ^ (kPolynomial & (0u - (crc & 1u)));
      bytes[0][b] = crc;
    }
    for (int k = 1; k < 8; ++k)
      for (int b = 0; b < 256; ++b)
        bytes[k][b] = (bytes[k - 1][b] >> 8) ^ bytes[0][bytes[k - 1][b] & 255];
    for (int which = 0; which < 2; ++which)
      fill_skip(kStrands[which], skip[which]);
  }
  void fill_skip(size_t strand, uint32_t (&out)[4][256]) {
    uint32_t basis[32]; // the step is linear over bits: 32 images give the whole table
    for (int bit = 0; bit < 32; ++bit) {
      basis[bit] = 1u << bit;
      for (size_t i = 0; i < strand; ++i)
        basis[bit] = (basis[bit] >> 8) ^ bytes[0][basis[bit] & 255];
    }
    for (int k = 0; k < 4; ++k)
      for (int b = 0; b < 256; ++b) {
        out[k][b] = 0;
        for (int bit = 0; bit < 8; ++bit)
          if (b >> bit & 1) out[k][b] ^= basis[8 * k + bit];
      }
  }
};

const Tables tables;

uint64_t word_at(const unsigned char *at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

uint32_t by_table(uint32_t crc, const unsigned char *at, size_t count) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; count >= 8; at += 8, count -= 8) {
    uint64_t word = word_at(at) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; ++k)
      crc ^= tables.bytes[7 - k][word >> (8 * k) & 255];
  }
#endif
  for (; count; ++at, --count)
    crc = (crc >> 8) ^ tables.bytes[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)
uint32_t skipped(uint32_t crc, const uint32_t (&skip)[4][256]) {
  return skip[0][crc & 255] ^ skip[1][crc >> 8 & 255] ^ skip[2][crc >> 16 & 255] ^ skip[3][crc >> 24];
}

// As many rounds of three strands as there are; moves `at` and `count` on.
template <int which>
__attribute__((target("sse4.2"))) uint32_t by_strands(uint32_t crc, const unsigned char *&at, size_t &count) {
  constexpr size_t strand = kStrands[which];
  for (; count >= 3 * strand; at += 3 * strand, count -= 3 * strand) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < strand; i += 8) {
      a = __builtin_ia32_crc32di(a, word_at(at + i));
      b = __builtin_ia32_crc32di(b, word_at(at + strand + i));
      c = __builtin_ia32_crc32di(c, word_at(at + 2 * strand + i));
    }
    crc = skipped(skipped(uint32_t(a), tables.skip[which]) ^ uint32_t(b), tables.skip[which]) ^ uint32_t(c);
  }
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const unsigned char *at, size_t count) {
  crc = by_strands<0>(crc, at, count);
  crc = by_strands<1>(crc, at, count);
  uint64_t wide = crc;
  for (; count >= 8; at += 8, count -= 8)
    wide = __builtin_ia32_crc32di(wide, word_at(at));
  crc = uint32_t(wide);
  for (; count; ++at, --count)
    crc = __builtin_ia32_crc32qi(crc, *at);
  return crc;
}
#endif

} // namespace

uint32_t crc32c(const void *data, size_t num_bytes) {
  const unsigned char *at = static_cast<const unsigned char *>(data);
#if defined(__x86_64__)
  // The lowest level asked for by name means tables too, so that they are tested on every machine.
  static const bool has_instruction = (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2"));
  if (has_instruction && &kernels() != &kernels_baseline) return ~by_instruction(~0u, at, num_bytes);
#endif
  return ~by_table(~0u, at, num_bytes);
}

} // namespace offloadz
