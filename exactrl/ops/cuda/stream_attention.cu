// Attention with the KV splits in parallel on sm_90: at most eight rows (positions x grouped heads) for each sequence.
// Same bits as triton_attention.py's reference; every rounding below is one of the definition in attention.py.
//
// One block on each multiprocessor takes one split of one (sequence, kv head) after another, the next free one. A warp
// copies blocks of 64 keys, K and then V, into a ring. Of a split only l and the output are chains over its keys: eight
// warps score a block of keys each, keep the maxima of all, weigh their block, and then each multiplies all blocks, in
// order, into its own columns. Four warps merge: whoever finishes the last split of a (sequence, kv head) adds all of
// them up, ascending, while the others go on.
//
// Compiled with -D of split_items.cuh and RING (blocks of keys in shared memory), SHARED_BYTES.

constexpr int SCORERS = 8, MERGERS = 4, THREADS = (SCORERS + 1 + MERGERS) * LANES, ROWS = 8;
constexpr int BLOCKS = SPLIT / BLOCK, TILES = BLOCK / 16;
constexpr int CHUNK_BYTES = BLOCK * ROW_BYTES, REGIONS = D / 64, BOX = BLOCK < PAGE_SIZE ? BLOCK : PAGE_SIZE;
constexpr int VALUE_WARPS = STEPS < SCORERS ? STEPS : SCORERS, COLUMNS = STEPS / VALUE_WARPS;  // of 16, of a warp
constexpr int P_AT = RING * CHUNK_BYTES, MAXIMA_AT = P_AT + SPLIT / 16 * LANES * 8;
constexpr int FACTORS_AT = MAXIMA_AT + SCORERS * ROWS * 4, BARRIERS_AT = FACTORS_AT + SCORERS * ROWS * 4;
constexpr int QUEUE = 4, QUEUE_AT = BARRIERS_AT + (2 * RING + 2 * QUEUE + 2) * 8, INDEX_AT = QUEUE_AT + QUEUE * 32;
constexpr int LAST_AT = INDEX_AT + QUEUE * 4;
constexpr int UNROLL = 16;  // splits in flight while merging
static_assert(LAST_AT + 8 <= SHARED_BYTES);

extern __shared__ __align__(1024) char memory[];

template <typename T>
__device__ __forceinline__ T* at(int place) {
  return (T*)(memory + place);
}

struct Barriers {  // addresses
  u32 full, empty;                // of each place of the ring
  u32 queued, read;               // of each place of the queue of items
  u32 stored, taken;              // partial results, and that the mergers know of them
};

// Place of a 16-byte segment of a key's row in a chunk: regions of 64 elements, swizzled by the copy engine.
__device__ __forceinline__ u32 place_of(u32 row, u32 segment) {
  return (segment >> 3) * BLOCK * 128 + row * 128 + (((segment ^ row) & 7) << 4);
}

struct Ticket {
  int index;
  Item item;
};

// The n-th item of this block, which the producer has written down; from `total` on there is none.
__device__ __forceinline__ Ticket pop(const Barriers& barriers, u32 n, u32 lane) {
  u32 place = n % QUEUE;
  barrier_wait(barriers.queued + place * 8, n / QUEUE & 1);
  int index = at<int>(INDEX_AT)[place];
  Item item = item_of(at<Header>(QUEUE_AT)[place], index);
  __syncwarp();
  if (lane == 0) barrier_arrive(barriers.read + place * 8);
  return {index, item};
}

__device__ __forceinline__ void push(const Barriers& barriers, u32 n, int index, const Header& header, u32 lane) {
  u32 place = n % QUEUE;
  barrier_wait(barriers.read + place * 8, (n / QUEUE & 1) ^ 1);
  __syncwarp();  // no lane waits for a phase that others have gone past
  if (lane == 0) {
    at<int>(INDEX_AT)[place] = index, at<Header>(QUEUE_AT)[place] = header;
    barrier_arrive(barriers.queued + place * 8);
  }
}

