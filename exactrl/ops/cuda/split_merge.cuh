// The merge of a sequence's splits, ascending, as attention.py defines it. Follows split_items.cuh.

// `threads` threads: the rows of one (sequence, kv head). IN_FLIGHT: splits that are loaded before the first is used.
template <int IN_FLIGHT>
__device__ __forceinline__ void merge_rows(const Arguments& a, const Item& item, int thread, int threads) {
  int splits = splits_of(item);
  u64 first = ((u64)(item.place - item.split) * KV_HEADS + item.head) * a.held;
  for (int e = thread * 4; e < item.count * GROUP * D; e += threads * 4) {
    int row = e / D, d = e % D;
    float A[4] = {0, 0, 0, 0}, M = NONE, L = 0;
    for (int split0 = 0; split0 < splits; split0 += IN_FLIGHT) {
      float4 acc[IN_FLIGHT];
      float2 stats[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++) {
        stats[i] = make_float2(NONE, 0), acc[i] = make_float4(0, 0, 0, 0);
        if (split0 + i >= splits) continue;
        u64 at = first + (u64)(split0 + i) * KV_HEADS * a.held + row;
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
}
