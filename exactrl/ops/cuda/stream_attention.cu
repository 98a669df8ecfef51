// Attention with the KV splits in parallel on sm_90: at most eight rows (positions x grouped heads) for each sequence.
// Same bits as triton_attention.py's reference; every rounding below is one of the definition in attention.py.
//
// One block on each multiprocessor takes one split of one (sequence, kv head) after another, the next free one. A warp
// copies blocks of 64 keys, K and then V, into a ring. Of a split only l and the output are chains over its keys: eight
// warps score a block of keys each, keep the maxima of all, weigh their block, and then each multiplies all blocks, in
// order, into its own columns. Four warps store what comes out and merge: whoever finishes the last split of a (sequence,
// kv head) adds all of them up, ascending, while the others go on.
//
// Compiled with -D of split_items.cuh and RING (blocks of keys in shared memory), MERGED (splits of eight rows that are
// merged at once), SHARED_BYTES.

constexpr int SCORERS = 8, MERGERS = 4, THREADS = (SCORERS + 1 + MERGERS) * LANES, ROWS = 8;
constexpr int BLOCKS = SPLIT / BLOCK, TILES = BLOCK / 16;
constexpr int CHUNK_BYTES = BLOCK * ROW_BYTES, REGIONS = D / 64, BOX = BLOCK < PAGE_SIZE ? BLOCK : PAGE_SIZE;
constexpr int VALUE_WARPS = STEPS < SCORERS ? STEPS : SCORERS, COLUMNS = STEPS / VALUE_WARPS;  // of 16, of a warp
constexpr int RESULT = D + 8, TABLE = 8 * MERGED;  // floats of a row; weights of merging
constexpr int STAGE_AT = RING * CHUNK_BYTES, P_AT = STAGE_AT + MERGED * ROWS * D * 4;
constexpr int RESULT_AT = P_AT + SPLIT / 16 * LANES * 8, SUMS_AT = RESULT_AT + ROWS * RESULT * 4;
constexpr int TABLE_AT = SUMS_AT + ROWS * 8, MAXIMA_AT = TABLE_AT + TABLE * 16;
constexpr int FACTORS_AT = MAXIMA_AT + SCORERS * ROWS * 4, QUEUE_AT = FACTORS_AT + SCORERS * ROWS * 4;
constexpr int QUEUE = 4, INDEX_AT = QUEUE_AT + QUEUE * 32, BARRIERS_AT = INDEX_AT + QUEUE * 4;
constexpr int LAST_AT = BARRIERS_AT + (2 * RING + 2 * QUEUE + 3) * 8;
constexpr int PARTS = (ROWS * D / 4 + MERGERS * LANES - 1) / (MERGERS * LANES);  // of four columns, of a merging thread
static_assert(LAST_AT + 8 <= SHARED_BYTES);

extern __shared__ __align__(1024) char memory[];

template <typename T>
__device__ __forceinline__ T* at(int place) {
  return (T*)(memory + place);
}

struct Barriers {  // addresses
  u32 full, empty;            // of each place of the ring
  u32 queued, read;           // of each place of the queue of items
  u32 stored, taken, staged;  // a result in shared memory, free again; partial results there
};

// Place of a 16-byte segment of a key's row in a chunk: regions of 64 elements, swizzled by the copy engine.
__device__ __forceinline__ u32 place_of(u32 row, u32 segment) {
  return (segment >> 3) * BLOCK * 128 + row * 128 + (((segment ^ row) & 7) << 4);
}

struct Ticket {
  int index;
  Item item;
};

