// The loops over numbers, as a table of plain functions: one table per instruction set, all with the same bits.
//
// [Note: the same bits everywhere] Nothing here depends on the width of a vector: element-wise loops use only correctly
// rounded operations (+ - * / sqrt), the compiler may not contract a product and a sum (-ffp-contract=off; a fused
// multiply-add in software would cost the baseline a library call per element), and sums run in 16 fixed lanes.
#pragma once
#include <cstdint>

namespace offloadz {

constexpr int64_t kPiece = 65536; // elements per partial sum

constexpr int64_t kQuant = 256; // elements that share a scale; BLOCK_ELEMENTS in offloadz/plan/recipes.py is the same

enum Rule : int32_t { kAdam, kLion, kSgd };
enum WeightFormat : int32_t { kWhole, kSplit, kAlone }; // float32; bfloat16 with its low half; bfloat16 without
enum MomentFormat : int32_t { kFp32, kBf16, kCodes };

// What a step does to a span.  All constants are formed in double and rounded once, as torch does with scalars.
struct StepNumbers {
  uint64_t seed; // of the random bits, with the step
  int64_t step;
  int32_t decoupled; // 1: the decay shrinks the weight, 0: it is added to the gradient
  float grad_scale;  // multiplies the widened gradient first
  float keep;        // 1 - lr * weight_decay
  float decay;       // weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inverse_root2; // 1 / sqrt(1 - beta2^step)
  float eps;
  float minus_step_size; // Adam: -lr / (1 - beta1^step); the others: -lr
  float momentum;
  // Adam with rounded moments: see [Note: factors put together] in update.inl.
  float into_first;  // (1 - beta1), times grad_scale if decoupled
  float into_second; // sqrt(1 - beta2), times grad_scale if decoupled
  float root_eps;    // eps * sqrt(1 - beta2^step)
  float root_step;   // minus_step_size * sqrt(1 - beta2^step)
};

// One update of a span of elements; _UpdateArgs in offloadz/runtime/native_adam.py is the same.
struct UpdateArgs : StepNumbers {
  void *weight;
  uint16_t *low;      // kSplit: the low half of the master
  void *moments[2];   // Adam: first and second; Lion, SGD with momentum: one
  float *scales[2];   // kCodes: one per kQuant elements, counted from the start of the span
  const void *grad;   // bfloat16 or float32
  int64_t count;      // elements
  int64_t first_tile; // set by update(): tiles of the spans before
  int32_t rule;
  int32_t weight_format;
  int32_t moment_format;
  int32_t num_moments;
  int32_t grad_is_bf16;   // else float32
  uint32_t first_element; // of the span within its parameter; the counter goes round after 2^32
  uint32_t keys[2];       // set by update(): of the random bits, see codec.inl
};

struct Kernels {
  const char *name;
  void (*update)(const UpdateArgs &args, int64_t begin, int64_t end);
  void (*split_master)(uint16_t *weight, uint16_t *low, const uint32_t *master, int64_t count);
  void (*join_master)(uint32_t *master, const uint16_t *weight, const uint16_t *low, int64_t count);
  void (*widen)(uint32_t *out, const uint16_t *in, int64_t count);
  void (*narrow)(uint16_t *out, const uint32_t *in, int64_t count);
  double (*drain)(uint16_t *out, const float *grad, int64_t count);
  double (*drain_copy)(float *out, const float *grad, int64_t count);
  double (*sum_squares_bf16)(const uint16_t *in, int64_t count);
  double (*sum_squares_fp32)(const float *in, int64_t count);
  void (*encode[2])(uint8_t *codes, float *scales, const float *in, int64_t count); // first, second moment
  void (*decode[2])(float *out, const uint8_t *codes, const float *scales, int64_t count);
};

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The table in use.  select_isa: 0 done, 1 the name is unknown, 2 this processor lacks it.
const Kernels &kernels();
int select_isa(const char *name);
bool isa_supported(int level); // 0 baseline, 1 avx2, 2 avx512

// Runs the updates of all spans, which share no memory, as one piece of work for `num_threads` threads, the caller's
// included.  The result depends neither on their number nor on which spans are updated together.
void update(UpdateArgs *const *spans, int64_t num_spans, int num_threads);

} // namespace offloadz
