// Vectors of the widest kind: operators are the compiler's, the few operations it has no operator for are here.
// Included by fused.inl, for AVX-512 and AVX2 only.
//
// [Note: unpacked order] Two vectors of halves become two of words by interleaving them, which these processors do
// within groups of 128 bits: the "even" vector gets elements 0-3, 8-11, ..., the "odd" one 4-7, 12-15, ...  Packing two
// words back into halves undoes it.  So where every load and store goes through halves, an order that is natural again
// only in memory costs nothing.  Where numbers of 32 bits lie in memory too, their vectors pass as they are, and halves
// are `dealt` before they are interleaved: then the first vector gets the first elements (kNatural).

constexpr int kLanes = OFFLOADZ_LANES; // 16 for AVX-512, 8 for AVX2

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(4 * kLanes)));

static inline Floats floats_of(Words bits) {
  return (Floats)bits;
}

static inline Words words_of(Floats value) {
  return (Words)value;
}

static inline Halves halves_at(const uint16_t *at) {
  Halves halves;
  __builtin_memcpy(&halves, at, sizeof(halves));
  return halves;
}

static inline void put(uint16_t *at, Halves halves) {
  __builtin_memcpy(at, &halves, sizeof(halves));
}

static inline Floats floats_at(const float *at) {
  Floats floats;
  __builtin_memcpy(&floats, at, sizeof(floats));
  return floats;
}

static inline void put(float *at, Floats floats) {
  __builtin_memcpy(at, &floats, sizeof(floats));
}

// The indices of the elements of an even vector; those of the odd one are four more.
static inline Words even_indices() {
  Words lanes;
  for (int i = 0; i < kLanes; ++i)
    lanes[i] = uint32_t(i / 4 * 8 + i % 4);
  return lanes;
}

#if OFFLOADZ_LANES == 16

static inline Words even_words(Halves low, Halves high) {
  return (Words)_mm512_unpacklo_epi16((__m512i)low, (__m512i)high);
}

static inline Words odd_words(Halves low, Halves high) {
  return (Words)_mm512_unpackhi_epi16((__m512i)low, (__m512i)high);
}

template <bool kNatural> static inline Halves dealt(Halves halves) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  return kNatural ? (Halves)_mm512_permutexvar_epi64(order, (__m512i)halves) : halves;
}

struct Picks { // of each number of two vectors its low or its high half, brought back into one
  uint16_t at[2 * kLanes];
  constexpr Picks(int half, bool natural) : at() {
    for (int i = 0; i < 2 * kLanes; ++i)
      at[i] = uint16_t((natural ? i : i / 4 % 2 * kLanes + i / 8 * 4 + i % 4) * 2 + half);
  }
};

template <int kHalf, bool kNatural> static inline Halves picked(Words even, Words odd) {
  static constexpr Picks picks(kHalf, kNatural);
  return (Halves)_mm512_permutex2var_epi16((__m512i)even, (__m512i)halves_at(picks.at), (__m512i)odd);
}

template <int kShift> static inline Halves upper(Words even, Words odd) { // shifted down by 16 or more
  return picked<1, false>(even, odd) >> (kShift - 16);
}

template <bool kNatural> static inline void split(Halves *low, Halves *high, Words even, Words odd) {
  *low = picked<0, kNatural>(even, odd);
  *high = picked<1, kNatural>(even, odd);
}

static inline Halves packed_signed(Words even, Words odd) {
  return (Halves)_mm512_packs_epi32((__m512i)even, (__m512i)odd);
}

static inline Halves bytes_at(const uint8_t *at) {
  return (Halves)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}

static inline Halves signed_bytes_at(const uint8_t *at) {
  return (Halves)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}

static inline Halves less(Halves value, uint16_t by) { // not below 0
  return (Halves)_mm512_subs_epu16((__m512i)value, _mm512_set1_epi16(short(by)));
}

static inline void put_mixed(uint8_t *at, __m512i bytes) { // packed from two vectors of halves
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(at, _mm512_permutexvar_epi64(order, bytes));
}

static inline void put_bytes(uint8_t *at, Halves first, Halves second) { // those above 255 as 255
  put_mixed(at, _mm512_packus_epi16((__m512i)first, (__m512i)second));
}

