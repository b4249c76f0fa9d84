// Every rule with every format: a block is brought into arrays of the first cache, moved by the rule and stored again.
// Included by kernels.inl, after codec.inl.  The formats that are used most have loops of their own (adam_loop in
// kernels.inl, fused.inl); where those exist, this is their twin with equal bits.

// [Note: factors put together] With moments that are rounded at random, Adam need not have torch's roundings: where two
// constants meet they are one.  A gradient that no decay is added to keeps its scale out of the loop: it is in the
// factors by which the gradient enters the moments, for the second as a root, so that it is squared with the gradient
// and stays in range.  The second correction moves from the root to eps and the step (Kingma and Ba 2015, the end of
// section 2).

struct Block {
  float weight[kQuant], grad[kQuant], moment[2][kQuant];
  uint32_t random[kQuant], up[kQuant];
};

static void load_block(const UpdateArgs &a, Block &b, int64_t begin, int64_t count) {
  const uint16_t *high = static_cast<const uint16_t *>(a.weight) + begin;
  if (a.weight_format == kSplit)
    for (int64_t i = 0; i < count; ++i)
      b.weight[i] = as_float(joined(high[i], a.low[begin + i]));
  else if (a.weight_format == kAlone)
    for (int64_t i = 0; i < count; ++i)
      b.weight[i] = as_float(uint32_t(high[i]) << 16);
  else
    for (int64_t i = 0; i < count; ++i)
      b.weight[i] = static_cast<const float *>(a.weight)[begin + i];
  const float scale = a.rule == kAdam && a.moment_format != kFp32 && a.decoupled ? 1.0f : a.grad_scale;
  if (a.grad_is_bf16)
    for (int64_t i = 0; i < count; ++i)
      b.grad[i] = load_grad(static_cast<const uint16_t *>(a.grad), begin + i) * scale;
  else
    for (int64_t i = 0; i < count; ++i)
      b.grad[i] = load_grad(static_cast<const float *>(a.grad), begin + i) * scale;
}

// Rounded moments of Adam come multiplied by their beta, within the scale if they have one.
static void load_moment(const UpdateArgs &a, int k, float *__restrict out, int64_t begin, int64_t count) {
  const float fade = a.rule != kAdam ? 1.0f : k ? a.beta2 : a.beta1;
  if (a.moment_format == kBf16) {
    const uint16_t *in = static_cast<const uint16_t *>(a.moments[k]) + begin;
    for (int64_t i = 0; i < count; ++i)
      out[i] = as_float(uint32_t(in[i]) << 16) * fade;
  } else if (a.moment_format == kCodes) {
    const uint8_t *codes = static_cast<const uint8_t *>(a.moments[k]) + begin;
    (k ? decode_block<true> : decode_block<false>)(out, codes, a.scales[k][begin / kQuant] * fade, count);
  } else {
    const float *in = static_cast<const float *>(a.moments[k]) + begin;
    for (int64_t i = 0; i < count; ++i)
      out[i] = in[i];
  }
}

static void store_moment(const UpdateArgs &a, int k, Block &b, int64_t begin, int64_t count) {
  const float *__restrict in = b.moment[k];
  if (a.moment_format == kFp32) {
    float *__restrict out = static_cast<float *>(a.moments[k]) + begin;
    for (int64_t i = 0; i < count; ++i)
      out[i] = in[i];
    return;
  }
  if (a.moment_format == kBf16) {
    uint16_t *__restrict out = static_cast<uint16_t *>(a.moments[k]) + begin;
    for (int64_t i = 0; i < count; ++i)
      out[i] = at_random(in[i], k ? b.random[i] >> 16 : b.random[i] & 0xffffu);
  } else {
    for (int64_t i = 0; i < count; ++i)
      b.up[i] = threshold(b.random[i], k == 1);
    uint8_t *codes = static_cast<uint8_t *>(a.moments[k]) + begin;
    (k ? encode_block<true> : encode_block<false>)(codes, a.scales[k] + begin / kQuant, in, b.up, count);
  }
}

static void store_weight(const UpdateArgs &a, const Block &b, int64_t begin, int64_t count) {
  uint16_t *__restrict high = static_cast<uint16_t *>(a.weight) + begin;
  if (a.weight_format == kSplit)
    split_master(high, a.low + begin, reinterpret_cast<const uint32_t *>(b.weight), count);
  else if (a.weight_format == kAlone)
    for (int64_t i = 0; i < count; ++i)
      high[i] = at_random(b.weight[i], weight_bits(b.random[i]));
  else
    __builtin_memcpy(static_cast<float *>(a.weight) + begin, b.weight, size_t(count) * sizeof(float));
}