__device__ __forceinline__ void produce(
    const Arguments& a, const TensorMap* k_map, const TensorMap* v_map, const Barriers& barriers, u32 shared, int* next,
    int total, u32 lane) {
  int index = blockIdx.x, active = min((int)gridDim.x, total), page = page_of(a, index, lane);
  Header header = header_of(a, index);  // of each block one item at least has room in the list
  u32 chunk = 0;
  push(barriers, 0, index, header, lane);
  for (u32 n = 1; index < total; n++) {
    int before = 0, now = page;
    if (lane == 0) before = atomicAdd(next, 1);
    Item item = item_of(header, index);
    int keys = keys_of(item), key = lane * 16;
    for (int pass = 0; pass < 2; pass++) {
      for (int block = 0; block < item.blocks; block++, chunk++) {
        u32 place = chunk % RING, into = shared + place * CHUNK_BYTES, full = barriers.full + place * 8;
        barrier_wait(barriers.empty + place * 8, (chunk / RING & 1) ^ 1);
        int boxes = (min(keys - block * BLOCK, BLOCK) + BOX - 1) / BOX;
        if (lane == 0) barrier_expect(full, boxes * BOX * ROW_BYTES);
        __syncwarp();
        if (lane / TILES == block && key % BOX == 0 && key < keys)
#pragma unroll
          for (int region = 0; region < REGIONS; region++)
            copy_box(into + region * BLOCK * 128 + key % BLOCK * 128, pass ? v_map : k_map, full, region * 64, item.head,
                     key % PAGE_SIZE, now);
      }
      if (pass == 0) {
        if (before == total - 1 && lane == 0) *next = 0;  // nobody asks after this; for the next layer
        index = __shfl_sync(~0u, before, 0) + active;
        if (index < total) header = header_of(a, index), page = page_of(a, index, lane);
        if (RING < BLOCKS) push(barriers, n, index, header, lane);  // else values could wait for room that waits for it
      }
    }
    if (RING >= BLOCKS) push(barriers, n, index, header, lane);
  }
}

// What a scorer knows of an item before its keys are there.
struct Query {
  u32 q[STEPS][2];
};

__device__ __forceinline__ void load_query(Query& x, const Arguments& a, const Ticket& ticket, int total, u32 lane) {
  if (ticket.index >= total) return;
  const Item& item = ticket.item;
  int row = lane >> 2;
  const bf16* from = a.q + (u64)(item.start + row / GROUP) * a.stride_q + (item.head * GROUP + row % GROUP) * D;
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      x.q[i][half] = row < item.count * GROUP ? *(const u32*)(from + i * 16 + half * 8 + (lane & 3) * 2) : 0;
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

// Merged into nothing where the split is alone (or NaN, where the plan has no room); else a partial result.
__device__ __forceinline__ void store(
    const Arguments& a, const Item& item, const Sums& x, const float (&all)[2], u32 warp, u32 lane) {
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int row = (lane & 3) * 2 + side;
    if (row >= item.count * GROUP) continue;
    u64 place = ((u64)item.place * KV_HEADS + item.head) * a.held + row;
    float m = all[side], l = x.l[side];
    float first = exp2_approx(__fsub_rn(NONE, m)), second = exp2_approx(__fsub_rn(m, m));
    if (alone(item)) l = __fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(l, second));
    if (item.split < 0) l = __int_as_float(0x7fffffff);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int d = (j * VALUE_WARPS + warp) * 16 + half * 8 + (lane >> 2);
        float value = x.acc[j][half * 2 + side];
        if (alone(item))
          store_out(a, item, row, d, __fdiv_rn(__fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(value, second)), l));
        else
          a.partial[place * D + d] = value;
      }
    if (warp == 0 && lane < 4) {
      if (alone(item))
        store_lse(a, item, row, m, l);
      else
        *(float2*)(a.stats + 2 * place) = make_float2(m, l);
    }
  }
}

__device__ __forceinline__ void attend(
    const Arguments& a, const Barriers& barriers, u32 shared, int total, u32 warp, u32 lane) {
  u32 chunk = 0, partials = 0;
  Query x;
  Ticket ticket = pop(barriers, 0, lane);
  load_query(x, a, ticket, total, lane);
  for (u32 n = 1; ticket.index < total; n++) {
    Item item = ticket.item;
    float s[TILES][4] = {}, all[2];
    for (u32 block = 0; block < item.blocks; block++, chunk++) {  // all wait for each: parity tells two phases
      u32 place = chunk % RING;
      barrier_wait(barriers.full + place * 8, chunk / RING & 1);
      if (block == warp) score(s, x, shared + place * CHUNK_BYTES, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.empty + place * 8);
    }
    weigh(all, s, a, item, warp, lane);
    ticket = pop(barriers, n, lane);
    load_query(x, a, ticket, total, lane);
    Sums sums = {};
    for (int block = 0; block < item.blocks; block++, chunk++) {
      u32 place = chunk % RING, at = shared + place * CHUNK_BYTES;
      barrier_wait(barriers.full + place * 8, chunk / RING & 1);
      if (warp < VALUE_WARPS) {
        int keys = keys_of(item) - block * BLOCK;
        if (keys < BLOCK) clear_from(at, keys, warp, lane);
        accumulate(sums, at, block, warp, lane);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.empty + place * 8);
    }
    if (warp < VALUE_WARPS) store(a, item, sums, all, warp, lane);
    if (!alone(item)) {
      barrier_wait(barriers.taken, (partials & 1) ^ 1);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.stored);
      partials++;
    }
  }
}

