// Adam over bfloat16 weights with bfloat16 gradients: whole blocks by hand-made vectors, with the bits of update.inl,
// which does what is left.  Included by update.inl, for AVX-512 and AVX2 only.
//
// A compiler's own loops over the formats run at 0.8 to 1.1 of the speed of float32 moments: bytes cost them more
// instructions than the memory saves.  Rounded moments go through the first cache in three short sweeps a block: one
// long loop would be a chain of some 80 cycles for each vector, of which a processor can only keep two or three under
// way.
//
// A NaN needs no care here: with bfloat16 gradients the low half of every NaN is zero, so no rounding can carry it
// away.

#include "lanes.inl"

constexpr int kSteps = kQuant / kLanes;

struct Vectors { // of one block, in pairs of an even and an odd one
  Floats m[kSteps], v[kSteps];
  Words random[kSteps];
};

static inline Words random_words(const UpdateArgs &a, Words spread) {
  Words x = (spread ^ (spread >> 16)) * kRound1 + a.keys[1];
  return (x ^ (x >> 15)) * kRound2;
}

static inline void widen_pair(Floats out[2], const uint16_t *at) {
  Halves high = halves_at(at);
  out[0] = floats_of(even_words(Halves{}, high));
  out[1] = floats_of(odd_words(Halves{}, high));
}

template <bool kHalves> static inline void weight_pair(Floats out[2], const UpdateArgs &a, int64_t at) {
  const uint16_t *weight = static_cast<const uint16_t *>(a.weight) + at;
  if (!kHalves) return widen_pair(out, weight);
  Halves low = halves_at(a.low + at), high = halves_at(weight) - (low >> 15);
  out[0] = floats_of(even_words(low, high));
  out[1] = floats_of(odd_words(low, high));
}

static inline void first_pair(Floats out[2], const uint8_t *codes, float scale) {
  Halves code = signed_bytes_at(codes), zero = {}, low = zero + uint16_t(kFirst & 0xffff);
  Halves high = (magnitude(code) << (kCodeShift - 16)) + uint16_t(kFirst >> 16), sign = code & uint16_t(0x8000);
  Floats even = (floats_of(even_words(low, high)) - as_float(kFirst)) * scale;
  Floats odd = (floats_of(odd_words(low, high)) - as_float(kFirst)) * scale;
  out[0] = floats_of(words_of(even) | even_words(zero, sign));
  out[1] = floats_of(words_of(odd) | odd_words(zero, sign));
}

static inline void second_pair(Floats out[2], const uint8_t *codes, float scale) {
  Halves high = (bytes_at(codes) << (kCodeShift - 16)) + uint16_t(kSecond >> 16);
  out[0] = floats_of(even_words(Halves{}, high)) * scale;
  out[1] = floats_of(odd_words(Halves{}, high)) * scale;
}

// The first sweep: the moments take in the gradient.  `most` gets the bits of their largest magnitudes.
template <bool kHalves, bool kDecoupled, int kMoments>
static inline void move_moments(const UpdateArgs &a, Vectors &b, int64_t begin, uint32_t most[2]) {
  constexpr bool kCoded = kMoments == kCodes;
  const float scale_m = kCoded ? a.scales[0][begin / kQuant] : 0, scale_v = kCoded ? a.scales[1][begin / kQuant] : 0;
  Words most_m = {}, most_v = {};
  for (int k = 0; k < kSteps; k += 2) {
    const int64_t at = begin + k * kLanes;
    Floats g[2], m[2], v[2], p[2];
    widen_pair(g, static_cast<const uint16_t *>(a.grad) + at);
    if (!kDecoupled) weight_pair<kHalves>(p, a, at);
    if (kCoded) {
      first_pair(m, static_cast<const uint8_t *>(a.moments[0]) + at, scale_m);
      second_pair(v, static_cast<const uint8_t *>(a.moments[1]) + at, scale_v);
    } else {
      widen_pair(m, static_cast<const uint16_t *>(a.moments[0]) + at);
      widen_pair(v, static_cast<const uint16_t *>(a.moments[1]) + at);
    }
    for (int j = 0; j < 2; ++j) {
      g[j] = g[j] * a.grad_scale;
      if (!kDecoupled) g[j] = g[j] + a.decay * p[j];
      b.m[k + j] = m[j] = m[j] + a.one_minus_beta1 * (g[j] - m[j]);
      b.v[k + j] = v[j] = v[j] * a.beta2 + (a.one_minus_beta2 * g[j]) * g[j];
      most_m = larger(most_m, words_of(m[j]) & 0x7fffffffu);
      most_v = larger(most_v, words_of(v[j]));
    }
  }
  most[0] = kCoded ? largest(most_m) : 0;
  most[1] = kCoded ? largest(most_v) : 0;
}

// The second sweep: the weights move, and random bits are drawn while the dividing unit is busy.
template <bool kHalves, bool kDecoupled>
static inline void move_weights(const UpdateArgs &a, Vectors &b, int64_t begin) {
  const Words even = even_indices() * kSpread + ((a.first_element + uint32_t(begin)) * kSpread + a.keys[0]);
  for (int k = 0; k < kSteps; k += 2) {
    const int64_t at = begin + k * kLanes;
    Floats p[2];
    Words bits[2], up[2];
    weight_pair<kHalves>(p, a, at);
    for (int j = 0; j < 2; ++j) {
      if (kDecoupled) p[j] = p[j] * a.keep;
      p[j] = p[j] + (a.minus_step_size * b.m[k + j]) / (root_of(b.v[k + j]) * a.inverse_root2 + a.eps);
      b.random[k + j] = random_words(a, even + uint32_t(k * kLanes + 4 * j) * kSpread);
      bits[j] = words_of(p[j]);
      up[j] = kHalves ? Words{} + 0x8000u : ((b.random[k + j] ^ a.keys[2]) * kSpread) >> 16;
    }
    put(static_cast<uint16_t *>(a.weight) + at, packed((bits[0] + up[0]) >> 16, (bits[1] + up[1]) >> 16));
    if (kHalves) put(a.low + at, packed(bits[0] & 0xffffu, bits[1] & 0xffffu));
  }
}