// The decay: of the weight itself, or as a part of the gradient.
static void decay_block(const UpdateArgs &a, Block &b, int64_t count) {
  if (a.decoupled)
    for (int64_t i = 0; i < count; ++i)
      b.weight[i] = b.weight[i] * a.keep;
  else
    for (int64_t i = 0; i < count; ++i)
      b.grad[i] = b.grad[i] + a.decay * b.weight[i];
}

// Kingma and Ba 2015, algorithm 1; with float32 moments as adam_loop.
static void adam_block(const UpdateArgs &a, Block &b, int64_t count) {
  float *__restrict p = b.weight, *__restrict m = b.moment[0], *__restrict v = b.moment[1];
  const float *__restrict g = b.grad;
  const float w1 = a.one_minus_beta1, far1 = 1.0f - w1, w2 = a.one_minus_beta2;
  const bool far = w1 >= 0.5f;
  for (int64_t i = 0; i < count; ++i) {
    m[i] = far ? g[i] - (g[i] - m[i]) * far1 : m[i] + w1 * (g[i] - m[i]);
    v[i] = v[i] * a.beta2 + (w2 * g[i]) * g[i];
    float denom = __builtin_sqrtf(v[i]) * a.inverse_root2 + a.eps;
    p[i] = p[i] + (a.minus_step_size * m[i]) / denom;
  }
}

// The same with rounded moments, which are faded already.
static void rounded_block(const UpdateArgs &a, Block &b, int64_t count) {
  float *__restrict p = b.weight, *__restrict m = b.moment[0], *__restrict v = b.moment[1];
  const float *__restrict g = b.grad;
  for (int64_t i = 0; i < count; ++i) {
    const float root = a.into_second * g[i];
    m[i] = m[i] + a.into_first * g[i];
    v[i] = v[i] + root * root;
    p[i] = p[i] + (a.root_step * m[i]) / (__builtin_sqrtf(v[i]) + a.root_eps);
  }
}

// Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
static void lion_block(const UpdateArgs &a, Block &b, int64_t count) {
  float *__restrict p = b.weight, *__restrict m = b.moment[0];
  const float *__restrict g = b.grad;
  for (int64_t i = 0; i < count; ++i) {
    float c = m[i] * a.beta1 + a.one_minus_beta1 * g[i];
    p[i] = p[i] + (c > 0.0f ? a.minus_step_size : c < 0.0f ? -a.minus_step_size : 0.0f);
    m[i] = m[i] * a.beta2 + a.one_minus_beta2 * g[i];
  }
}

// torch.optim.SGD: the first buffer is the gradient, as it is from a buffer of zeros.
static void sgd_block(const UpdateArgs &a, Block &b, int64_t count) {
  float *__restrict p = b.weight, *__restrict m = b.moment[0];
  const float *__restrict g = b.grad;
  if (a.num_moments)
    for (int64_t i = 0; i < count; ++i) {
      m[i] = m[i] * a.momentum + g[i];
      p[i] = p[i] + a.minus_step_size * m[i];
    }
  else
    for (int64_t i = 0; i < count; ++i)
      p[i] = p[i] + a.minus_step_size * g[i];
}

static void move_block(const UpdateArgs &a, Block &b, int64_t count) {
  decay_block(a, b, count);
  if (a.rule == kAdam)
    (a.moment_format == kFp32 ? adam_block : rounded_block)(a, b, count);
  else
    (a.rule == kLion ? lion_block : sgd_block)(a, b, count);
}

static void update_blocks(const UpdateArgs &a, int64_t begin, int64_t end) {
  Block b;
  const bool random = a.weight_format == kAlone || (a.num_moments && a.moment_format != kFp32);
  for (; begin < end; begin += kQuant) {
    int64_t count = end - begin < kQuant ? end - begin : kQuant;
    load_block(a, b, begin, count);
    for (int k = 0; k < a.num_moments; ++k)
      load_moment(a, k, b.moment[k], begin, count);
    if (random)
      for (int64_t i = 0; i < count; ++i)
        b.random[i] = random_bits(a, uint32_t(begin + i));
    move_block(a, b, count);
    for (int k = 0; k < a.num_moments; ++k)
      store_moment(a, k, b, begin, count);
    store_weight(a, b, begin, count);
  }
}

#if OFFLOADZ_LANES
#include "fused.inl"
#else
static int64_t update_fused(const UpdateArgs &, int64_t begin, int64_t) {
  return begin;
}
#endif

// One tile; `begin` is a multiple of kQuant.
static void update_part(const UpdateArgs &a, int64_t begin, int64_t end) {
  begin = update_fused(a, begin, end);
  if (a.rule == kAdam && a.moment_format == kFp32 && a.weight_format != kAlone)
    adam_part(a, begin, end);
  else
    update_blocks(a, begin, end);
}
