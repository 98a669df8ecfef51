// Attention with the KV splits in parallel on sm_90: at most eight rows (positions x grouped heads) for each sequence.
// Same bits as triton_attention.py's reference; every rounding below is one of the definition in attention.py.
//
// A warp takes one split of one (sequence, kv head) at a time and needs no other warp for it: scores and output are
// computed transposed, keys and head dimension on the wide side of the matrix unit, rows on the narrow one. Each warp fills
// a ring of its own with keys and values, across the borders of blocks and splits. The warps of a block take heads of the
// same split, so that a multiprocessor reads few pages at a time. merge_splits.cu merges what they store.
//
// Follows split_rows.cuh and split_feed.cuh; compiled with the -D of split_items.cuh, RING (chunks a warp holds) and WARPS.

extern __shared__ __align__(128) char memory[];

struct State {
  float acc[STEPS][4], l[4], m[2];  // columns 2t and 2t + 1 of lane 4g + t; l's rows are all equal
};

__device__ __forceinline__ void add_block(
    State& x, Feed& feed, int& place, const Query& query, float scale, int lane, int key0, const int (&limit)[2],
    bool masked) {
  float s[BLOCK / 16][4];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 chunk = take(feed, place);
    s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 keys[4];
      load_tile(keys, chunk + place_of(lane & 15, step * 2 + (lane >> 4)));
      multiply(s[c], keys, query.q[step][0], query.q[step][1]);
    }
  }
  float mz[2], al[2];
#pragma unroll
  for (int side = 0; side < 2; side++) {
    float best = NONE;
#pragma unroll
    for (int i = 0; i < BLOCK / 16; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float& value = s[i][2 * half + side];
        value = __fmul_rn(value, scale);
        if (masked && key0 + i * 16 + half * 8 + (lane >> 2) >= limit[side]) value = NONE;
        best = fmaxf(best, value);
      }
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 4));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
    float mn = fmaxf(x.m[side], best);
    mz[side] = mn == NONE ? 0.0f : mn;
    al[side] = exp2_approx(__fsub_rn(x.m[side], mz[side]));
    x.m[side] = mn;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) x.l[i] = __fmul_rn(x.l[i], al[i & 1]);
#pragma unroll
  for (int j = 0; j < STEPS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) x.acc[j][i] = __fmul_rn(x.acc[j][i], al[i & 1]);
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  u32 p[BLOCK / 16][2];
#pragma unroll
  for (int i = 0; i < BLOCK / 16; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      p[i][half] = transposed(pack(exp2_approx(__fsub_rn(s[i][2 * half], mz[0])), exp2_approx(__fsub_rn(s[i][2 * half + 1], mz[1]))));
#pragma unroll
  for (int i = 0; i < BLOCK / 16; i++) multiply(x.l, ones, p[i][0], p[i][1]);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 chunk = take(feed, place);
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      u32 values[4];
      load_tile_transposed(values, chunk + place_of((lane & 7) + (lane >> 4) * 8, j * 2 + (lane >> 3 & 1)));
      multiply(x.acc[j], values, p[c][0], p[c][1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) attend_splits(const __grid_constant__ Arguments a) {
  int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, blocks = gridDim.x, total = *a.total * KV_HEADS;
  // Few splits spread over all multiprocessors, many over the warps of a block, too.
  int busy = 1;
  while (busy < WARPS && busy * blocks < total) busy *= 2;
  int step = blocks * busy, index = warp < busy ? blockIdx.x * busy + warp : total, place = 0;
  Feed feed = {a, shared_address(memory) + warp * RING * CHUNK_BYTES, lane, index, step, total};
  feed.open();
  if (feed.index < total && feed.chunks == 0) feed.advance();
#pragma unroll 1
  for (int i = 0; i < RING - 1; i++) feed.next();
  for (; index < total; index += step) {
    Item item = item_of(header_of(a, index), index);
    State x = {};
    x.m[0] = x.m[1] = NONE;
    Query query;
    load_query(query, a, item, lane);
    int earliest = item.length - item.count + 1, limit[2];  // keys that the first row sees, and the lane's
    for (int side = 0; side < 2; side++) limit[side] = earliest + ((lane & 3) * 2 + side) / GROUP;
    for (int block = 0; block < item.blocks; block++) {
      int key0 = item.split * SPLIT + block * BLOCK;
      add_block(x, feed, place, query, a.scale, lane, key0, limit, key0 + BLOCK > earliest);
    }
    store_rows<1>(a, item, x.acc, x.l, x.m, 0, lane);
  }
}
