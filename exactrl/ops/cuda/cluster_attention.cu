// Attention with the KV splits in parallel on sm_90, where latency counts: a cluster of blocks takes one split of one
// (sequence, kv head) at a time; at most eight rows (positions x grouped heads) for each sequence.
// Same bits as triton_attention.py's reference; every rounding below is one of the definition in attention.py.
//
// Of a split only l and the output are chains over its keys. So a block scores its share of the keys, all blocks get all
// scores, each warp of a block takes the maximum and the weights of one block of 64 keys, and then the block multiplies
// all keys into its share of the output's columns. K and V are read once by the cluster, all at the same time. While
// weights are multiplied into V, the next split's K arrives; while keys are scored, its V.
// Whoever finishes the last split of a (sequence, kv head) merges its columns of all of them, ascending.
//
// Compiled with -D of split_items.cuh and CTAS (blocks of a cluster), RESIDENT (blocks on a multiprocessor, at least),
// SHARED_BYTES.

constexpr int WARPS = 8, THREADS = WARPS * LANES, ROWS = 8, BLOCKS = SPLIT / BLOCK;
constexpr int KEYS = SPLIT / CTAS, COLUMNS = D / CTAS, TILES = KEYS / 16;  // of a block; tiles of 16 keys
constexpr int KEY_TILES = (TILES + WARPS - 1) / WARPS, VALUE_WARPS = COLUMNS / 16, VALUE_SEGMENTS = COLUMNS / 8;
constexpr int SCORES = SPLIT + 8, Q_BYTES = ROW_BYTES + 16, UNROLL = 16;  // row lengths without bank conflicts; merge
constexpr int K_AT = 0, V_AT = KEYS * ROW_BYTES, Q_AT = V_AT + SPLIT * COLUMNS * 2, S_AT = Q_AT + ROWS * Q_BYTES;
constexpr int P_AT = S_AT + ROWS * SCORES * 4, MAXIMA_AT = P_AT + SPLIT / 16 * LANES * 8;
constexpr int FACTORS_AT = MAXIMA_AT + BLOCKS * ROWS * 4, LAST_AT = FACTORS_AT + BLOCKS * ROWS * 4;
static_assert(LAST_AT + 16 <= SHARED_BYTES);

extern __shared__ __align__(128) char memory[];

template <typename T>
__device__ __forceinline__ T* at(int place) {
  return (T*)(memory + place);
}

// Place of a 16-byte segment of row `row`, in rows of `width` segments: eight rows of one segment lie in different banks.
__device__ __forceinline__ u32 swizzled(u32 row, u32 segment, u32 width) {
  u32 turn = width < 8 ? row / (8 / width) % width : row % 8;
  return (row * width + (segment ^ turn)) * 16;
}

struct Work {
  Item item;
  int page;
};

__device__ __forceinline__ Work work_of(const Arguments& a, int index, u32 lane) {
  return {item_of(header_of(a, index), index), page_of(a, index, lane)};
}

// From the sequence's end on nothing is read and zeros are stored.
__device__ __forceinline__ void copy_queries(const Arguments& a, const Item& item, u32 into, u32 thread) {
  const bf16* q = a.q + item.head * GROUP * D;
  for (u32 i = thread; i < ROWS * D / 2; i += THREADS) {
    u32 row = i / (D / 2), word = i % (D / 2);
    bool there = (int)row < item.count * GROUP;
    const bf16* from = q + (u64)(item.start + (there ? row / GROUP : 0)) * a.stride_q + row % GROUP * D + word * 2;
    copy_4(into + row * Q_BYTES + word * 4, there ? from : q, there ? 4 : 0);
  }
}

__device__ __forceinline__ void copy_keys(const Arguments& a, const Work& w, u32 into, u32 rank, u32 thread) {
  const bf16* k = a.k + w.item.head * D;
  u32 keys = keys_of(w.item);
#pragma unroll
  for (int i = 0; i < KEYS * SEGMENTS / THREADS; i++) {
    u32 row = (i * THREADS + thread) / SEGMENTS, segment = thread % SEGMENTS, key = rank * KEYS + row;
    int page = __shfl_sync(~0u, w.page, key / 16);
    u64 slot = key < keys ? (u64)page * PAGE_SIZE + key % PAGE_SIZE : 0;
    copy_16(into + swizzled(row, segment, SEGMENTS), k + slot * a.stride_k + segment * 8, key < keys ? 16 : 0);
  }
}

