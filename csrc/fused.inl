// Adam over bfloat16 weights with bfloat16 gradients: whole blocks by hand-made vectors, with the bits of update.inl,
// which does what is left.  Included by update.inl, for AVX-512 and AVX2 only.
//
// A compiler's own loops over the formats run at 0.8 to 1.1 of the speed of float32 moments: bytes cost them more
// instructions than the memory saves.  Rounded moments go through the first cache in two sweeps a block: `take_in`
// brings the moments up to date and forms the roots, `finish` divides, draws random bits and stores.  One long loop
// would be a chain of some 80 cycles for each vector, of which a processor can only keep two or three under way.  The
// next block is taken in before a block is finished: the scale is a long chain too.
//
// A NaN needs no care here: with bfloat16 gradients the low half of every NaN is zero, so no rounding can carry it
// away.

#include "lanes.inl"

constexpr int kSteps = kQuant / kLanes;

struct Moments { // of one block, in pairs of an even and an odd vector
  Floats m[kSteps], v[kSteps], divisor[kSteps];
  float scale[2] = {};
};

static inline void random_pair(Words out[2], const UpdateArgs &a, Words spread) {
  Words x = (spread ^ (spread >> 16)) * kRound1 + a.keys[1];
  out[0] = (x ^ (x >> 15)) * kRound2;
  out[1] = out[0] * kPartner;
}

template <bool kNatural = false> static inline void widen_pair(Floats out[2], const uint16_t *at) {
  Halves high = dealt<kNatural>(halves_at(at));
  out[0] = floats_of(even_words(Halves{}, high));
  out[1] = floats_of(odd_words(Halves{}, high));
}

template <bool kHalves, bool kNatural = false>
static inline void weight_pair(Floats out[2], const UpdateArgs &a, int64_t at) {
  const uint16_t *weight = static_cast<const uint16_t *>(a.weight) + at;
  if (!kHalves) return widen_pair<kNatural>(out, weight);
  Halves low = dealt<kNatural>(halves_at(a.low + at)), high = dealt<kNatural>(halves_at(weight)) - (low >> 15);
  out[0] = floats_of(even_words(low, high));
  out[1] = floats_of(odd_words(low, high));
}

static inline void first_pair(Floats out[2], const uint8_t *codes, float scale) {
  const Halves low = Halves{} + uint16_t(kFirst & 0xffff);
  Halves high = ((signed_bytes_at(codes) << (kCodeShift - 16)) & 0x87f0) + uint16_t(kFirst >> 16);
  Words even = even_words(low, high), odd = odd_words(low, high);
  out[0] = (floats_of(even) - floats_of(signed_by(kFirst, even))) * scale;
  out[1] = (floats_of(odd) - floats_of(signed_by(kFirst, odd))) * scale;
}

static inline void second_pair(Floats out[2], const uint8_t *codes, float scale) {
  Halves high = (bytes_at(codes) << (kCodeShift - 16)) + uint16_t(kSecond >> 16);
  out[0] = floats_of(even_words(Halves{}, high)) * scale;
  out[1] = floats_of(odd_words(Halves{}, high)) * scale;
}

// What moments are multiplied by first; the scale of a block and the fading are one factor.
struct Fade {
  float m, v;
};

template <int kMoments> static inline Fade fade_of(const UpdateArgs &a, int64_t begin) {
  if (kMoments != kCodes) return {a.beta1, a.beta2};
  return {a.scales[0][begin / kQuant] * a.beta1, a.scales[1][begin / kQuant] * a.beta2};
}

template <int kMoments>
static inline void moment_pairs(const UpdateArgs &a, Floats m[2], Floats v[2], Fade fade, int64_t at) {
  if (kMoments == kCodes) {
    first_pair(m, static_cast<const uint8_t *>(a.moments[0]) + at, fade.m);
    second_pair(v, static_cast<const uint8_t *>(a.moments[1]) + at, fade.v);
    return;
  }
  widen_pair(m, static_cast<const uint16_t *>(a.moments[0]) + at);
  widen_pair(v, static_cast<const uint16_t *>(a.moments[1]) + at);
  for (int j = 0; j < 2; ++j)
    m[j] = m[j] * fade.m, v[j] = v[j] * fade.v;
}

