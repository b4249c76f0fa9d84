// Formats of 16 and 8 bits: how a moment or a weight without a master is rounded at random, and what a code means.
// Included by kernels.inl.
//
// [Note: codes of eight bits] A block of kQuant numbers has a scale, its largest magnitude.  A number u = |x| / scale in
// [0, 1] is stored as the upper bits of the float u + c, counted from c: like the mu-law of telephony, equal steps near
// zero and then 16 steps to each doubling.  A second moment has 8 bits (c = 2^-16 x 1.0625: down to 2^-20 of the
// largest), a first moment a sign and 7 bits (c = 2^-8 x 1.0667: down to 2^-12).  c is chosen so that the last code is 1
// exactly: the largest number comes back bit by bit, so that encoding what was decoded finds the same scale and codes.
// A second moment in a block that is not all zero never has the code 0: it would make m / sqrt(v) run away.

constexpr uint32_t kFirst = (1905u << 19) + 34953u; // bits of c for the first moment: code 127 is 1.0
constexpr uint32_t kSecond = (1777u << 19) + 136u;  // and for the second: code 255 is 1.0
constexpr uint32_t kSmallest = 37u << 23;           // bits of 2^-90: smaller scales would lead to denormal numbers

// [Note: random bits] A counter-based generator: the bits are a hash of (key, element), where the keys are a hash of
// (seed, step).  Two rounds of multiply and xorshift (the constants of Wellons' lowbias32) with a key before each;
// the low half rounds the first moment, the high half the second, a third round gives the bits for the weight.
static inline uint32_t random_bits(const UpdateArgs &a, uint32_t element) {
  uint32_t x = element + a.keys[0];
  x = (x ^ (x >> 16)) * 0x7feb352du + a.keys[1];
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

static inline uint32_t weight_bits(const UpdateArgs &a, uint32_t random) {
  return ((random ^ a.keys[2]) * 0x9e3779b1u) >> 16;
}

// Sixteen random bits below the half that stays: up with exactly the chance that keeps the mean.
static inline uint16_t at_random(float value, uint32_t random16) {
  return uint16_t((standard_nan(as_bits(value)) + random16) >> 16);
}

// Where in [0, 2^19) a code's step is rounded up.  Four units are kept clear at both ends, so that the rounding errors
// of u = x / scale never move a number that is a code already.
static inline uint32_t threshold(uint32_t random16) {
  return (random16 << 3) + 4u;
}

constexpr uint32_t kHalfStep = 1u << 18; // the threshold that rounds to nearest

template <bool kIsSecond> static inline uint8_t code_of(float x, float inverse, uint32_t up) {
  constexpr uint32_t base = kIsSecond ? kSecond : kFirst;
  uint32_t bits = as_bits(x);
  float u = as_float(bits & 0x7fffffffu) * inverse;
  uint32_t code = (as_bits(u + as_float(base)) + up - base) >> 19;
  return uint8_t(kIsSecond ? (code ? code : 1u) : code | (bits >> 24 & 0x80u));
}

template <bool kIsSecond> static inline float value_of(uint8_t code, float scale) {
  constexpr uint32_t base = kIsSecond ? kSecond : kFirst;
  uint32_t steps = kIsSecond ? code : code & 0x7fu;
  float x = (as_float((steps << 19) + base) - as_float(base)) * scale;
  return kIsSecond ? x : as_float(as_bits(x) | (code & 0x80u) << 24);
}

// The scale of a block whose largest magnitude has the bits `largest`.  A NaN or infinity stays: it must show.
template <bool kIsSecond> static inline float scale_of(uint32_t largest) {
  if (largest >= kSmallest) return as_float(largest);
  return kIsSecond && largest ? as_float(kSmallest) : 0.0f;
}

static inline uint32_t largest_of(const float *__restrict x, int64_t count) {
  int32_t most = 0; // magnitudes of floats order as their bits do
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits = int32_t(as_bits(x[i]) & 0x7fffffffu);
    most = bits > most ? bits : most;
  }
  return uint32_t(most);
}

// One block: `up` has a threshold for each element.
template <bool kIsSecond>
static void encode_block(uint8_t *__restrict codes, float *scale, const float *__restrict x,
                         const uint32_t *__restrict up, int64_t count) {
  *scale = scale_of<kIsSecond>(largest_of(x, count));
  if (*scale == 0.0f) {
    for (int64_t i = 0; i < count; ++i)
      codes[i] = 0;
    return;
  }
  float inverse = 1.0f / *scale;
  for (int64_t i = 0; i < count; ++i)
    codes[i] = code_of<kIsSecond>(x[i], inverse, up[i]);
}

template <bool kIsSecond>
static void decode_block(float *__restrict x, const uint8_t *__restrict codes, float scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    x[i] = value_of<kIsSecond>(codes[i], scale);
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
