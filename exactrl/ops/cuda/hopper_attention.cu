// Causal attention that walks the KV splits in order: prefill, chunks and training on sm_90a, for head dims 64 and 128.
// The definition is that of triton_attention.py, its bit reference; every rounding below is one of the contract's.
//
// A block of four warpgroups takes item after item from a list. One thread of the first fetches what the next item is,
// another loads; the other warpgroups hold 64 rows each: TOKENS consecutive tokens times the GROUP query heads of one kv
// head. All walk the same number of key blocks; blocks that a row may not see change nothing of it. The products of block
// j with its values run while the exponentials of block j + 1 are taken. Nothing waits for all warpgroups: one may be at
// the next item's first blocks while another divides and stores.
//
// Compiled with -D DIM, GROUP, PAGE_BOX (rows of one copy), PAGED, PAGE_SIZE, STAGES, SHARED_BYTES.

constexpr int CONSUMERS = 3;
constexpr int TOKENS = 64 / GROUP, REGIONS = D / 64;
constexpr int BLOCK_BYTES = BLOCK * D * 2, REGION_BYTES = 64 * 128;
constexpr int VALUE_BYTES = BLOCK_BYTES + REGION_BYTES;  // with the ones

struct alignas(16) Work {  // an item, and what the device knows of its sequence
  int sequence, kv_head;  // sequence -1: there is no more
  int row, tokens;        // of q: the item's first; how many its sequence has from there
  int position, length;   // of the first token; keys of the sequence
  int start, blocks;      // row of packed keys; key blocks up to the last token of the item
};

