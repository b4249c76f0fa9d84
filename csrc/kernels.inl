// The loops themselves; included once per instruction set, inside a namespace of its own, after the target is set.
// Everything here is local to that namespace, so that no wide instruction can leak into a function shared with others.

typedef double F64x4 __attribute__((vector_size(32)));

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
// addcdiv, where the division by the correction is a product with its inverse: of a root and two divisions, the unit
// that does them is the bottleneck.  torch's lerp and addcmul are compiled to fused multiply-adds on this kind of
// processor, ours are not (see [Note: the same bits everywhere]).  These are the differences: one rounding in each
// moment and step, and one in the denominator.
template <class Grad, bool kHalves, bool kDecoupled, bool kFar>
static void adam_loop(const UpdateArgs &a, int64_t begin, int64_t end) {
  float *__restrict full = static_cast<float *>(a.weight);
  uint16_t *__restrict high = static_cast<uint16_t *>(a.weight);
  uint16_t *__restrict low = a.low;
  float *__restrict exp_avg = static_cast<float *>(a.moments[0]);
  float *__restrict exp_avg_sq = static_cast<float *>(a.moments[1]);
  const Grad *__restrict grad = static_cast<const Grad *>(a.grad);
  const float scale = a.grad_scale, keep = a.keep, decay = a.decay;
  const float w1 = a.one_minus_beta1, far1 = 1.0f - w1, beta2 = a.beta2, w2 = a.one_minus_beta2;
  const float root = a.inverse_root2, eps = a.eps, minus = a.minus_step_size;
  for (int64_t i = begin; i < end; ++i) {
    float p = kHalves ? as_float(joined(high[i], low[i])) : full[i];
    float g = load_grad(grad, i) * scale;
    if (kDecoupled)
      p = p * keep;
    else
      g = g + decay * p;
    float m = exp_avg[i];
    m = kFar ? g - (g - m) * far1 : m + w1 * (g - m); // torch's lerp takes the nearer end
    float v = exp_avg_sq[i] * beta2 + (w2 * g) * g;
    float denom = __builtin_sqrtf(v) * root + eps;
    p = p + (minus * m) / denom;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (kHalves) {
      uint32_t bits = standard_nan(as_bits(p));
      high[i] = uint16_t(high_half(bits));
      low[i] = uint16_t(bits);
    } else {
      full[i] = p;
    }
  }
}

template <class Grad, bool kHalves> static void adam_decay(const UpdateArgs &a, int64_t begin, int64_t end) {
  bool far = a.one_minus_beta1 >= 0.5f;
  if (a.decoupled)
    (far ? adam_loop<Grad, kHalves, true, true> : adam_loop<Grad, kHalves, true, false>)(a, begin, end);
  else
    (far ? adam_loop<Grad, kHalves, false, true> : adam_loop<Grad, kHalves, false, false>)(a, begin, end);
}

static void adam_part(const UpdateArgs &a, int64_t begin, int64_t end) {
  const bool halves = a.weight_format == kSplit;
  if (a.grad_is_bf16)
    (halves ? adam_decay<uint16_t, true> : adam_decay<uint16_t, false>)(a, begin, end);
  else
    (halves ? adam_decay<float, true> : adam_decay<float, false>)(a, begin, end);
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

#include "codec.inl"
#include "update.inl"

struct Nothing {}; // where a drain that only sums writes

static inline double square(float value) {
  return double(value) * double(value);
}

// One block through a drain: each writes `out`, and the squares of what it wrote.  Two plain loops over a block that
// stays in the first cache: compilers turn both into wide code, but not one loop that converts and sums.

static void pass(uint16_t *__restrict out, const float *__restrict in, double *__restrict squares, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t rounded = nearest_even(as_bits(in[i]));
    out[i] = uint16_t(rounded);
    squares[i] = square(as_float(rounded << 16));
  }
}

static void pass(float *__restrict out, const float *__restrict in, double *__restrict squares, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = in[i];
    squares[i] = square(in[i]);
  }
}

static void pass(Nothing *, const uint16_t *__restrict in, double *__restrict squares, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    squares[i] = square(as_float(uint32_t(in[i]) << 16));
}

static void pass(Nothing *, const float *__restrict in, double *__restrict squares, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    squares[i] = square(in[i]);
}

template <class Out> static Out *ahead(Out *out, int64_t count) {
  return out + count;
}

template <> [[maybe_unused]] Nothing *ahead(Nothing *out, int64_t) {
  return out;
}

static inline F64x4 four(const double *at) {
  F64x4 values;
  __builtin_memcpy(&values, at, sizeof(values));
  return values;
}

// The sum of squares of one piece: element i goes to lane i mod 16, the lanes are then added pairwise.  A square of a
// float is exact in double, so only the order of the additions matters, and it is fixed.
template <class Out, class In> static double piece(Out *out, const In *in, int64_t count) {
  constexpr int64_t kBlock = 512;
  double squares[kBlock];
  F64x4 a = {}, b = {}, c = {}, d = {};
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int64_t length = count - begin < kBlock ? count - begin : kBlock;
    pass(ahead(out, begin), in + begin, squares, length);
    for (; length % 16; ++length)
      squares[length] = 0.0; // changes no sum
    for (int64_t i = 0; i < length; i += 16) {
      a += four(squares + i);
      b += four(squares + i + 4);
      c += four(squares + i + 8);
      d += four(squares + i + 12);
    }
  }
  F64x4 sum = (a + c) + (b + d);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <class Out, class In> static double pieces(Out *out, const In *in, int64_t count) {
  double total = 0.0;
  for (int64_t i = 0; i < count; i += kPiece)
    total += piece(ahead(out, i), in + i, count - i < kPiece ? count - i : kPiece);
  return total;
}

template <class In> static double sum_squares(const In *in, int64_t count) {
  return pieces(static_cast<Nothing *>(nullptr), in, count);
}

static constexpr Kernels make_table(const char *name) {
  return Kernels{name,
                 update_part,
                 split_master,
                 join_master,
                 widen,
                 narrow,
                 pieces<uint16_t, float>,
                 pieces<float, float>,
                 sum_squares<uint16_t>,
                 sum_squares<float>,
                 {encode_all<false>, encode_all<true>},
                 {decode_all<false>, decode_all<true>}};
}