// The n-th item of this block after its first, which the producer has written down; from `total` on there is none.
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
    int total, Header header, int page, u32 lane) {
  int index = blockIdx.x, active = min((int)gridDim.x, total);
  u32 chunk = 0;
  for (u32 n = 0; index < total; n++) {
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

struct Operands {  // of one block of 64 keys
  uint2 p[TILES];
  u32 v[TILES][COLUMNS][4];
  float2 factor;
};

__device__ __forceinline__ void load_operands(Operands& x, u32 chunk, int block, u32 warp, u32 lane) {
  const uint2* weights = at<uint2>(P_AT) + block * TILES * LANES + lane;
  x.factor = at<float2>(FACTORS_AT)[block * ROWS / 2 + (lane & 3)];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    x.p[i] = weights[i * LANES];
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
      load_tile_transposed(x.v[i][j], chunk + place_of(i * 16 + (lane & 7) + (lane >> 4) * 8, (j * VALUE_WARPS + warp) * 2 + (lane >> 3 & 1)));
  }
}

struct Sums {  // columns g and g + 8 of each tile, rows 2t and 2t + 1 of lane 4g + t; l's columns are all equal
  float acc[COLUMNS][4], l[4];
};

__device__ __forceinline__ void accumulate(Sums& sums, const Operands& x) {
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float f = i & 1 ? x.factor.y : x.factor.x;
    sums.l[i] = __fmul_rn(sums.l[i], f);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) sums.acc[j][i] = __fmul_rn(sums.acc[j][i], f);
  }
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    multiply(sums.l, ones, x.p[i].x, x.p[i].y);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) multiply(sums.acc[j], x.v[i][j], x.p[i].x, x.p[i].y);
  }
}

// Merged into nothing: the only split of its sequence (or NaN, where the plan has no room).
__device__ __forceinline__ void store_alone(
    const Arguments& a, const Item& item, const Sums& x, const float (&all)[2], u32 warp, u32 lane) {
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int row = (lane & 3) * 2 + side;
    if (row >= item.count * GROUP) continue;
    float m = all[side], first = exp2_approx(__fsub_rn(NONE, m)), second = exp2_approx(__fsub_rn(m, m));
    float l = __fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(x.l[side], second));
    if (item.split < 0) l = __int_as_float(0x7fffffff);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float acc = __fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(x.acc[j][half * 2 + side], second));
        store_out(a, item, row, (j * VALUE_WARPS + warp) * 16 + half * 8 + (lane >> 2), __fdiv_rn(acc, l));
      }
    if (warp == 0 && lane < 4) store_lse(a, item, row, m, l);
  }
}

// For the mergers.
__device__ __forceinline__ void store_result(const Sums& x, const float (&all)[2], u32 warp, u32 lane) {
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int row = (lane & 3) * 2 + side;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        at<float>(RESULT_AT)[row * RESULT + (j * VALUE_WARPS + warp) * 16 + half * 8 + (lane >> 2)] = x.acc[j][half * 2 + side];
    if (warp == 0 && lane < 4) at<float2>(SUMS_AT)[row] = make_float2(all[side], x.l[side]);
  }
}

// Waits for a chunk and has a warp's operands of it on their way. All warps wait for all chunks: parity tells two phases.
__device__ __forceinline__ void take_values(
    Operands& x, const Barriers& barriers, u32 shared, u32 chunk, const Item& item, int block, u32 warp, u32 lane) {
  u32 place = chunk % RING, values = shared + place * CHUNK_BYTES;
  barrier_wait(barriers.full + place * 8, chunk / RING & 1);
  if (warp >= VALUE_WARPS) return;
  int keys = keys_of(item) - block * BLOCK;
  if (keys < BLOCK) clear_from(values, keys, warp, lane);
  load_operands(x, values, block, warp, lane);
}

__device__ __forceinline__ void attend(
    const Arguments& a, const Barriers& barriers, u32 shared, int total, const Header& header, u32 warp, u32 lane) {
  u32 chunk = 0, results = 0;
  Query x;
  Ticket ticket = {(int)blockIdx.x, item_of(header, blockIdx.x)};
  load_query(x, a, ticket, total, lane);
  for (u32 n = 0; ticket.index < total; n++) {
    Item item = ticket.item;
    float s[TILES][4] = {}, all[2];
    for (u32 block = 0; block < item.blocks; block++, chunk++) {
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
    Operands now, next;
    if (item.blocks) take_values(next, barriers, shared, chunk, item, 0, warp, lane);
    for (int block = 0; block < item.blocks; block++, chunk++) {
      now = next;
      if (block + 1 < item.blocks) take_values(next, barriers, shared, chunk + 1, item, block + 1, warp, lane);
      if (warp < VALUE_WARPS) accumulate(sums, now);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.empty + chunk % RING * 8);
    }
    if (alone(item)) {
      if (warp < VALUE_WARPS) store_alone(a, item, sums, all, warp, lane);
    } else {
      barrier_wait(barriers.taken, (results & 1) ^ 1);
      if (warp < VALUE_WARPS) store_result(sums, all, warp, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.stored);
      results++;
    }
  }
}