struct Shared {
  alignas(1024) char q[CONSUMERS][REGIONS * REGION_BYTES];
  alignas(1024) char k[STAGES][BLOCK_BYTES];
  alignas(1024) char v[STAGES][VALUE_BYTES];
  float4 merged[CONSUMERS][NUM_OUT / 4][128];  // [warpgroup][accumulator / 4][thread]: what earlier splits came to
  Work work[2];
  u64 work_full[2], work_empty[2], q_full[CONSUMERS], q_empty[CONSUMERS];
  u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

static_assert(sizeof(Shared) == (SHARED_BYTES + 1023) / 1024 * 1024, "the host asks for another size");

struct Item {
  int sequence, kv_head, first, unused;  // first token, counted from the sequence's first in this batch
};

struct Arguments {
  const int* tables;   // [sequences, table_width]
  const int* starts;   // [sequences + 1] first token of each sequence in the batch
  const int* lengths;  // [sequences] keys
  const Item* items;
  u32* counters;  // [2] next item, blocks that found none; 0 before and after a launch
  uint4* out;     // bf16 [tokens, heads, D], eight at a time
  float* lse;     // [heads, tokens] or null
  int table_width, num_items, kv_heads, num_tokens, split_blocks;
  float scale;
};

struct Ring {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Takes items, whichever is next: this decides where a row is computed, never how.
__device__ void schedule(Shared& s, const Arguments& a) {
  for (int round = 0;; round++) {
    const int slot = round & 1;
    barrier_wait(shared_address(&s.work_empty[slot]), (round >> 1 & 1) ^ 1);
    const u32 index = atomicAdd(a.counters, 1);
    Work work = {-1};
    if (index < a.num_items) {
      const Item item = a.items[index];
      const int start = a.starts[item.sequence], count = a.starts[item.sequence + 1] - start;
      const int length = a.lengths[item.sequence];
      work = {item.sequence, item.kv_head, start + item.first, count - item.first, length - count + item.first, length,
              start, (length - count + min(item.first + CONSUMERS * TOKENS, count) - 1) / BLOCK + 1};
    }
    s.work[slot] = work;
    barrier_arrive(shared_address(&s.work_full[slot]));
    if (work.sequence < 0) break;
  }
  if (atomicInc(a.counters + 1, gridDim.x - 1) == gridDim.x - 1) a.counters[0] = 0;
}

template <int BYTES>
__device__ __forceinline__ void load_block(
    Ring& ring, char (&tiles)[STAGES][BYTES], u64* fulls, u64* empties, const TensorMap* map, const Arguments& a,
    const Work& work, int block) {
  u32 into = shared_address(tiles[ring.stage]), full = shared_address(&fulls[ring.stage]);
  barrier_wait(shared_address(&empties[ring.stage]), ring.phase ^ 1);
  ring.next();
  barrier_expect(full, BLOCK_BYTES);
#pragma unroll
  for (int part = 0; part < BLOCK / PAGE_BOX; part++) {
    int key = block * BLOCK + part * PAGE_BOX, row = work.start + key, page = 0;
    if (PAGED) {
      // Pages beyond the sequence's last may not exist; their keys are masked, their values zeroed.
      int known = min(key, work.length - 1);
      page = a.tables[static_cast<long long>(work.sequence) * a.table_width + known / PAGE_SIZE];
      row = key % PAGE_SIZE;
    }
#pragma unroll
    for (int r = 0; r < REGIONS; r++)
      copy_box(into + r * REGION_BYTES + part * PAGE_BOX * 128, map, full, r * 64, work.kv_head, row, page);
  }
}

__device__ void produce(Shared& s, const TensorMap* mq, const TensorMap* mk, const TensorMap* mv, const Arguments& a) {
  Ring k_ring, v_ring;
  for (int round = 0;; round++) {
    barrier_wait(shared_address(&s.work_full[round & 1]), round >> 1 & 1);
    const Work& work = s.work[round & 1];
    if (work.sequence < 0) break;
    load_block(k_ring, s.k, s.k_full, s.k_empty, mk, a, work, 0);
    for (int w = 0; w < CONSUMERS; w++) {
      const u32 full = shared_address(&s.q_full[w]);
      barrier_wait(shared_address(&s.q_empty[w]), (round & 1) ^ 1);
      barrier_expect(full, REGIONS * TOKENS * GROUP * 128);
      for (int r = 0; r < REGIONS; r++)
        copy_box(shared_address(s.q[w]) + r * REGION_BYTES, mq, full, r * 64, 0, work.kv_head, work.row + w * TOKENS);
    }
    for (int block = 1; block <= work.blocks; block++) {  // keys are needed a block before their values
      if (block < work.blocks) load_block(k_ring, s.k, s.k_full, s.k_empty, mk, a, work, block);
      load_block(v_ring, s.v, s.v_full, s.v_empty, mv, a, work, block - 1);
    }
    barrier_arrive(shared_address(&s.work_empty[round & 1]));
  }
}

// Of a value that all threads of a warp have, so that the compiler knows.
__device__ __forceinline__ int same(int x) { return __shfl_sync(~0u, x, 0); }

// Values of keys that do not exist are whatever the cache holds, NaN maybe, and 0 · NaN is not 0.
__device__ __forceinline__ void zero_values(char* v, int from, int thread, int warpgroup) {
  for (int i = from * 8 + thread; i < BLOCK * 8; i += 128)
#pragma unroll
    for (int r = 0; r < REGIONS; r++)
      reinterpret_cast<uint4*>(v + r * REGION_BYTES)[i] = make_uint4(0, 0, 0, 0);
  fence_async_shared();
  named_sync(1 + warpgroup, 128);
}

// What one warpgroup holds of its tile.
struct Tile {
  u32 p[4][4];  // probabilities of the block whose product is next
  float acc[NUM_ACC];
  Row rows[2];
  int positions[2];  // of this thread's two rows
  int to_boundary;   // blocks of the present split that are not yet in acc
  bool fresh;        // the next product starts a split, acc counts as 0

  // q, k: operands, as are v and all places below.
  __device__ __forceinline__ void scores_of(float (&scores)[32], u32 q, u32 k) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      u32 at = (step / 4 * REGION_BYTES + step % 4 * 32) / 16;
      if (step == 0) multiply_shared<0>(scores, q + at, k + at);
      else multiply_shared<1>(scores, q + at, k + at);
    }
  }

  __device__ __forceinline__ void weigh(u32 v) {
#pragma unroll
    for (int step = 0; step < 4; step++) multiply_t(acc, p[step], v + step * 2048 / 16, step > 0 || !fresh);
  }
};

struct Consumer {
  Shared& s;
  const Arguments& a;
  int warpgroup, thread, lane;
  u32 q0, k0, v0;  // operands of the first queries, keys and values
  Ring k_ring, v_ring;