__device__ __forceinline__ void copy_values(const Arguments& a, const Work& w, u32 into, u32 rank, u32 thread) {
  const bf16* v = a.v + w.item.head * D + rank * COLUMNS;
  u32 keys = keys_of(w.item);
#pragma unroll
  for (int i = 0; i < SPLIT * VALUE_SEGMENTS / THREADS; i++) {
    u32 key = (i * THREADS + thread) / VALUE_SEGMENTS, segment = thread % VALUE_SEGMENTS;
    int page = __shfl_sync(~0u, w.page, key / 16);
    u64 slot = key < keys ? (u64)page * PAGE_SIZE + key % PAGE_SIZE : 0;
    copy_16(into + swizzled(key, segment, VALUE_SEGMENTS), v + slot * a.stride_v + segment * 8, key < keys ? 16 : 0);
  }
}

// The scores of this block's keys, into every block of the cluster: keys on the wide side of the matrix unit, rows on the
// narrow one.
__device__ __forceinline__ void score(const Arguments& a, const Item& item, u32 shared, u32 rank, u32 warp, u32 lane) {
  u32 q[STEPS][2];
  const u32* words = at<u32>(Q_AT + (lane >> 2) * Q_BYTES + (lane & 3) * 4);
#pragma unroll
  for (int i = 0; i < STEPS; i++) q[i][0] = words[i * 8], q[i][1] = words[i * 8 + 4];
  float s[KEY_TILES][4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; step++)
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++) {
      int tile = i * WARPS + warp;
      if (tile >= TILES) continue;
      u32 keys[4];
      load_tile(keys, shared + K_AT + swizzled(tile * 16 + (lane & 15), step * 2 + (lane >> 4), SEGMENTS));
      multiply(s[i], keys, q[step][0], q[step][1]);
    }
  cluster_wait();  // all blocks have read the scores before
  int seen = item.length - item.count + 1 - item.split * SPLIT;  // keys of the split that the first row sees
#pragma unroll
  for (int i = 0; i < KEY_TILES; i++) {
    int tile = i * WARPS + warp;
    if (tile >= TILES) continue;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int key = rank * KEYS + tile * 16 + (j >> 1) * 8 + (lane >> 2), row = (lane & 3) * 2 + (j & 1);
      float value = __fmul_rn(s[i][j], a.scale);
      if (key >= seen + row / GROUP) value = NONE;
      u32 into = shared + S_AT + (row * SCORES + key) * 4;
#pragma unroll
      for (int block = 0; block < CTAS; block++) store_in_cluster(in_block(into, block), value);
    }
  }
  cluster_arrive();
  cluster_wait();
}

// Each warp the weights of one block of 64 keys, as the matrix unit takes them, and the factor for what came before it.
// Returns the split's maximum of row lane / 4. A barrier later all warps may read them.
__device__ __forceinline__ float weigh(u32 warp, u32 lane) {
  int row = lane >> 2;
  const float2* scores = at<float2>(S_AT + (row * SCORES + warp * BLOCK + (lane & 3) * 2) * 4);
  float* maxima = at<float>(MAXIMA_AT) + row;
  float2 s[BLOCK / 8];
  float best = NONE;
#pragma unroll
  for (int i = 0; i < BLOCK / 8; i++) s[i] = scores[i * 4], best = fmaxf(best, fmaxf(s[i].x, s[i].y));
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
  if ((lane & 3) == 0) maxima[warp * ROWS] = best;
  cluster_arrive();  // the scores are read
  __syncthreads();
  float before = NONE, all = NONE;
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    float m = maxima[i * ROWS];
    if (i < warp) before = fmaxf(before, m);
    all = fmaxf(all, m);
  }
  float mn = fmaxf(before, best), mz = mn == NONE ? 0.0f : mn;
  if ((lane & 3) == 0) at<float>(FACTORS_AT)[warp * ROWS + row] = exp2_approx(__fsub_rn(before, mz));
  uint2* weights = at<uint2>(P_AT) + warp * (BLOCK / 16) * LANES + lane;