// The mergers' threads: what the scorers have left goes into global memory.
__device__ __forceinline__ void store_partial(const Arguments& a, const Item& item, u32 thread) {
  u64 place = ((u64)item.place * KV_HEADS + item.head) * a.held;
  for (int e = thread * 4; e < item.count * GROUP * D; e += MERGERS * LANES * 4)
    *(float4*)(a.partial + place * D + e) = *at<float4>(RESULT_AT + (e / D * RESULT + e % D) * 4);
  if (thread < item.count * GROUP) *(float2*)(a.stats + 2 * (place + thread)) = at<float2>(SUMS_AT)[thread];
}

__device__ __forceinline__ float running_maximum(float m, u32 lane) {  // of the lanes up to this one
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
    float other = __shfl_up_sync(~0u, m, step);
    if (lane >= step) m = fmaxf(m, other);
  }
  return m;
}

// For `count` splits of each row, a warp for every fourth row: the factor of what is merged before, that of the split
// (-1: the row sees no key of it), its sum, and the maximum so far, which `M` keeps.
__device__ __forceinline__ void weigh_splits(
    float (&M)[ROWS / MERGERS], const Arguments& a, u64 place, int count, int rows, u32 warp, u32 lane) {
#pragma unroll
  for (int i = 0; i < ROWS / MERGERS; i++) {
    int row = i * MERGERS + warp;
    if (row >= rows) continue;
    for (int split0 = 0; split0 < count; split0 += LANES) {
      int split = split0 + lane;
      float2 x = make_float2(NONE, 0.0f);
      if (split < count) x = __ldcg((const float2*)(a.stats + 2 * (place + (u64)split * KV_HEADS * a.held + row)));
      float mn = fmaxf(M[i], running_maximum(x.x, lane)), before = __shfl_up_sync(~0u, mn, 1);
      if (lane == 0) before = M[i];
      bool seen = x.x != NONE;
      float old_weight = exp2_approx(__fsub_rn(before, mn)), weight = seen ? exp2_approx(__fsub_rn(x.x, mn)) : -1.0f;
      if (split < count) at<float4>(TABLE_AT)[split * rows + row] = make_float4(old_weight, weight, x.y, mn);
      M[i] = __shfl_sync(~0u, mn, LANES - 1);
    }
  }
}

// All threads of the mergers: the splits of a (sequence, kv head), ascending, as many at once as there is room for.
__device__ __forceinline__ void merge(
    const Arguments& a, const Item& item, u32 shared, u32 staged, u32& stages, u32 thread) {
  int rows = item.count * GROUP, splits = splits_of(item), bytes = rows * D * 4, room = MERGED * ROWS / rows;
  u64 first = ((u64)(item.place - item.split) * KV_HEADS + item.head) * a.held;
  float A[PARTS][4] = {}, L[PARTS] = {}, maxima[PARTS], M[ROWS / MERGERS];
#pragma unroll
  for (int i = 0; i < ROWS / MERGERS; i++) M[i] = NONE;
  for (int split0 = 0; split0 < splits; split0 += room, stages++) {
    int count = min(splits - split0, room);
    u64 place = first + (u64)split0 * KV_HEADS * a.held;
    if (thread == 0) barrier_expect(staged, count * bytes);
    fence_async_global();
    for (int i = thread; i < count; i += MERGERS * LANES)
      copy_bulk(shared + STAGE_AT + i * bytes, a.partial + (place + (u64)i * KV_HEADS * a.held) * D, bytes, staged);
    weigh_splits(M, a, place, count, rows, thread / LANES, thread % LANES);
    named_sync(2, MERGERS * LANES);
    barrier_wait(staged, stages & 1);
    for (int i = 0; i < count; i++)
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        int e = (part * MERGERS * LANES + thread) * 4;
        if (e >= rows * D) continue;
        float4 x = at<float4>(STAGE_AT + i * bytes)[e / 4], w = at<float4>(TABLE_AT)[i * rows + e / D];
        float acc[4] = {x.x, x.y, x.z, x.w};
        maxima[part] = w.w;
        if (w.y < 0) continue;  // the row sees no key of this split
#pragma unroll
        for (int j = 0; j < 4; j++) A[part][j] = __fadd_rn(__fmul_rn(A[part][j], w.x), __fmul_rn(acc[j], w.y));
        L[part] = __fadd_rn(__fmul_rn(L[part], w.x), __fmul_rn(w.z, w.y));
      }
    named_sync(2, MERGERS * LANES);
  }
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    int e = (part * MERGERS * LANES + thread) * 4, row = e / D, d = e % D;
    if (e >= rows * D) continue;