// Numbers, those above 127 as 127, and the signs of others in the eighth bit; zero has none.
static inline void put_signed(uint8_t *at, Halves first, Halves second, Halves sign, Halves second_sign) {
  __m512i bytes = _mm512_packs_epi16((__m512i)first, (__m512i)second);
  __mmask64 some = _mm512_test_epi8_mask(bytes, bytes);
  __m512i signs = _mm512_maskz_packs_epi16(some, (__m512i)sign, (__m512i)second_sign);
  put_mixed(at, _mm512_ternarylogic_epi32(_mm512_set1_epi8(127), bytes, signs, 0xca));
}

static inline Words signed_by(uint32_t value, Words bits) { // with the sign bit of the others
  return (Words)_mm512_ternarylogic_epi32(_mm512_set1_epi32(0x7fffffff), _mm512_set1_epi32(int(value)), (__m512i)bits,
                                          0xca);
}

static inline Floats root_of(Floats value) {
  return (Floats)_mm512_sqrt_ps((__m512)value);
}

static inline __m256i half_of(Words a) { // its larger numbers, each of two
  return _mm256_max_epi32(_mm512_castsi512_si256((__m512i)a), _mm512_extracti64x4_epi64((__m512i)a, 1));
}

static inline Words larger(Words a, Words b) { // as signed numbers
  return (Words)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

#else

static inline Words even_words(Halves low, Halves high) {
  return (Words)_mm256_unpacklo_epi16((__m256i)low, (__m256i)high);
}

static inline Words odd_words(Halves low, Halves high) {
  return (Words)_mm256_unpackhi_epi16((__m256i)low, (__m256i)high);
}

template <bool kNatural> static inline Halves dealt(Halves halves) { // its own inverse
  return kNatural ? (Halves)_mm256_permute4x64_epi64((__m256i)halves, 0xd8) : halves;
}

template <int kShift> static inline Halves upper(Words even, Words odd) { // shifted down by 16 or more
  return (Halves)_mm256_packus_epi32((__m256i)(even >> kShift), (__m256i)(odd >> kShift));
}

// Four low halves and four high ones beside each other, then the eight of a kind.
template <bool kNatural> static inline void split(Halves *low, Halves *high, Words even, Words odd) {
  const __m256i kinds =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m256i first = _mm256_shuffle_epi8((__m256i)even, kinds), second = _mm256_shuffle_epi8((__m256i)odd, kinds);
  *low = dealt<kNatural>((Halves)_mm256_unpacklo_epi64(first, second));
  *high = dealt<kNatural>((Halves)_mm256_unpackhi_epi64(first, second));
}

static inline Halves packed_signed(Words even, Words odd) {
  return (Halves)_mm256_packs_epi32((__m256i)even, (__m256i)odd);
}

static inline Halves bytes_at(const uint8_t *at) {
  return (Halves)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

static inline Halves signed_bytes_at(const uint8_t *at) {
  return (Halves)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

static inline Halves less(Halves value, uint16_t by) { // not below 0
  return (Halves)_mm256_subs_epu16((__m256i)value, _mm256_set1_epi16(short(by)));
}

static inline void put_mixed(uint8_t *at, __m256i bytes) { // packed from two vectors of halves
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm256_permute4x64_epi64(bytes, 0xd8));
}

static inline void put_bytes(uint8_t *at, Halves first, Halves second) { // those above 255 as 255
  put_mixed(at, _mm256_packus_epi16((__m256i)first, (__m256i)second));
}

// Numbers, those above 127 as 127, and the signs of others in the eighth bit; zero has none.
static inline void put_signed(uint8_t *at, Halves first, Halves second, Halves sign, Halves second_sign) {
  __m256i bytes = _mm256_packs_epi16((__m256i)first, (__m256i)second);
  __m256i signs = _mm256_and_si256(_mm256_packs_epi16((__m256i)sign, (__m256i)second_sign), _mm256_set1_epi8(-128));
  put_mixed(at, _mm256_sign_epi8(_mm256_or_si256(bytes, signs), bytes));
}

static inline Words signed_by(uint32_t value, Words bits) { // with the sign bit of the others
  const Words plus = Words{} + value, minus = plus | 0x80000000u;
  return (Words)_mm256_blendv_ps((__m256)plus, (__m256)minus, (__m256)bits);
}

static inline Floats root_of(Floats value) {
  return (Floats)_mm256_sqrt_ps((__m256)value);
}

static inline __m256i half_of(Words a) {
  return (__m256i)a;
}

static inline Words larger(Words a, Words b) { // as signed numbers
  return (Words)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

#endif

static inline uint32_t largest(Words a) { // as signed numbers
  __m256i eight = half_of(a);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
}