#pragma unroll
  for (int i = 0; i < BLOCK / 16; i++) {
    u32 half[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
      half[j] = pack(exp2_approx(__fsub_rn(s[2 * i + j].x, mz)), exp2_approx(__fsub_rn(s[2 * i + j].y, mz)));
    weights[i * LANES] = make_uint2(half[0], half[1]);
  }
  return all;
}

struct Operands {  // of one block of 64 keys
  uint2 p[BLOCK / 16];
  u32 v[BLOCK / 16][4];
  float2 factor;
};

__device__ __forceinline__ void load_operands(Operands& x, u32 shared, int block, u32 warp, u32 lane) {
  const uint2* weights = at<uint2>(P_AT) + block * (BLOCK / 16) * LANES + lane;
  x.factor = at<float2>(FACTORS_AT)[block * ROWS / 2 + (lane & 3)];
#pragma unroll
  for (int i = 0; i < BLOCK / 16; i++) {
    x.p[i] = weights[i * LANES];
    int key = block * BLOCK + i * 16 + (lane & 7) + (lane >> 4) * 8;
    load_tile_transposed(x.v[i], shared + V_AT + swizzled(key, warp * 2 + (lane >> 3 & 1), VALUE_SEGMENTS));
  }
}

// One warp's 16 columns: all keys in order, rescaled at each block. acc: columns g and g + 8, rows 2t and 2t + 1 of lane
// 4g + t; l's columns are all equal.
__device__ __forceinline__ void accumulate(float (&acc)[4], float (&l)[4], u32 shared, int blocks, u32 warp, u32 lane) {
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  Operands next;
  load_operands(next, shared, 0, warp, lane);
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    if (block >= blocks) break;
    Operands x = next;
    if (block + 1 < BLOCKS) load_operands(next, shared, block + 1, warp, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float factor = i & 1 ? x.factor.y : x.factor.x;
      l[i] = __fmul_rn(l[i], factor), acc[i] = __fmul_rn(acc[i], factor);
    }
#pragma unroll
    for (int i = 0; i < BLOCK / 16; i++) {
      multiply(l, ones, x.p[i].x, x.p[i].y);
      multiply(acc, x.v[i], x.p[i].x, x.p[i].y);
    }
  }
}

// The only split of its sequence, merged into nothing; or, where the plan has no room, NaN. Else a partial result.
__device__ __forceinline__ void store(
    const Arguments& a, const Item& item, const float (&acc)[4], const float (&sums)[4], float all, u32 rank, u32 warp,
    u32 lane) {
  float maxima[2] = {__shfl_sync(~0u, all, (lane & 3) * 8), __shfl_sync(~0u, all, (lane & 3) * 8 + 4)};
  bool alone = item.split < 0 || splits_of(item) == 1;
#pragma unroll
  for (int side = 0; side < 2; side++) {
    int row = (lane & 3) * 2 + side, d = rank * COLUMNS + warp * 16 + (lane >> 2);
    float m = maxima[side], l = sums[side];
    if (row >= item.count * GROUP) continue;
    if (alone) {
      float first = exp2_approx(__fsub_rn(NONE, m)), second = exp2_approx(__fsub_rn(m, m));
      l = __fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(l, second));
      if (item.split < 0) l = __int_as_float(0x7fffffff);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float numerator = __fadd_rn(__fmul_rn(0.0f, first), __fmul_rn(acc[half * 2 + side], second));
        store_out(a, item, row, d + half * 8, __fdiv_rn(numerator, l));
      }
      if (d == 0) store_lse(a, item, row, m, l);
    } else {
      u64 place = ((u64)item.place * KV_HEADS + item.head) * a.held + row;
      a.partial[place * D + d] = acc[side], a.partial[place * D + d + 8] = acc[2 + side];
      // Every block of the cluster stores the same: each reads only what blocks of its own rank have stored.
      if (warp == 0 && lane < 4) *(float2*)(a.stats + 2 * place) = make_float2(m, l);
    }
  }
}

