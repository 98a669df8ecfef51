// The rows of an item, as both kernels with splits in parallel hold them: rows on the narrow side of the matrix unit, lane
// 4g + t has rows 2t and 2t + 1 of results and row g of queries. Follows split_items.cuh.

struct Query {
  u32 q[STEPS][2];
};

__device__ __forceinline__ void load_query(Query& x, const Arguments& a, const Item& item, u32 lane) {
  int row = lane >> 2;
  const bf16* from = a.q + (u64)(item.start + row / GROUP) * a.stride_q + (item.head * GROUP + row % GROUP) * D;
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      x.q[i][half] = row < item.count * GROUP ? *(const u32*)(from + i * 16 + half * 8 + (lane & 3) * 2) : 0;
}

// The only split of its sequence, merged into nothing (or NaN, where the plan has no room). A warp has every WARPS_OF-th tile
// of 16 columns, from tile `warp` on.
template <int WARPS_OF, int N>
__device__ __forceinline__ void store_alone(
    const Arguments& a, const Item& item, const float (&acc)[N][4], const float (&sums)[4], const float (&maxima)[2], u32 warp,
    u32 lane) {
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int row = (lane & 3) * 2 + side;
    if (row >= item.count * GROUP) continue;
    float m = maxima[side], first = exp2_approx(__fsub_rn(NONE, m)), second = exp2_approx(__fsub_rn(m, m));
    float l = __fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(sums[side], second));
    if (item.split < 0) l = __int_as_float(0x7fffffff);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float value = __fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(acc[j][half * 2 + side], second));
        store_out(a, item, row, (j * WARPS_OF + warp) * 16 + half * 8 + (lane >> 2), __fdiv_rn(value, l));
      }
    if (warp == 0 && lane < 4) store_lse(a, item, row, m, l);
  }
}

template <int WARPS_OF, int N>
__device__ __forceinline__ void store_partial(
    const Arguments& a, const Item& item, const float (&acc)[N][4], const float (&sums)[4], const float (&maxima)[2], u32 warp,
    u32 lane) {
  u64 place = ((u64)item.place * KV_HEADS + item.head) * a.held;
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int row = (lane & 3) * 2 + side;
    if (row >= item.count * GROUP) continue;
    float* into = a.partial + (place + row) * D + (lane >> 2);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) into[(j * WARPS_OF + warp) * 16 + half * 8] = acc[j][half * 2 + side];
    if (warp == 0 && lane < 4) *(float2*)(a.stats + 2 * (place + row)) = make_float2(maxima[side], sums[side]);
  }
}

template <int WARPS_OF, int N>
__device__ __forceinline__ void store_rows(
    const Arguments& a, const Item& item, const float (&acc)[N][4], const float (&sums)[4], const float (&maxima)[2], u32 warp,
    u32 lane) {
  if (alone(item))
    store_alone<WARPS_OF>(a, item, acc, sums, maxima, warp, lane);
  else
    store_partial<WARPS_OF>(a, item, acc, sums, maxima, warp, lane);
}
