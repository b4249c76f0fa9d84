// Formats of 16 and 8 bits: how a moment or a weight without a master is rounded at random, and what a code means.
// Included by kernels.inl.
//
// [Note: codes of eight bits] A block of kQuant numbers has a scale, its largest magnitude; a code stands for a number
// u in [0, 1] that the scale is multiplied by.  A second moment's code k is the upper bits of the float u, counted from
// the smallest, kSecond = 2^-32 x 1.125: 8 steps to each doubling, and 255 is 1.  It has no zero, so that m / sqrt(v)
// cannot run away; a block of zeros has the scale 0.  A first moment's code is a sign (bit 7; a zero has none) and a
// magnitude k, the upper bits of the float u + c, counted from c = kFirst = 2^-16 x 1.125: equal steps near zero, down
// to 2^-19, and then 8 to each doubling, as in the mu-law of telephony.  Equal reach of m and sqrt(v), not more digits,
// is what numbers small beside others of their block need.  c is such that 127 is 1 exactly: in both formats the
// largest number comes back bit by bit, so that encoding what was decoded finds the same scale and codes.

constexpr int kCodeShift = 20;                           // 3 of the 23 bits behind the point are kept
constexpr uint32_t kFirst = (889u << kCodeShift) + 144u; // bits of c
constexpr uint32_t kSecond = 761u << kCodeShift;         // bits of the smallest u
constexpr uint32_t kSmallest = 37u << 23;                // bits of 2^-90: smaller scales would lead to denormal numbers

// [Note: random bits] A counter-based generator: a word is a hash of (keys, element), where the keys are a hash of
// (seed, step).  The element is spread by the golden ratio, then two rounds of xorshift and multiply (the constants of
// Wellons' lowbias32), with a key before each.  Only elements whose place in the span has bit 2 clear are hashed, those
// four further on get a multiple of the same word (the multiplier is one of Steele and Vigna 2021): a vector of the
// latter then costs one product.  Of a word the low 20 bits round the first moment's code and the high 20 the second's:
// the eight they share count least in one of them.  Moments of 16 bits are rounded by the word's halves, weights by the
// high half of one more product.
constexpr uint32_t kSpread = 0x9e3779b1u, kRound1 = 0x7feb352du, kRound2 = 0x846ca68bu, kPartner = 0xadb4a92du;

static inline uint32_t random_bits(const UpdateArgs &a, uint32_t place) {
  uint32_t x = (a.first_element + (place & ~4u)) * kSpread + a.keys[0];
  x = (x ^ (x >> 16)) * kRound1 + a.keys[1];
  x = (x ^ (x >> 15)) * kRound2;
  return place & 4u ? x * kPartner : x;
}

static inline uint32_t weight_bits(uint32_t random) {
  return (random * kSpread) >> 16;
}

// Sixteen random bits below the half that stays: up with exactly the chance that keeps the mean.
static inline uint16_t at_random(float value, uint32_t random16) {
  return uint16_t((standard_nan(as_bits(value)) + random16) >> 16);
}

// Where in [0, 2^20) a code's step is rounded up.
static inline uint32_t threshold(uint32_t random, bool second) {
  return second ? random >> 12 : random & 0xfffffu;
}

constexpr uint32_t kHalfStep = 1u << (kCodeShift - 1); // the threshold that rounds to nearest

constexpr float kAbove = 1.0f + 0x1p-23f; // over the scale, so that the largest number is never below its code

static inline uint8_t first_code_of(float x, float inverse, uint32_t up) {
  float u = as_float(as_bits(x) & 0x7fffffffu) * inverse;
  uint32_t steps = (as_bits(u + as_float(kFirst)) + up - kFirst) >> kCodeShift;
  return uint8_t((steps < 127u ? steps : 127u) | (steps ? as_bits(x) >> 31 << 7 : 0u));
}

static inline uint8_t second_code_of(float x, float inverse, uint32_t up) {
  int32_t steps = int32_t((as_bits(x * inverse) + up) >> kCodeShift) - int32_t(kSecond >> kCodeShift);
  return uint8_t(steps < 0 ? 0 : steps < 255 ? steps : 255);
}

static inline float first_value_of(uint8_t code, float scale) {
  float x = (as_float(((code & 127u) << kCodeShift) + kFirst) - as_float(kFirst)) * scale;
  return as_float(as_bits(x) | uint32_t(code >> 7) << 31);
}

static inline float second_value_of(uint8_t code, float scale) {
  return as_float((uint32_t(code) << kCodeShift) + kSecond) * scale;
}

// The scale of a block whose largest magnitude has the bits `largest`.  A NaN or infinity stays: it must show.
template <bool kIsSecond> static inline float scale_of(uint32_t largest) {
  if (largest >= kSmallest) return as_float(largest);
  return kIsSecond && largest ? as_float(kSmallest) : 0.0f;
}

static inline uint32_t largest_of(const float *__restrict x, int64_t count, uint32_t mask) {
  int32_t most = 0; // floats that are not negative order as their bits do
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits = int32_t(as_bits(x[i]) & mask);
    most = bits > most ? bits : most;
  }
  return uint32_t(most);
}

// One block: `up` has a threshold for each element.
template <bool kIsSecond>
static void encode_block(uint8_t *__restrict codes, float *scale, const float *__restrict x,
                         const uint32_t *__restrict up, int64_t count) {
  *scale = scale_of<kIsSecond>(largest_of(x, count, kIsSecond ? ~0u : ~0u >> 1));
  if (*scale == 0.0f) {
    for (int64_t i = 0; i < count; ++i)
      codes[i] = 0;
    return;
  }
  float inverse = kAbove / *scale;
  for (int64_t i = 0; i < count; ++i)
    codes[i] = (kIsSecond ? second_code_of : first_code_of)(x[i], inverse, up[i]);
}

template <bool kIsSecond>
static void decode_block(float *__restrict x, const uint8_t *__restrict codes, float scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    x[i] = (kIsSecond ? second_value_of : first_value_of)(codes[i], scale);
}

template <bool kIsSecond> static void encode_all(uint8_t *codes, float *scales, const float *x, int64_t count) {
  uint32_t up[kQuant];
  for (int64_t i = 0; i < kQuant; ++i)
    up[i] = kHalfStep;
  for (int64_t i = 0; i < count; i += kQuant)
    encode_block<kIsSecond>(codes + i, scales + i / kQuant, x + i, up, count - i < kQuant ? count - i : kQuant);
}

template <bool kIsSecond> static void decode_all(float *x, const uint8_t *codes, const float *scales, int64_t count) {
  for (int64_t i = 0; i < count; i += kQuant)
    decode_block<kIsSecond>(x + i, codes + i, scales[i / kQuant], count - i < kQuant ? count - i : kQuant);
}