  __device__ __forceinline__ u32 queries() { return q0 + warpgroup * sizeof(s.q[0]) / 16; }
  __device__ __forceinline__ u32 keys() { return k0 + k_ring.stage * sizeof(s.k[0]) / 16; }
  __device__ __forceinline__ u32 values() { return v0 + v_ring.stage * sizeof(s.v[0]) / 16; }
  __device__ __forceinline__ void wait_keys() { barrier_wait(shared_address(&s.k_full[k_ring.stage]), k_ring.phase); }
  __device__ __forceinline__ void wait_values() { barrier_wait(shared_address(&s.v_full[v_ring.stage]), v_ring.phase); }
  __device__ __forceinline__ void free_keys() {
    if (lane == 0) barrier_arrive(shared_address(&s.k_empty[k_ring.stage]));
    k_ring.next();
  }
  __device__ __forceinline__ void free_values() {
    if (lane == 0) barrier_arrive(shared_address(&s.v_empty[v_ring.stage]));
    v_ring.next();
  }

  __device__ __forceinline__ void free_queries(bool now) {
    if (now && lane == 0) barrier_arrive(shared_address(&s.q_empty[warpgroup]));
  }

  // Scores and probabilities of block 0; no split is merged yet.
  __device__ __forceinline__ void first(Tile& t, int last_open, bool only) {
    float scores[32], unused[2];
    wait_keys();
    mma_fence();
    t.scores_of(scores, queries(), keys());
    mma_commit();
#pragma unroll
    for (int i = 0; i < NUM_OUT / 4; i++) store_shared(&s.merged[warpgroup][i][thread], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    mma_wait<0>();
    hold(scores);
    free_keys();
    free_queries(only);
    soften(scores, a.scale, last_open < 0, t.positions, lane, true, t.rows, unused);
    round_all(scores, t.p);
    t.to_boundary = a.split_blocks;
    t.fresh = true;
  }

  // Scores of block j + 1 and products of block j; the exponentials of j + 1 run under the products.
  __device__ __forceinline__ void step(Tile& t, int j, int last_open, int blocks) {
    float scores[32], rescale[2];
    wait_values();
    wait_keys();
    hold(t.acc);
    mma_fence();
    t.scores_of(scores, queries(), keys());
    mma_commit();
    t.weigh(values());
    mma_commit();
    mma_wait<1>();
    hold(scores);
    free_keys();
    free_queries(j + 2 == blocks);
    const bool boundary = --t.to_boundary == 0;
    const float before[2] = {t.rows[0].max, t.rows[1].max};
    const int visible[2] = {t.positions[0] - (j + 1) * BLOCK, t.positions[1] - (j + 1) * BLOCK};
    soften(scores, a.scale, j + 1 > last_open, visible, lane, boundary, t.rows, rescale);
    hold(scores);
    // Times exactly one changes no bit; within a split maxima move less and less. Each branch waits for itself: the
    // compiler moves a wait up to the start of its branch, and were it here, in front of all the exponentials.
    const bool moved = __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f);
    if (boundary) {
      mma_wait_here<0>();
      hold(t.acc);
      merge<false>(t.acc, s.merged[warpgroup], t.rows, before);
      t.to_boundary = a.split_blocks;
    } else if (moved) {
      mma_wait_here<1>();
      hold(t.acc);
      rescale_all(t.acc, rescale);
    } else {
      mma_wait_here<2>();
      hold(t.acc);
    }
    free_values();
    t.fresh = boundary;
    round_all(scores, t.p);
  }

  // The products of the last block; acc becomes the output.
  __device__ __forceinline__ void last(Tile& t, int missing_from) {
    wait_values();
    if (missing_from < BLOCK) zero_values(s.v[v_ring.stage], missing_from, thread, warpgroup);
    hold(t.acc);
    mma_fence();
    t.weigh(values());
    mma_commit();
    mma_wait<0>();
    hold(t.acc);
    free_values();
    const float max[2] = {t.rows[0].max, t.rows[1].max};
    merge<true>(t.acc, s.merged[warpgroup], t.rows, max);
    const float sums[2] = {t.rows[0].merged_sum, t.rows[1].merged_sum};
    divide(t.acc, s.merged[warpgroup], sums);
  }