// On their way into rounded moments gradients get their scale later: see [Note: factors put together].  For those of
// float32 they come in natural order.
template <bool kHalves, bool kDecoupled, bool kRounded>
static inline void grad_pair(const UpdateArgs &a, Floats g[2], int64_t at) {
  Floats p[2];
  widen_pair<!kRounded>(g, static_cast<const uint16_t *>(a.grad) + at);
  if (kRounded && kDecoupled) return;
  if (!kDecoupled) weight_pair<kHalves, !kRounded>(p, a, at);
  for (int j = 0; j < 2; ++j) {
    g[j] = g[j] * a.grad_scale;
    if (!kDecoupled) g[j] = g[j] + a.decay * p[j];
  }
}

// The first sweep: the moments take in the gradient.
template <bool kHalves, bool kDecoupled, int kMoments>
static inline void take_in(const UpdateArgs &a, Moments &b, int64_t begin) {
  const Fade fade = fade_of<kMoments>(a, begin);
  Words most_m = {}, most_v = {};
  for (int k = 0; k < kSteps; k += 2) {
    Floats g[2], m[2], v[2];
    grad_pair<kHalves, kDecoupled, true>(a, g, begin + k * kLanes);
    moment_pairs<kMoments>(a, m, v, fade, begin + k * kLanes);
    for (int j = 0; j < 2; ++j) {
      const Floats root = a.into_second * g[j];
      b.m[k + j] = m[j] = m[j] + a.into_first * g[j];
      b.v[k + j] = v[j] = v[j] + root * root;
      b.divisor[k + j] = root_of(v[j]) + a.root_eps;
      most_m = larger(most_m, words_of(m[j]) & 0x7fffffffu);
      most_v = larger(most_v, words_of(v[j]));
    }
  }
  if (kMoments != kCodes) return;
  b.scale[0] = scale_of<false>(largest(most_m));
  b.scale[1] = scale_of<true>(largest(most_v));
}

// The inverse of weight_pair: with halves the weight is rounded to nearest.
template <bool kHalves, bool kNatural = false>
static inline void put_weights(const UpdateArgs &a, const Words bits[2], int64_t at) {
  uint16_t *weight = static_cast<uint16_t *>(a.weight) + at;
  if (!kHalves) return put(weight, upper<16>(bits[0], bits[1]));
  Halves low, high;
  split<kNatural>(&low, &high, bits[0], bits[1]);
  put(a.low + at, low);
  put(weight, high + (low >> 15));
}

template <bool kHalves, bool kDecoupled>
static inline void move_weights(const UpdateArgs &a, const Moments &b, const Words random[2], int64_t at, int k) {
  Floats p[2];
  Words bits[2];
  weight_pair<kHalves>(p, a, at);
  for (int j = 0; j < 2; ++j) {
    if (kDecoupled) p[j] = p[j] * a.keep;
    p[j] = p[j] + (a.root_step * b.m[k + j]) / b.divisor[k + j];
    bits[j] = words_of(p[j]);
    if (!kHalves) bits[j] = bits[j] + ((random[j] * kSpread) >> 16);
  }
  put_weights<kHalves>(a, bits, at);
}

static inline Halves first_steps(const Floats m[2], float inverse, const Words random[2]) {
  Words x[2];
  for (int j = 0; j < 2; ++j) {
    Floats u = floats_of(words_of(m[j]) & 0x7fffffffu) * inverse + as_float(kFirst);
    x[j] = words_of(u) + ((random[j] & 0xfffffu) - kFirst);
  }
  return upper<kCodeShift>(x[0], x[1]);
}