static inline Words first_code(Floats m, float inverse, Words random) {
  Words up = ((random & 0xffffu) << 4) + (8u - kFirst);
  Words x = words_of(floats_of(words_of(m) & 0x7fffffffu) * inverse + as_float(kFirst));
  return signed_by((x + up) >> kCodeShift, words_of(m));
}

static inline Words second_code(Floats v, float inverse, Words random) {
  Words up = ((random >> 16) << 4) + (8u - kSecond);
  Words x = words_of(at_least(v * inverse, Floats{} + as_float(kSecond)));
  return (x + up) >> kCodeShift;
}

// The third sweep: the new moments become codes and scales.
static inline void store_codes(const UpdateArgs &a, const Vectors &b, int64_t begin, const uint32_t most[2]) {
  uint8_t *first = static_cast<uint8_t *>(a.moments[0]) + begin, *second = static_cast<uint8_t *>(a.moments[1]) + begin;
  const float scale_m = scale_of<false>(most[0]), scale_v = scale_of<true>(most[1]);
  a.scales[0][begin / kQuant] = scale_m;
  a.scales[1][begin / kQuant] = scale_v;
  const float inverse_m = 1.0f / scale_m, inverse_v = 1.0f / scale_v;
  for (int k = 0; k < kSteps; k += 4) {
    Words m[4], v[4];
    for (int j = 0; j < 4; ++j) {
      m[j] = first_code(b.m[k + j], inverse_m, b.random[k + j]);
      v[j] = second_code(b.v[k + j], inverse_v, b.random[k + j]);
    }
    put_bytes(first + k * kLanes, packed_signed(m[0], m[1]), packed_signed(m[2], m[3]));
    put_bytes(second + k * kLanes, packed(v[0], v[1]), packed(v[2], v[3]));
  }
  if (scale_m == 0.0f) __builtin_memset(first, 0, kQuant);
  if (scale_v == 0.0f) __builtin_memset(second, 0, kQuant);
}

// The third sweep for moments of 16 bits.
static inline void store_rounded(const UpdateArgs &a, const Vectors &b, int64_t begin) {
  uint16_t *first = static_cast<uint16_t *>(a.moments[0]) + begin;
  uint16_t *second = static_cast<uint16_t *>(a.moments[1]) + begin;
  for (int k = 0; k < kSteps; k += 2) {
    Words m[2], v[2];
    for (int j = 0; j < 2; ++j) {
      m[j] = (words_of(b.m[k + j]) + (b.random[k + j] & 0xffffu)) >> 16;
      v[j] = (words_of(b.v[k + j]) + (b.random[k + j] >> 16)) >> 16;
    }
    put(first + k * kLanes, packed(m[0], m[1]));
    put(second + k * kLanes, packed(v[0], v[1]));
  }
}

template <bool kHalves, bool kDecoupled, int kMoments>
static void rounded_loop(const UpdateArgs &args, int64_t begin, int64_t end) {
  const UpdateArgs a = args; // of our own: no store can change it, so its numbers stay in registers
  Vectors b;
  for (; begin < end; begin += kQuant) {
    uint32_t most[2];
    move_moments<kHalves, kDecoupled, kMoments>(a, b, begin, most);
    move_weights<kHalves, kDecoupled>(a, b, begin);
    if (kMoments == kCodes)
      store_codes(a, b, begin, most);
    else
      store_rounded(a, b, begin);
  }
}

// Float32 moments need no random bits and no scale: one sweep.
template <bool kDecoupled> static void exact_loop(const UpdateArgs &args, int64_t begin, int64_t end) {
  const UpdateArgs a = args;
  float *first = static_cast<float *>(a.moments[0]), *second = static_cast<float *>(a.moments[1]);
  for (int64_t at = begin; at < end; at += 2 * kLanes) {
    Floats g[2], p[2], m[2], v[2];
    Words bits[2];
    widen_pair(g, static_cast<const uint16_t *>(a.grad) + at);
    weight_pair<true>(p, a, at);
    floats_at(m, first + at);
    floats_at(v, second + at);
    for (int j = 0; j < 2; ++j) {
      g[j] = g[j] * a.grad_scale;
      if (kDecoupled)
        p[j] = p[j] * a.keep;
      else
        g[j] = g[j] + a.decay * p[j];
      m[j] = m[j] + a.one_minus_beta1 * (g[j] - m[j]);
      v[j] = v[j] * a.beta2 + (a.one_minus_beta2 * g[j]) * g[j];
      p[j] = p[j] + (a.minus_step_size * m[j]) / (root_of(v[j]) * a.inverse_root2 + a.eps);
      bits[j] = words_of(p[j]);
    }
    put_floats(first + at, m);
    put_floats(second + at, v);
    put(static_cast<uint16_t *>(a.weight) + at, packed((bits[0] + 0x8000u) >> 16, (bits[1] + 0x8000u) >> 16));
    put(a.low + at, packed(bits[0] & 0xffffu, bits[1] & 0xffffu));
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
