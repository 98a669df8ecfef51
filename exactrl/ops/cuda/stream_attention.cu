// Attention with the KV splits in parallel on sm_90: at most eight rows (positions x grouped heads) for each sequence.
// Same bits as triton_attention.py's reference; every rounding below is one of the definition in attention.py.
//
// A block takes every gridDim-th split of the (sequence, kv head) pairs. One warp copies blocks of 64 keys, K and then V,
// into a ring, across the borders of splits. Of a split only l and the output are chains over its keys: eight warps score a
// block of keys each, keep the maxima of all, weigh their block, and then each multiplies all blocks, in order, into its
// own columns. merge_splits.cu merges what they store.
//
// Who may touch what, and when:
//   ring[place]   the copy engine writes after all scorers have arrived at empty[place], they read after full[place]; what
//                 they load or store there is fenced for the copy engine before they arrive
//   maxima        written before the first meeting of the scorers in weigh(), read between it and the second
//   p, factors    written between the two meetings, read from the second one to the first of the next split
//
// Follows split_rows.cuh; compiled with the -D of split_items.cuh, RING (blocks of keys in shared memory), RESIDENT (blocks on a
// multiprocessor) and SHARED_BYTES.

constexpr int SCORERS = 8, THREADS = (SCORERS + 1) * LANES, ROWS = 8, TILES = BLOCK / 16;
constexpr int CHUNK_BYTES = BLOCK * ROW_BYTES, REGIONS = D / 64, BOX = BLOCK < PAGE_SIZE ? BLOCK : PAGE_SIZE;
constexpr int VALUE_WARPS = STEPS < SCORERS ? STEPS : SCORERS, COLUMNS = STEPS / VALUE_WARPS;  // of 16, of a warp
constexpr int P_AT = RING * CHUNK_BYTES, MAXIMA_AT = P_AT + SPLIT / 16 * LANES * 8;
constexpr int FACTORS_AT = MAXIMA_AT + SCORERS * ROWS * 4, BARRIERS_AT = FACTORS_AT + SCORERS * ROWS * 4;
static_assert(BARRIERS_AT + 2 * RING * 8 <= SHARED_BYTES && RING <= LANES);

extern __shared__ __align__(1024) char memory[];

template <typename T>
__device__ __forceinline__ T* at(int place) {
  return (T*)(memory + place);
}

struct Ring {  // addresses: of the places, and of each place's barriers
  u32 places, full, empty;
};

// Place of a 16-byte segment of a key's row in a chunk: regions of 64 elements, swizzled by the copy engine.
__device__ __forceinline__ u32 place_of(u32 row, u32 segment) {
  return (segment >> 3) * BLOCK * 128 + row * 128 + (((segment ^ row) & 7) << 4);
}

// One warp: all keys and values of the block's splits, as places become free.
__device__ __forceinline__ void produce(
    const Arguments& a, const TensorMap* k_map, const TensorMap* v_map, const Ring& ring, int total, u32 lane) {
  u32 chunk = 0;
  int index = blockIdx.x, next_page = page_of(a, index, lane);  // of each block one item at least has room in the list
  Header next = header_of(a, index);
  while (index < total) {
    Item item = item_of(next, index);
    int page = next_page, keys = keys_of(item), key = lane * 16;
    index += gridDim.x;
    if (index < total) next = header_of(a, index), next_page = page_of(a, index, lane);
    for (int pass = 0; pass < 2; pass++) {
      for (int block = 0; block < item.blocks; block++, chunk++) {
        u32 place = chunk % RING, into = ring.places + place * CHUNK_BYTES, full = ring.full + place * 8;
        barrier_wait(ring.empty + place * 8, (chunk / RING & 1) ^ 1);
        int boxes = (min(keys - block * BLOCK, BLOCK) + BOX - 1) / BOX;
        if (lane == 0) barrier_expect(full, boxes * BOX * ROW_BYTES);
        __syncwarp();  // copies come after what is expected, and no lane waits for a phase that others have gone past
        if (lane / TILES == block && key % BOX == 0 && key < keys)
#pragma unroll
          for (int region = 0; region < REGIONS; region++)
            copy_box(into + region * BLOCK * 128 + key % BLOCK * 128, pass ? v_map : k_map, full, region * 64, item.head,
                     key % PAGE_SIZE, page);
      }
    }
  }
}

