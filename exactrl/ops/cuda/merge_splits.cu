// Merges the partial results of all splits, ascending, in a launch of its own, after the one that stores them. A
// thread takes four columns of a row; PARTS blocks share the rows of a (sequence, kv head). Definition in attention.py.
//
// Follows split_items.cuh; compiled with its -D and PARTS, IN_FLIGHT (splits that are loaded before the first is used).

constexpr int MERGE_THREADS = 128;

__device__ __forceinline__ void merge_columns(const Arguments& a, const Item& item, int row, int d) {
  int splits = splits_of(item);
  u64 first = ((u64)item.place * KV_HEADS + item.head) * a.held + row;
  float A[4] = {0, 0, 0, 0}, M = NONE, L = 0;
  for (int split0 = 0; split0 < splits; split0 += IN_FLIGHT) {
    float4 acc[IN_FLIGHT];
    float2 stats[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      stats[i] = make_float2(NONE, 0), acc[i] = make_float4(0, 0, 0, 0);
      if (split0 + i >= splits) continue;
      u64 at = first + (u64)(split0 + i) * KV_HEADS * a.held;
      acc[i] = __ldcg((const float4*)(a.partial + at * D + d));
      stats[i] = __ldcg((const float2*)(a.stats + 2 * at));
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      float m = stats[i].x, l = stats[i].y, values[4] = {acc[i].x, acc[i].y, acc[i].z, acc[i].w};
      if (m == NONE) continue;  // no split, or one of which the row sees no key
      float mn = fmaxf(M, m), old_weight = exp2_approx(__fsub_rn(M, mn)), weight = exp2_approx(__fsub_rn(m, mn));
#pragma unroll
      for (int j = 0; j < 4; j++) A[j] = __fadd_rn(__fmul_rn(A[j], old_weight), __fmul_rn(values[j], weight));
      L = __fadd_rn(__fmul_rn(L, old_weight), __fmul_rn(l, weight)), M = mn;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; j++) store_out(a, item, row, d + j, __fdiv_rn(A[j], L));
  if (d == 0) store_lse(a, item, row, M, L);
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge_splits(
    const __grid_constant__ Arguments a, const int* merges, const int* starts, const int* lengths) {
  wait_for_kernels_before();
  int part = blockIdx.x % PARTS, merged = blockIdx.x / PARTS;
  Item item = {};
  item.sequence = merges[2 * (merged / KV_HEADS)], item.place = merges[2 * (merged / KV_HEADS) + 1];
  item.head = merged % KV_HEADS, item.start = starts[item.sequence], item.length = lengths[item.sequence];
  int rows = (starts[item.sequence + 1] - item.start) * GROUP, e = (part * MERGE_THREADS + threadIdx.x) * 4;
  if (item.place >= 0 && e < rows * D) merge_columns(a, item, e / D, e % D);
}