  // A warp's 16 rows by way of its own part of `merged`, so that a row's bytes leave together.
  __device__ __forceinline__ void store(Tile& t, const Work& work) {
    // Counted anew: places of rows computed before the loops would be held in registers that those need.
    const int thread = thread_again(), lane = thread & 31;
    constexpr int CHUNKS = D / 8, ROWS_OF_PART = 512 / (2 * D);  // chunks of 16 bytes; a part is 32 threads' float4
    const int warp = thread >> 5, row = work.row + warpgroup * TOKENS, tokens = work.tokens - warpgroup * TOKENS;
    const u32 parts = shared_address(&s.merged[warpgroup][0][warp * 32]);
    auto place = [&](int r, int chunk) {
      return parts + r / ROWS_OF_PART * 2048 + r % ROWS_OF_PART * 2 * D + ((chunk ^ (r & 7)) * 16);
    };
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        store_word(place(lane / 4 + 8 * half, c) + (lane & 3) * 4, pack(t.acc[4 * c + 2 * half], t.acc[4 * c + 2 * half + 1]));
      const int within = warp * 16 + lane / 4 + 8 * half, token = within / GROUP;
      if (a.lse != nullptr && (lane & 3) == 0 && within < TOKENS * GROUP && token < tokens)
        a.lse[static_cast<long long>(work.kv_head * GROUP + within % GROUP) * a.num_tokens + row + token] =
            log_sum_exp(t.rows[half].merged_max, t.rows[half].merged_sum);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * CHUNKS / 32; i++) {
      const int r = (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS, within = warp * 16 + r, token = within / GROUP;
      const uint4 x = load_words(place(r, chunk));
      if (within < TOKENS * GROUP && token < tokens)
        a.out[(static_cast<long long>(row + token) * a.kv_heads * GROUP + work.kv_head * GROUP + within % GROUP) * CHUNKS +
              chunk] = x;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    const int row = (thread >> 5) * 16 + lane / 4;
    for (int round = 0;; round++) {
      const Work& work = s.work[round & 1];
      barrier_wait(shared_address(&s.work_full[round & 1]), round >> 1 & 1);
      if (same(work.sequence) < 0) break;
      const int position0 = same(work.position) + warpgroup * TOKENS, blocks = same(work.blocks);
      const int missing_from = same(work.length) - (blocks - 1) * BLOCK;
      Tile t;
      t.positions[0] = position0 + row / GROUP, t.positions[1] = position0 + (row + 8) / GROUP;
#pragma unroll
      for (int half = 0; half < 2; half++) t.rows[half] = {NONE, NONE, 0.0f};

      barrier_wait(shared_address(&s.q_full[warpgroup]), round & 1);
      // A block needs no mask while its last key is at or before the warpgroup's first token.
      const int last_open = (position0 + 1) / BLOCK - 1;
      first(t, last_open, blocks == 1);
      for (int j = 0; j + 1 < blocks; j++) step(t, j, last_open, blocks);
      last(t, missing_from);
      store(t, work);
      if (lane == 0) barrier_arrive(shared_address(&s.work_empty[round & 1]));
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1) attend(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    const __grid_constant__ Arguments arguments) {
  extern __shared__ char raw[];
  Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<u64>(raw) + 1023) & ~1023ull);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(shared_address(&s.work_full[i]), 1);
      barrier_init(shared_address(&s.work_empty[i]), 1 + 4 * CONSUMERS);
    }
    for (int w = 0; w < CONSUMERS; w++) {
      barrier_init(shared_address(&s.q_full[w]), 1);
      barrier_init(shared_address(&s.q_empty[w]), 4);
    }
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared_address(&s.k_full[i]), 1);
      barrier_init(shared_address(&s.v_full[i]), 1);
      barrier_init(shared_address(&s.k_empty[i]), 4 * CONSUMERS);
      barrier_init(shared_address(&s.v_empty[i]), 4 * CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = threadIdx.x; i < STAGES * REGION_BYTES / 4; i += 128 * (1 + CONSUMERS))
    reinterpret_cast<u32*>(s.v[i / (REGION_BYTES / 4)] + BLOCK_BYTES)[i % (REGION_BYTES / 4)] = 0x3F803F80;
  fence_async_shared();
  __syncthreads();
  const int warpgroup = same(threadIdx.x >> 7);
  if (warpgroup == 0) {
    give_registers<32>();
    if (threadIdx.x == 0) produce(s, &q, &k, &v, arguments);
    if (threadIdx.x == 32) schedule(s, arguments);
  } else {
    take_registers<160>();
    int thread = threadIdx.x & 127;
    u32 q0 = operand(shared_address(s.q)), k0 = operand(shared_address(s.k)), v0 = operand(shared_address(s.v), REGION_BYTES);
    Consumer{s, arguments, warpgroup - 1, thread, thread & 31, q0, k0, v0}.run();
  }
}