static inline Halves second_steps(const Floats v[2], float inverse, const Words random[2]) {
  Words x[2];
  for (int j = 0; j < 2; ++j)
    x[j] = words_of(v[j] * inverse) + (random[j] >> 12);
  return less(upper<kCodeShift>(x[0], x[1]), kSecond >> kCodeShift);
}

static inline Halves signs_of(const Floats m[2]) {
  return packed_signed(words_of(m[0]), words_of(m[1]));
}

static inline void put_codes(const UpdateArgs &a, const Moments &b, const float inverse[2], const Words random[4],
                             int64_t at, int k) {
  const Floats *m = b.m + k, *v = b.v + k;
  put_signed(static_cast<uint8_t *>(a.moments[0]) + at, first_steps(m, inverse[0], random),
             first_steps(m + 2, inverse[0], random + 2), signs_of(m), signs_of(m + 2));
  put_bytes(static_cast<uint8_t *>(a.moments[1]) + at, second_steps(v, inverse[1], random),
            second_steps(v + 2, inverse[1], random + 2));
}

static inline void put_rounded(const UpdateArgs &a, const Moments &b, const Words random[2], int64_t at, int k) {
  Words m[2], v[2];
  for (int j = 0; j < 2; ++j) {
    m[j] = words_of(b.m[k + j]) + (random[j] & 0xffffu);
    v[j] = words_of(b.v[k + j]) + (random[j] >> 16);
  }
  put(static_cast<uint16_t *>(a.moments[0]) + at, upper<16>(m[0], m[1]));
  put(static_cast<uint16_t *>(a.moments[1]) + at, upper<16>(v[0], v[1]));
}

static inline void put_scales(const UpdateArgs &a, const Moments &b, int64_t begin) {
  for (int i = 0; i < 2; ++i) {
    a.scales[i][begin / kQuant] = b.scale[i];
    if (b.scale[i] == 0.0f) __builtin_memset(static_cast<uint8_t *>(a.moments[i]) + begin, 0, kQuant);
  }
}

// The second sweep, four vectors at a time: the weights move, and the moments become codes or halves.
template <bool kHalves, bool kDecoupled, int kMoments>
static inline void finish(const UpdateArgs &a, const Moments &b, int64_t begin) {
  const float inverse[2] = {kAbove / b.scale[0], kAbove / b.scale[1]};
  Words spread = even_indices() * kSpread + ((a.first_element + uint32_t(begin)) * kSpread + a.keys[0]);
  for (int k = 0; k < kSteps; k += 4) {
    const int64_t at = begin + k * kLanes, later = at + 2 * kLanes;
    Words random[4];
    random_pair(random, a, spread);
    random_pair(random + 2, a, spread + uint32_t(2 * kLanes) * kSpread);
    spread = spread + uint32_t(4 * kLanes) * kSpread;
    move_weights<kHalves, kDecoupled>(a, b, random, at, k);
    move_weights<kHalves, kDecoupled>(a, b, random + 2, later, k + 2);
    if (kMoments == kCodes) {
      put_codes(a, b, inverse, random, at, k);
    } else {
      put_rounded(a, b, random, at, k);
      put_rounded(a, b, random + 2, later, k + 2);
    }
  }
  if (kMoments == kCodes) put_scales(a, b, begin);
}

template <bool kHalves, bool kDecoupled, int kMoments>
static void rounded_loop(const UpdateArgs &args, int64_t begin, int64_t end) {
  const UpdateArgs a = args; // of our own: no store can change it, so its numbers stay in registers
  Moments blocks[2], *block = blocks, *next = blocks + 1;
  if (begin < end) take_in<kHalves, kDecoupled, kMoments>(a, *block, begin);
  for (; begin < end; begin += kQuant) {
    if (begin + kQuant < end) take_in<kHalves, kDecoupled, kMoments>(a, *next, begin + kQuant);
    finish<kHalves, kDecoupled, kMoments>(a, *block, begin);
    Moments *done = block;
    block = next, next = done;
  }
}

