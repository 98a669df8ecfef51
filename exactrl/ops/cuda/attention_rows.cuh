// What becomes of a row's scores, sums and output between the products of hopper_attention.cu: every rounding that the
// contract has there. A thread holds two rows, 8 apart: of 64 columns elements 8 c + 2 (lane % 4) and the next one.
#pragma once

constexpr int D = DIM, BLOCK = 64;
// Values carry eight further columns of ones, so that one product gives the weighted sum and the sum of the weights.
constexpr int NUM_OUT = D / 2, NUM_ACC = NUM_OUT + 4;

// One row's running state; a thread has two rows, 8 apart.
struct Row {
  float max, merged_max, merged_sum;
};

// Scores of one block to probabilities, in place; row maxima updated, rescale factors returned. `visible`: the last key of
// the block that each of the two rows may see; only looked at when `masked`.
__device__ __forceinline__ void soften(
    float (&scores)[32], float scale, bool masked, const int (&visible)[2], int lane, bool fresh, Row (&rows)[2],
    float (&rescale)[2]) {
  if (masked) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      int key = i / 4 * 8 + 2 * (lane & 3) + i % 2;
      scores[i] = key <= visible[i / 2 % 2] ? scores[i] : NONE;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    // Four at a time, for speed: a maximum has no order. Of products not yet scaled: rounding keeps order.
    float tops[4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float x = scores[i / 2 * 4 + 2 * half + i % 2];
      tops[i % 4] = i < 4 ? x : fmaxf(tops[i % 4], x);
    }
    float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float before = fresh ? NONE : rows[half].max;
    top = fmaxf(before, __fmul_rn(top, scale));
    float base = top == NONE ? 0.0f : top;
    rescale[half] = exp2_approx(__fsub_rn(before, base));
    rows[half].max = top;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float& x = scores[i / 2 * 4 + 2 * half + i % 2];
      x = exp2_approx(__fsub_rn(__fmul_rn(x, scale), base));
    }
  }
}

// Not before the products of the block before are done: the compiler would put a wait in front of every product otherwise.
__device__ __forceinline__ void round_all(const float (&probabilities)[32], u32 (&p)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) p[i / 4][i % 4] = pack(probabilities[2 * i], probabilities[2 * i + 1]);
}

__device__ __forceinline__ void rescale_all(float (&acc)[NUM_ACC], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < NUM_ACC; i++) acc[i] = __fmul_rn(acc[i], rescale[(i / 2) & 1]);
}

// The split that ends is merged into those before it: `merged`, zeros at first. Afterwards `acc` is free; the LAST time it
// is the result. Before the last split every row has seen a key of each, as an item has fewer tokens than a split keys;
// should all its scores be -inf: A · 1 + 0 · -0 is A.
template <bool LAST>
__device__ __forceinline__ void merge(
    float (&acc)[NUM_ACC], float4 (*merged)[128], Row (&rows)[2], const float (&max)[2]) {
  float a[2], b[2];
  bool seen[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    Row& row = rows[half];
    seen[half] = max[half] != NONE;
    float base = fmaxf(row.merged_max, max[half]);
    a[half] = seen[half] ? exp2_approx(__fsub_rn(row.merged_max, base)) : 1.0f;
    b[half] = seen[half] ? exp2_approx(__fsub_rn(max[half], base)) : -0.0f;
    if (seen[half]) {
      row.merged_max = base;
      row.merged_sum = __fadd_rn(__fmul_rn(row.merged_sum, a[half]), __fmul_rn(acc[NUM_OUT + 2 * half], b[half]));
    }
  }
  // In groups, each stored before the next is loaded: all at once would need more registers than there are.
  constexpr int TOGETHER = 8;
#pragma unroll
  for (int begin = 0; begin < NUM_OUT; begin += TOGETHER) {
    float before[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i += 4) {
      float4 x = load_shared(&merged[(begin + i) / 4][threadIdx.x & 127]);
      before[i] = x.x, before[i + 1] = x.y, before[i + 2] = x.z, before[i + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      int half = (i / 2) & 1;
      float after = __fadd_rn(__fmul_rn(before[i], a[half]), __fmul_rn(acc[begin + i], b[half]));
      before[i] = !LAST || seen[half] ? after : before[i];
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i += 4) {
      if (LAST) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc[begin + i + e] = before[i + e];
      } else {
        float4 x = make_float4(before[i], before[i + 1], before[i + 2], before[i + 3]);
        store_shared(&merged[(begin + i) / 4][threadIdx.x & 127], x);
      }
    }
  }
}

// Read anew, so that what is computed from it is not held in registers through the loops before.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread & 127;
}

// acc / sums, rounded once. The instructions are those that the compiler makes of a division, but the reciprocal is shared
// and one test stands for all; what the test finds unusual (0, denormals, inf) is divided one by one.
__device__ __forceinline__ void divide(float (&acc)[NUM_ACC], float4 (*scratch)[128], const float (&sums)[2]) {
  float least[2] = {1.0f, 1.0f}, zeros[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < NUM_OUT; i++) {
    least[i & 1] = fminf(least[i & 1], fabsf(acc[i]));
    zeros[i & 1] = __fmaf_rn(acc[i], 0.0f, zeros[i & 1]);
  }
  const bool usual = fminf(least[0], least[1]) >= 0x1p-60f && __fadd_rn(zeros[0], zeros[1]) == 0.0f &&
                     fminf(sums[0], sums[1]) >= 0x1p-10f && fmaxf(sums[0], sums[1]) <= 0x1p30f;
  if (__all_sync(~0u, usual)) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float y = reciprocal_approx(sums[half]);
      inverse[half] = __fmaf_rn(y, __fmaf_rn(y, -sums[half], 1.0f), y);
    }
#pragma unroll
    for (int i = 0; i < NUM_OUT; i++) {
      const int half = (i / 2) & 1;
      const float q = __fmul_rn(acc[i], inverse[half]);
      acc[i] = __fmaf_rn(inverse[half], __fmaf_rn(q, -sums[half], acc[i]), q);
    }
    return;
  }
  const int thread = thread_again();
#pragma unroll
  for (int i = 0; i < NUM_OUT; i += 4)
    store_shared(&scratch[i / 4][thread], make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
#pragma unroll 1
  for (int i = 0; i < NUM_OUT / 4; i++) {
    const float4 x = load_shared(&scratch[i][thread]);
    store_shared(&scratch[i][thread], make_float4(__fdiv_rn(x.x, sums[0]), __fdiv_rn(x.y, sums[0]),
                                                  __fdiv_rn(x.z, sums[1]), __fdiv_rn(x.w, sums[1])));
  }
#pragma unroll
  for (int i = 0; i < NUM_OUT; i += 4) {
    const float4 x = load_shared(&scratch[i / 4][thread]);
    acc[i] = x.x, acc[i + 1] = x.y, acc[i + 2] = x.z, acc[i + 3] = x.w;
  }
}