// All threads of the block: its columns of the splits of a (sequence, kv head), ascending.
__device__ void merge(const Arguments& a, const Item& item, u32 rank, u32 thread) {
  int splits = splits_of(item);
  u64 first = ((u64)(item.place - item.split) * KV_HEADS + item.head) * a.held;
  for (int e = thread; e < item.count * GROUP * COLUMNS; e += THREADS) {
    int row = e / COLUMNS, d = rank * COLUMNS + e % COLUMNS;
    float A = 0, M = NONE, L = 0;
    for (int split0 = 0; split0 < splits; split0 += UNROLL) {
      float acc[UNROLL];
      float2 stats[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        u64 place = first + (u64)min(split0 + i, splits - 1) * KV_HEADS * a.held + row;
        acc[i] = __ldcg(a.partial + place * D + d);
        stats[i] = __ldcg((const float2*)(a.stats + 2 * place));
      }
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        float m = stats[i].x;
        if (split0 + i >= splits || m == NONE) continue;  // a split of which the row sees no key
        float mn = fmaxf(M, m), old_weight = exp2_approx(__fsub_rn(M, mn)), weight = exp2_approx(__fsub_rn(m, mn));
        A = __fadd_rn(__fmul_rn(A, old_weight), __fmul_rn(acc[i], weight));
        L = __fadd_rn(__fmul_rn(L, old_weight), __fmul_rn(stats[i].y, weight)), M = mn;
      }
    }
    store_out(a, item, row, d, __fdiv_rn(A, L));
    if (d == 0) store_lse(a, item, row, M, L);
  }
}

__device__ __forceinline__ int* arrivals_of(const Arguments& a, const Item& item, u32 rank) {
  return a.arrived + (item.sequence * KV_HEADS + item.head) * CTAS + rank;
}

// The block's partial result is there: how many blocks of its rank were before it.
__device__ __forceinline__ int signal(int* arrivals) {
  __threadfence();
  return atomicAdd(arrivals, 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend_clusters(
    const bf16* q_rows, const bf16* k, const bf16* v, bf16* out, float* lse, int wants_lse, const int* items,
    const int* item_count, int* arrived, float* partial, float* stats, int tokens, int held, int stride_q, int stride_k,
    int stride_v, float scale) {
  const Arguments a = {q_rows, k, v, out, wants_lse ? lse : nullptr, items, item_count, arrived, partial, stats, nullptr,
                       nullptr, nullptr, 0, tokens, held, stride_q, stride_k, stride_v, scale};
  u32 shared = shared_address(memory);
  int* last = at<int>(LAST_AT);
  u32 thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES, rank = cluster_rank();
  int index = blockIdx.x / CTAS, step = gridDim.x / CTAS;
  Work now = work_of(a, index, lane);  // of each cluster one item at least has room in the list
  int total = *a.total * KV_HEADS;
  if (index >= total) return;  // all blocks of the cluster
  copy_queries(a, now.item, shared + Q_AT, thread);
  copy_keys(a, now, shared + K_AT, rank, thread);
  copies_commit();
  copy_values(a, now, shared + V_AT, rank, thread);
  copies_commit();
  cluster_arrive();
  Item merging;  // its last split may be that of the round before
  int before = -1, splits = 1;
  for (; index < total; index += step) {
    Work next = now;
    if (index + step < total) next = work_of(a, index + step, lane);
    copies_wait<1>();
    __syncthreads();
    score(a, now.item, shared, rank, warp, lane);
    if (index + step < total) {
      copy_queries(a, next.item, shared + Q_AT, thread);
      copy_keys(a, next, shared + K_AT, rank, thread);
    }
    copies_commit();
    if (thread == 0) *last = before == splits - 1;
    float all = weigh(warp, lane);
    if (*last) {
      __threadfence();
      merge(a, merging, rank, thread);
      if (thread == 0) *arrivals_of(a, merging, rank) = 0;  // for the next layer
    }
    copies_wait<1>();
    __syncthreads();
    if (warp < VALUE_WARPS) {
      float acc[4] = {}, l[4] = {};
      accumulate(acc, l, shared, now.item.blocks, warp, lane);
      store(a, now.item, acc, l, all, rank, warp, lane);
    }
    __syncthreads();
    merging = now.item, splits = splits_of(merging), before = -1;
    if (merging.split < 0 || splits == 1) splits = 1;
    else if (thread == 0) before = signal(arrivals_of(a, merging, rank));
    if (index + step < total) copy_values(a, next, shared + V_AT, rank, thread);
    copies_commit();
    now = next;
  }
  if (thread == 0) *last = before == splits - 1;
  cluster_wait();
  __syncthreads();
  if (*last) {
    __threadfence();
    merge(a, merging, rank, thread);
    if (thread == 0) *arrivals_of(a, merging, rank) = 0;
  }
}