// [Note: asked ahead] The lines that come next are asked for as not to be kept (prefetchnta), which is meant to bring
// them into the first cache without pushing others through the second and third.  Only here: asked for in bursts, a
// block at a time, rounded moments took up to a third longer (docs/log.md).
constexpr int64_t kAhead = 256; // elements, 56 lines: nearer they come too late, further ahead they are gone again

constexpr int64_t kLine = 32; // elements, of halves a line and of numbers two

// Always inlined: gcc leaves out calls of a function that does nothing but ask.
[[gnu::always_inline]] static inline void ask_ahead(const UpdateArgs &a, int64_t at) {
  const void *const arrays[] = {a.grad, a.weight, a.low};
  for (const void *halves : arrays)
    __builtin_prefetch(static_cast<const uint16_t *>(halves) + at, 0, 0);
  for (const void *moment : a.moments)
    for (int i = 0; i < kLine; i += 16)
      __builtin_prefetch(static_cast<const float *>(moment) + at + i, 0, 0);
}

// As adam_loop in kernels.inl.
template <bool kDecoupled> [[gnu::always_inline]] static inline void exact_pair(const UpdateArgs &a, int64_t at) {
  float *first = static_cast<float *>(a.moments[0]) + at, *second = static_cast<float *>(a.moments[1]) + at;
  Floats g[2], p[2];
  Words bits[2];
  grad_pair<true, kDecoupled, false>(a, g, at);
  weight_pair<true, true>(p, a, at);
  for (int j = 0; j < 2; ++j) {
    Floats m = floats_at(first + j * kLanes), v = floats_at(second + j * kLanes);
    if (kDecoupled) p[j] = p[j] * a.keep;
    m = m + a.one_minus_beta1 * (g[j] - m);
    v = v * a.beta2 + (a.one_minus_beta2 * g[j]) * g[j];
    p[j] = p[j] + (a.minus_step_size * m) / (root_of(v) * a.inverse_root2 + a.eps);
    put(first + j * kLanes, m);
    put(second + j * kLanes, v);
    bits[j] = words_of(p[j]);
  }
  put_weights<true, true>(a, bits, at);
}

// Float32 moments need no random bits and no scale: one sweep, a line of halves in a turn.
template <bool kDecoupled> static void exact_loop(const UpdateArgs &args, int64_t begin, int64_t end) {
  const UpdateArgs a = args;
  for (int64_t at = begin; at < end; at += kLine) {
    ask_ahead(a, at + kAhead);
    for (int64_t i = 0; i < kLine; i += 2 * kLanes)
      exact_pair<kDecoupled>(a, at + i);
  }
}

using Loop = void (*)(const UpdateArgs &, int64_t, int64_t);

template <bool kDecoupled> static Loop fused_loop(const UpdateArgs &a) {
  const bool halves = a.weight_format == kSplit;
  switch (a.moment_format) {
  case kCodes:
    return halves ? rounded_loop<true, kDecoupled, kCodes> : rounded_loop<false, kDecoupled, kCodes>;
  case kBf16:
    return halves ? rounded_loop<true, kDecoupled, kBf16> : rounded_loop<false, kDecoupled, kBf16>;
  default: // torch's lerp takes the nearer end: see adam_loop
    return halves && a.one_minus_beta1 < 0.5f ? exact_loop<kDecoupled> : nullptr;
  }
}

// Does the whole blocks of [begin, end) if there is a loop for these formats; returns where the rest begins.
static int64_t update_fused(const UpdateArgs &a, int64_t begin, int64_t end) {
  if (a.rule != kAdam || a.weight_format == kWhole || !a.grad_is_bf16) return begin;
  const Loop loop = a.decoupled ? fused_loop<true>(a) : fused_loop<false>(a);
  if (!loop) return begin;
  const int64_t middle = begin + (end - begin) / kQuant * kQuant;
  loop(a, begin, middle);
  return middle;
}