#pragma unroll
    for (int j = 0; j < 4; j++) store_out(a, item, row, d + j, __fdiv_rn(A[part][j], L[part]));
    if (d == 0) store_lse(a, item, row, maxima[part], L[part]);
  }
}

__device__ __forceinline__ void merge_all(
    const Arguments& a, const Barriers& barriers, u32 shared, int total, const Header& header, u32 thread) {
  u32 results = 0, stages = 0, lane = thread % LANES;
  Ticket ticket = {(int)blockIdx.x, item_of(header, blockIdx.x)};
  for (u32 n = 0; ticket.index < total; n++) {
    const Item& item = ticket.item;
    if (!alone(item)) {
      int* arrived = a.arrived + item.sequence * KV_HEADS + item.head;
      volatile int* last = at<int>(LAST_AT) + (results & 1);
      barrier_wait(barriers.stored, results & 1);
      store_partial(a, item, thread);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.taken);
      fence_gpu();
      named_sync(2, MERGERS * LANES);
      if (thread == 0) {
        *last = atomicAdd(arrived, 1) == splits_of(item) - 1;
        fence_gpu();
      }
      named_sync(2, MERGERS * LANES);
      if (*last) {
        merge(a, item, shared, barriers.staged, stages, thread);
        if (thread == 0) *arrived = 0;  // for the next layer
      }
      results++;
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
  int total = *a.total * KV_HEADS, page = 0;
  Header header = header_of(a, blockIdx.x);  // of each block one item at least has room in the list
  Barriers barriers;
  barriers.full = shared + BARRIERS_AT, barriers.empty = barriers.full + RING * 8;
  barriers.queued = barriers.empty + RING * 8, barriers.read = barriers.queued + QUEUE * 8;
  barriers.stored = barriers.read + QUEUE * 8, barriers.taken = barriers.stored + 8, barriers.staged = barriers.taken + 8;
  if (warp == SCORERS) {
    page = page_of(a, blockIdx.x, lane);
    if (lane == 0) prefetch_map(&k_map), prefetch_map(&v_map);
    if (lane < RING) barrier_init(barriers.full + lane * 8, 1), barrier_init(barriers.empty + lane * 8, SCORERS);
    if (lane < QUEUE) barrier_init(barriers.queued + lane * 8, 1), barrier_init(barriers.read + lane * 8, SCORERS + MERGERS);
    if (lane == 0) barrier_init(barriers.stored, SCORERS), barrier_init(barriers.taken, MERGERS), barrier_init(barriers.staged, 1);
    barriers_ready();
  }
  __syncthreads();
  if (warp < SCORERS)
    attend(a, barriers, shared, total, header, warp, lane);
  else if (warp == SCORERS)
    produce(a, &k_map, &v_map, barriers, shared, next, total, header, page, lane);
  else
    merge_all(a, barriers, shared, total, header, thread - (SCORERS + 1) * LANES);
}
