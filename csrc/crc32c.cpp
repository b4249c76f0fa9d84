// Three ways to the same number: folding by products without carry over whole vectors, which keeps up with what a core
// reads from memory; the processor's instruction over three strands at once (its latency is three cycles, its rate
// one); tables, eight bytes at a time.
#include "crc32c.h"
#include "kernels.h"
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace offloadz {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;
// Bytes per strand; joining two costs four look-ups.  The long strands are two pages each, so that the processor sees
// three streams and fetches ahead: bytes fresh from a drive are summed half as fast again as with short strands only.
constexpr size_t kStrands[2] = {8192, 2048};
constexpr size_t kFold = 256; // bytes that are folded onto the next as many
// How far ahead bytes are fetched as such that are needed once: they then do not go through the cache that all cores
// (and the copies of a hypervisor) share: sums beside a write take 2.5 to 4.8 % off its rate instead of 4.3 to 6.3.
constexpr size_t kAhead = 8192;

// x^exponent modulo the polynomial, as a factor for a product without carry of 64 bits: bit 63 - d is that of x^d.
uint64_t power(size_t exponent) {
  uint32_t value = 0x80000000u;
  while (exponent--)
    value = (value >> 1) ^ (kPolynomial & (0u - (value & 1u)));
  return uint64_t(value) << 32;
}

struct Tables {
  uint32_t bytes[8][256];   // bytes[k][b]: byte b followed by k zero bytes
  uint32_t skip[2][4][256]; // state advanced over kStrands[...] zero bytes, by byte of the state
  // What eight bytes are multiplied by to stand kFold bytes later, the first and the second eight of sixteen; one less
  // than the distance, since a product of reflected words is reflected once more.
  uint64_t fold[2] = {power(8 * kFold + 63), power(8 * kFold - 1)};
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

// Folds as many whole kFold bytes as there are; moves `at` and `count` on.  What is left of them are kFold bytes with
// the same remainder, and the instruction sums those.
uint32_t folded(const void *rest) {
  size_t count = kFold;
  const unsigned char *at = static_cast<const unsigned char *>(rest);
  return by_instruction(0, at, count);
}

} // namespace

// Guarded rooms, as those of the kernels: what stands here runs only where the processor has it.
namespace avx512 {
namespace {
__attribute__((target("avx512f,avx512vl,vpclmulqdq"))) uint32_t by_folding(uint32_t crc, const unsigned char *&at,
                                                                           size_t &count) {
  constexpr size_t width = 64, many = kFold / width;
  const int64_t one = int64_t(tables.fold[0]), other = int64_t(tables.fold[1]);
  const __m512i factors = _mm512_set_epi64(other, one, other, one, other, one, other, one);
  __m512i sum[many];
  for (size_t i = 0; i < many; ++i)
    sum[i] = _mm512_loadu_si512(at + width * i);
  sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
  for (at += kFold, count -= kFold; count >= kFold; at += kFold, count -= kFold)
    for (size_t i = 0; i < many; ++i) {
      _mm_prefetch(at + width * i + kAhead, _MM_HINT_NTA);
      __m512i first = _mm512_clmulepi64_epi128(sum[i], factors, 0x00);
      __m512i second = _mm512_clmulepi64_epi128(sum[i], factors, 0x11);
      sum[i] = _mm512_ternarylogic_epi64(first, second, _mm512_loadu_si512(at + width * i), 0x96); // xor of three
    }
  return folded(sum);
}
} // namespace
} // namespace avx512

namespace avx2 {
namespace {
__attribute__((target("avx2,vpclmulqdq"))) uint32_t by_folding(uint32_t crc, const unsigned char *&at, size_t &count) {
  constexpr size_t width = 32, many = kFold / width;
  const __m256i factors = _mm256_broadcastsi128_si256(_mm_set_epi64x(int64_t(tables.fold[1]), int64_t(tables.fold[0])));
  __m256i sum[many];
  for (size_t i = 0; i < many; ++i)
    sum[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + width * i));
  sum[0] = _mm256_xor_si256(sum[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(int(crc))));
  for (at += kFold, count -= kFold; count >= kFold; at += kFold, count -= kFold)
    for (size_t i = 0; i < many; ++i) {
      if (i % 2 == 0) _mm_prefetch(at + width * i + kAhead, _MM_HINT_NTA); // a line is two vectors
      __m256i first = _mm256_clmulepi64_epi128(sum[i], factors, 0x00);
      __m256i second = _mm256_clmulepi64_epi128(sum[i], factors, 0x11);
      __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + width * i));
      sum[i] = _mm256_xor_si256(_mm256_xor_si256(first, second), next);
    }
  return folded(sum);
}
} // namespace
} // namespace avx2

namespace {

using Folding = uint32_t (*)(uint32_t, const unsigned char *&, size_t &);

// The way to fold at the instruction set that is chosen; none where the processor has no such products of vectors.
Folding folding() {
  static const bool able = __builtin_cpu_supports("vpclmulqdq");
  if (!able || &kernels() == &kernels_baseline) return nullptr;
  return &kernels() == &kernels_avx512 ? avx512::by_folding : avx2::by_folding;
}
#endif

} // namespace

uint32_t crc32c(const void *data, size_t num_bytes) {
  const unsigned char *at = static_cast<const unsigned char *>(data);
#if defined(__x86_64__)
  // The lowest level asked for by name means tables too, so that they are tested on every machine.
  static const bool has_instruction = (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2"));
  if (has_instruction && &kernels() != &kernels_baseline) {
    Folding fold = num_bytes >= 2 * kFold ? folding() : nullptr;
    uint32_t crc = fold ? fold(~0u, at, num_bytes) : ~0u;
    return ~by_instruction(crc, at, num_bytes);
  }
#endif
  return ~by_table(~0u, at, num_bytes);
}

} // namespace offloadz