// All threads of the mergers: the splits of a (sequence, kv head), ascending.
__device__ void merge(const Arguments& a, const Item& item, u32 thread) {
  int splits = splits_of(item);
  u64 first = ((u64)(item.place - item.split) * KV_HEADS + item.head) * a.held;
  for (int e = thread * 4; e < item.count * GROUP * D; e += MERGERS * LANES * 4) {
    int row = e / D, d = e % D;
    float A[4] = {0, 0, 0, 0}, M = NONE, L = 0;
    for (int split0 = 0; split0 < splits; split0 += UNROLL) {
      float4 acc[UNROLL];
      float2 stats[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        u64 place = first + (u64)min(split0 + i, splits - 1) * KV_HEADS * a.held + row;
        acc[i] = __ldcg((const float4*)(a.partial + place * D + d));
        stats[i] = __ldcg((const float2*)(a.stats + 2 * place));
      }
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        float m = stats[i].x, values[4] = {acc[i].x, acc[i].y, acc[i].z, acc[i].w};
        if (split0 + i >= splits || m == NONE) continue;  // a split of which the row sees no key
        float mn = fmaxf(M, m), old_weight = exp2_approx(__fsub_rn(M, mn)), weight = exp2_approx(__fsub_rn(m, mn));
#pragma unroll
        for (int j = 0; j < 4; j++) A[j] = __fadd_rn(__fmul_rn(A[j], old_weight), __fmul_rn(values[j], weight));
        L = __fadd_rn(__fmul_rn(L, old_weight), __fmul_rn(stats[i].y, weight)), M = mn;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) store_out(a, item, row, d + j, __fdiv_rn(A[j], L));
    if (d == 0) store_lse(a, item, row, M, L);
  }
}

__device__ __forceinline__ void merge_all(const Arguments& a, const Barriers& barriers, int total, u32 thread) {
  u32 partials = 0, lane = thread % LANES;
  Ticket ticket = pop(barriers, 0, lane);
  for (u32 n = 1; ticket.index < total; n++) {
    const Item& item = ticket.item;
    if (!alone(item)) {
      int* arrived = a.arrived + item.sequence * KV_HEADS + item.head;
      volatile int* last = at<int>(LAST_AT) + (partials & 1);
      if (thread < LANES) barrier_wait(barriers.stored, partials & 1);
      __syncwarp();
      if (thread == 0) {
        barrier_arrive(barriers.taken);
        __threadfence();
        *last = atomicAdd(arrived, 1) == splits_of(item) - 1;
      }
      named_sync(2, MERGERS * LANES);
      if (*last) {
        __threadfence();
        merge(a, item, thread);
        if (thread == 0) *arrived = 0;  // for the next layer
      }
      partials++;
    }
    ticket = pop(barriers, n, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_stream(
    const bf16* q_rows, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, bf16* out,
    float* lse, int wants_lse, const int* items, const int* item_count, int* arrived, int* next, float* partial,
    float* stats, int tokens, int held, int stride_q, float scale) {
  const Arguments a = {q_rows, nullptr, nullptr, out, wants_lse ? lse : nullptr, items, item_count, arrived, partial, stats,
                       nullptr, nullptr, nullptr, 0, tokens, held, stride_q, 0, 0, scale};
  u32 shared = shared_address(memory), thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  int total = *a.total * KV_HEADS;
  Barriers barriers;
  barriers.full = shared + BARRIERS_AT, barriers.empty = barriers.full + RING * 8;
  barriers.queued = barriers.empty + RING * 8, barriers.read = barriers.queued + QUEUE * 8;
  barriers.stored = barriers.read + QUEUE * 8, barriers.taken = barriers.stored + 8;
  if (warp == SCORERS) {
    if (lane < RING) barrier_init(barriers.full + lane * 8, 1), barrier_init(barriers.empty + lane * 8, SCORERS);
    if (lane < QUEUE) barrier_init(barriers.queued + lane * 8, 1), barrier_init(barriers.read + lane * 8, SCORERS + MERGERS);
    if (lane == 0) barrier_init(barriers.stored, SCORERS), barrier_init(barriers.taken, 1);
    barriers_ready();
    if (lane == 0) prefetch_map(&k_map), prefetch_map(&v_map);
  }
  __syncthreads();
  if (warp < SCORERS)
    attend(a, barriers, shared, total, warp, lane);
  else if (warp == SCORERS)
    produce(a, &k_map, &v_map, barriers, shared, next, total, lane);
  else
    merge_all(a, barriers, total, thread - (SCORERS + 1) * LANES);
}