// A scorer is done with a place. The fence is needed though it only read: loads for the matrix unit may still be on their
// way, and the machine code does not wait for them; the copy engine's next block must not arrive before.
__device__ __forceinline__ void leave(const Ring& ring, u32 place, u32 lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(ring.empty + place * 8);
}

// One block of 64 keys: keys on the wide side of the matrix unit, rows on the narrow one.
__device__ __forceinline__ void score(float (&s)[TILES][4], const Query& x, u32 chunk, u32 lane) {
#pragma unroll
  for (int step = 0; step < STEPS; step++)
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      u32 keys[4];
      load_tile(keys, chunk + place_of(i * 16 + (lane & 15), step * 2 + (lane >> 4)));
      multiply(s[i], keys, x.q[step][0], x.q[step][1]);
    }
}

// The weights of a warp's block, as the matrix unit takes them, and the factor for what comes before it. `all`: maxima of
// the split, of rows 2t and 2t + 1 of lane 4g + t.
__device__ __forceinline__ void weigh(
    float (&all)[2], float (&s)[TILES][4], const Arguments& a, const Item& item, u32 warp, u32 lane) {
  int key0 = item.split * SPLIT + warp * BLOCK + (lane >> 2), earliest = item.length - item.count + 1;
  float best[2] = {NONE, NONE}, mz[2];
  float* maxima = at<float>(MAXIMA_AT);
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int limit = earliest + (int)((lane & 3) * 2 + side) / GROUP;  // keys that the row sees
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float& value = s[i][2 * half + side];
        value = __fmul_rn(value, a.scale);
        if (key0 + i * 16 + half * 8 >= limit) value = NONE;
        best[side] = fmaxf(best[side], value);
      }
    best[side] = fmaxf(best[side], __shfl_xor_sync(~0u, best[side], 4));
    best[side] = fmaxf(best[side], __shfl_xor_sync(~0u, best[side], 8));
    best[side] = fmaxf(best[side], __shfl_xor_sync(~0u, best[side], 16));
  }
  if (lane < 4) *(float2*)(maxima + warp * ROWS + lane * 2) = make_float2(best[0], best[1]);
  named_sync(1, SCORERS * LANES);
  float before[2] = {NONE, NONE};
  all[0] = all[1] = NONE;
#pragma unroll
  for (int i = 0; i < SCORERS; i++) {
    float2 m = *(const float2*)(maxima + i * ROWS + (lane & 3) * 2);
    if (i < warp) before[0] = fmaxf(before[0], m.x), before[1] = fmaxf(before[1], m.y);
    all[0] = fmaxf(all[0], m.x), all[1] = fmaxf(all[1], m.y);
  }
  float factor[2];
#pragma unroll
  for (int side = 0; side < 2; side++) {
    float mn = fmaxf(before[side], best[side]);
    mz[side] = mn == NONE ? 0.0f : mn;
    factor[side] = exp2_approx(__fsub_rn(before[side], mz[side]));
  }
  if (lane < 4) *(float2*)(at<float>(FACTORS_AT) + warp * ROWS + lane * 2) = make_float2(factor[0], factor[1]);
  uint2* weights = at<uint2>(P_AT) + warp * TILES * LANES + lane;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    u32 p[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
      p[half] = transposed(pack(exp2_approx(__fsub_rn(s[i][2 * half], mz[0])), exp2_approx(__fsub_rn(s[i][2 * half + 1], mz[1]))));
    weights[i * LANES] = make_uint2(p[0], p[1]);
  }
  named_sync(1, SCORERS * LANES);
}

