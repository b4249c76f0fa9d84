// The loops themselves; included once per instruction set, inside a namespace of its own, after the target is set.
// Everything here is local to that namespace, so that no wide instruction can leak into a function shared with others.

typedef double F64x8 __attribute__((vector_size(64)));
typedef float F32x8 __attribute__((vector_size(32)));
typedef uint32_t U32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));

static inline float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t as_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

// Round to nearest, ties to even, as torch's .to(bfloat16); a NaN stays one (rounding it could carry into infinity).
static inline uint32_t nearest_even(uint32_t bits) {
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

// [Note: split master] weight = master rounded to nearest, ties away from zero; low = its low 16 bits.  The halves give
// the master back bit by bit for every finite number and infinity, also where the weight itself rounds to infinity.
// Only a NaN is replaced, by the standard one: rounding some NaNs would show the model a weight of zero or infinity.
static inline uint32_t standard_nan(uint32_t master) {
  return (master & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : master;
}

static inline uint32_t high_half(uint32_t master) {
  return (master + 0x8000u) >> 16;
}

static inline uint32_t joined(uint32_t weight, uint32_t low) {
  return ((weight - (low >> 15)) << 16) | low;
}

static inline float load_grad(const float *grad, int64_t i) {
  return grad[i];
}

static inline float load_grad(const uint16_t *grad, int64_t i) {
  return as_float(uint32_t(grad[i]) << 16);
}

// The order of operations is torch's single-tensor Adam: mul (decay), lerp, mul + addcmul, sqrt / correction + eps,
// addcdiv.  torch's lerp and addcmul are compiled to fused multiply-adds on this kind of processor, ours are not (see
// [Note: the same bits everywhere]); that is the whole difference, one rounding in each moment and step.
template <class Grad, bool kSplit, bool kDecoupled, bool kFar>
static void adam_loop(const AdamArgs &a, int64_t begin, int64_t end) {
  float *__restrict full = static_cast<float *>(a.weight);
  uint16_t *__restrict high = static_cast<uint16_t *>(a.weight);
  uint16_t *__restrict low = a.low;
  float *__restrict exp_avg = a.exp_avg;
  float *__restrict exp_avg_sq = a.exp_avg_sq;
  const Grad *__restrict grad = static_cast<const Grad *>(a.grad);
  const float scale = a.grad_scale, keep = a.keep, decay = a.decay;
  const float w1 = a.one_minus_beta1, far1 = 1.0f - w1, beta2 = a.beta2, w2 = a.one_minus_beta2;
  const float root = a.root_correction2, eps = a.eps, minus = a.minus_step_size;
  for (int64_t i = begin; i < end; ++i) {
    float p = kSplit ? as_float(joined(high[i], low[i])) : full[i];
    float g = load_grad(grad, i) * scale;
    if (kDecoupled)
      p = p * keep;
    else
      g = g + decay * p;
    float m = exp_avg[i];
    m = kFar ? g - (g - m) * far1 : m + w1 * (g - m); // torch's lerp takes the nearer end
    float v = exp_avg_sq[i] * beta2 + (w2 * g) * g;
    float denom = __builtin_sqrtf(v) / root + eps;
    p = p + (minus * m) / denom;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (kSplit) {
      uint32_t bits = standard_nan(as_bits(p));
      high[i] = uint16_t(high_half(bits));
      low[i] = uint16_t(bits);
    } else {
      full[i] = p;
    }
  }
}

template <class Grad, bool kSplit> static void adam_decay(const AdamArgs &a, int64_t begin, int64_t end) {
  bool far = a.one_minus_beta1 >= 0.5f;
  if (a.decoupled)
    (far ? adam_loop<Grad, kSplit, true, true> : adam_loop<Grad, kSplit, true, false>)(a, begin, end);
  else
    (far ? adam_loop<Grad, kSplit, false, true> : adam_loop<Grad, kSplit, false, false>)(a, begin, end);
}

static void adam_part(const AdamArgs &a, int64_t begin, int64_t end) {
  if (a.grad_is_bf16)
    (a.low ? adam_decay<uint16_t, true> : adam_decay<uint16_t, false>)(a, begin, end);
  else
    (a.low ? adam_decay<float, true> : adam_decay<float, false>)(a, begin, end);
}

static void split_master(uint16_t *__restrict weight, uint16_t *__restrict low, const uint32_t *__restrict master,
                         int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = standard_nan(master[i]);
    weight[i] = uint16_t(high_half(bits));
    low[i] = uint16_t(bits);
  }
}

static void join_master(uint32_t *__restrict master, const uint16_t *__restrict weight, const uint16_t *__restrict low,
                        int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    master[i] = joined(weight[i], low[i]);
}

static void widen(uint32_t *__restrict out, const uint16_t *__restrict in, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = uint32_t(in[i]) << 16;
}

static void narrow(uint16_t *__restrict out, const uint32_t *__restrict in, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = uint16_t(nearest_even(in[i]));
}

// Eight elements through a drain: what is written comes back as float, for the sum.
struct ToBf16 {
  typedef float In;
  typedef uint16_t Out;
  static F32x8 pass(Out *out, const In *in) {
    U32x8 bits;
    __builtin_memcpy(&bits, in, 32);
    U32x8 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    U32x8 is_nan = (U32x8)((bits & 0x7fffffffu) > 0x7f800000u);
    rounded = (rounded & ~is_nan) | (0x7fc0u & is_nan);
    U16x8 half = __builtin_convertvector(rounded, U16x8);
    __builtin_memcpy(out, &half, 16);
    return (F32x8)(rounded << 16);
  }
};

struct ToFp32 {
  typedef float In;
  typedef float Out;
  static F32x8 pass(Out *out, const In *in) {
    F32x8 value;
    __builtin_memcpy(&value, in, 32);
    __builtin_memcpy(out, &value, 32);
    return value;
  }
};

struct OfBf16 {
  typedef uint16_t In;
  typedef void Out;
  static F32x8 pass(Out *, const In *in) {
    U16x8 half;
    __builtin_memcpy(&half, in, 16);
    return (F32x8)(__builtin_convertvector(half, U32x8) << 16);
  }
};

struct OfFp32 {
  typedef float In;
  typedef void Out;
  static F32x8 pass(Out *, const In *in) {
    F32x8 value;
    __builtin_memcpy(&value, in, 32);
    return value;
  }
};

static inline char *ahead(void *, int64_t) {
  return nullptr;
}

template <class T> static inline T *ahead(T *at, int64_t count) {
  return at + count;
}

static inline void store(void *, const void *, int64_t) {}

template <class T> static inline void store(T *out, const T *from, int64_t count) {
  __builtin_memcpy(out, from, size_t(count) * sizeof(T));
}

// The sum of squares of one piece: element i goes to lane i mod 16, the lanes are then added pairwise.  A square of a
// float is exact in double, so only the order of the additions matters, and it is fixed.
template <class Step> static double piece(typename Step::Out *out, const typename Step::In *in, int64_t count) {
  F64x8 even = {}, odd = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    F64x8 a = __builtin_convertvector(Step::pass((typename Step::Out *)ahead(out, i), in + i), F64x8);
    F64x8 b = __builtin_convertvector(Step::pass((typename Step::Out *)ahead(out, i + 8), in + i + 8), F64x8);
    even += a * a;
    odd += b * b;
  }
  if (i < count) { // the rest in a full step padded with zeros, which change no sum
    typename Step::In rest[16] = {};
    float room[16];
    __builtin_memcpy(rest, in + i, size_t(count - i) * sizeof(rest[0]));
    auto *to = reinterpret_cast<typename Step::Out *>(room);
    F64x8 a = __builtin_convertvector(Step::pass(to, rest), F64x8);
    F64x8 b = __builtin_convertvector(Step::pass((typename Step::Out *)ahead(to, 8), rest + 8), F64x8);
    even += a * a;
    odd += b * b;
    store((typename Step::Out *)ahead(out, i), to, count - i);
  }
  F64x8 lanes = even + odd;
  double a = (lanes[0] + lanes[4]) + (lanes[1] + lanes[5]);
  double b = (lanes[2] + lanes[6]) + (lanes[3] + lanes[7]);
  return a + b;
}

template <class Step> static double pieces(typename Step::Out *out, const typename Step::In *in, int64_t count) {
  double total = 0.0;
  for (int64_t i = 0; i < count; i += kPiece)
    total += piece<Step>((typename Step::Out *)ahead(out, i), in + i, count - i < kPiece ? count - i : kPiece);
  return total;
}

static double sum_squares_bf16(const uint16_t *in, int64_t count) {
  return pieces<OfBf16>(nullptr, in, count);
}

static double sum_squares_fp32(const float *in, int64_t count) {
  return pieces<OfFp32>(nullptr, in, count);
}

static constexpr Kernels make_table(const char *name) {
  return Kernels{name,   adam_part,      split_master,   join_master,      widen,
                 narrow, pieces<ToBf16>, pieces<ToFp32>, sum_squares_bf16, sum_squares_fp32};
}