// Values count as zero from the sequence's end on, whatever the page holds there: a warp's own columns.
__device__ __forceinline__ void clear_from(u32 chunk, int row0, u32 warp, u32 lane) {
  for (int row = row0 + (int)(lane >> 1); row < BLOCK; row += LANES / 2)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) store_zeros(chunk + place_of(row, (j * VALUE_WARPS + warp) * 2 + (lane & 1)));
  fence_async_shared();  // before the copy engine writes there again
  __syncwarp();
}

struct Sums {  // columns g and g + 8 of each tile, rows 2t and 2t + 1 of lane 4g + t; l's columns are all equal
  float acc[COLUMNS][4], l[4];
};

__device__ __forceinline__ void accumulate(Sums& x, u32 chunk, int block, u32 warp, u32 lane) {
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float2 factor = at<float2>(FACTORS_AT)[block * ROWS / 2 + (lane & 3)];
  const uint2* weights = at<uint2>(P_AT) + block * TILES * LANES + lane;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float f = i & 1 ? factor.y : factor.x;
    x.l[i] = __fmul_rn(x.l[i], f);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) x.acc[j][i] = __fmul_rn(x.acc[j][i], f);
  }
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    uint2 p = weights[i * LANES];
    multiply(x.l, ones, p.x, p.y);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      u32 v[4];
      load_tile_transposed(
          v, chunk + place_of(i * 16 + (lane & 7) + (lane >> 4) * 8, (j * VALUE_WARPS + warp) * 2 + (lane >> 3 & 1)));
      multiply(x.acc[j], v, p.x, p.y);
    }
  }
}

__device__ __forceinline__ void attend(const Arguments& a, const Ring& ring, int total, u32 warp, u32 lane) {
  u32 chunk = 0;
  int index = blockIdx.x;
  Item next = item_of(header_of(a, index), index);
  Query x;
  if (index < total) load_query(x, a, next, lane);
  while (index < total) {
    Item item = next;
    index += gridDim.x;
    if (index < total) next = item_of(header_of(a, index), index);
    float s[TILES][4] = {}, all[2];
    for (u32 block = 0; block < item.blocks; block++, chunk++) {  // all wait for each: parity tells two phases
      u32 place = chunk % RING;
      barrier_wait(ring.full + place * 8, chunk / RING & 1);
      if (block == warp) score(s, x, ring.places + place * CHUNK_BYTES, lane);
      leave(ring, place, lane);
    }
    weigh(all, s, a, item, warp, lane);
    if (index < total) load_query(x, a, next, lane);
    Sums sums = {};
    for (int block = 0; block < item.blocks; block++, chunk++) {
      u32 place = chunk % RING, values = ring.places + place * CHUNK_BYTES;
      barrier_wait(ring.full + place * 8, chunk / RING & 1);
      if (warp < VALUE_WARPS) {
        int keys = keys_of(item) - block * BLOCK;
        if (keys < BLOCK) clear_from(values, keys, warp, lane);
        accumulate(sums, values, block, warp, lane);
      }
      leave(ring, place, lane);
    }
    if (warp >= VALUE_WARPS) continue;
    store_rows<VALUE_WARPS>(a, item, sums.acc, sums.l, all, warp, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend_stream(
    const __grid_constant__ Arguments a, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  u32 shared = shared_address(memory), warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  Ring ring = {shared, shared + BARRIERS_AT, shared + BARRIERS_AT + RING * 8};
  if (warp == SCORERS) {
    if (lane < RING) barrier_init(ring.full + lane * 8, 1), barrier_init(ring.empty + lane * 8, SCORERS);
    barriers_ready();
    if (lane == 0) prefetch_map(&k_map), prefetch_map(&v_map);
  }
  __syncthreads();
  wait_for_kernels_before();
  int total = *a.total * KV_HEADS;
  if (warp < SCORERS)
    attend(a, ring, total, warp, lane);
  else
    produce(a, &k_map, &v_map, ring, total, lane);
}
