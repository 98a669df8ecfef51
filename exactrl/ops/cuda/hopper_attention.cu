// Causal attention that walks the KV splits in order: prefill, chunks and training on sm_90a, for head dims 64 and 128.
// The definition is that of triton_attention.py, its bit reference; every rounding below is one of the contract's.
//
// A block of four warpgroups works through its share of the items. One thread of the first loads, the others hold 64
// rows each: TOKENS consecutive tokens times the GROUP query heads of one kv head. All walk the same number of key
// blocks; blocks that a row may not see change nothing of it. The products of block j with its values run while the
// exponentials of block j + 1 are taken.
//
// Compiled with -D DIM, GROUP, PAGE_BOX (rows of one copy), PAGED, PAGE_SIZE, STAGES, SHARED_BYTES, TAKE_TURNS.

constexpr int CONSUMERS = 3;
constexpr int D = DIM, BLOCK = 64, TOKENS = 64 / GROUP, REGIONS = D / 64;
constexpr int BLOCK_BYTES = BLOCK * D * 2, REGION_BYTES = 64 * 128;
// Values carry eight further columns of ones, so that one product gives the weighted sum and the sum of the weights.
constexpr int VALUE_BYTES = BLOCK_BYTES + REGION_BYTES, NUM_OUT = D / 2, NUM_ACC = NUM_OUT + 4;

struct Shared {
  alignas(1024) char q[CONSUMERS][REGIONS * REGION_BYTES];
  alignas(1024) char k[STAGES][BLOCK_BYTES];
  alignas(1024) char v[STAGES][VALUE_BYTES];
  float4 merged[CONSUMERS][NUM_OUT / 4][128];  // [warpgroup][accumulator / 4][thread]: what earlier splits came to
  u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
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
  unsigned int* out;  // bf16 [tokens, heads, D], two at a time
  float* lse;         // [heads, tokens] or null
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

__device__ __forceinline__ Item item_of(const Arguments& a, int round) {
  // Every other round backwards: items come longest first, and so the blocks' shares stay alike.
  int place = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  int index = round * gridDim.x + place;
  if (index >= a.num_items) return {-1, 0, 0, 0};
  Item item;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(item.sequence), "=r"(item.kv_head), "=r"(item.first), "=r"(item.unused)
               : "l"(a.items + index));
  return item;
}

// Key blocks up to the last token of the item.
__device__ __forceinline__ int blocks_of(const Item& item, int count, int length) {
  return (length - count + min(item.first + CONSUMERS * TOKENS, count) - 1) / BLOCK + 1;
}

__device__ __forceinline__ bool more(const Arguments& a, int round) { return round * static_cast<int>(gridDim.x) < a.num_items; }

template <int BYTES>
__device__ __forceinline__ void load_block(
    Ring& ring, char (&tiles)[STAGES][BYTES], u64* fulls, u64* empties, const TensorMap* map, const Arguments& a,
    const Item& item, int block, int start, int length) {
  u32 into = shared_address(tiles[ring.stage]), full = shared_address(&fulls[ring.stage]);
  barrier_wait(shared_address(&empties[ring.stage]), ring.phase ^ 1);
  ring.next();
  barrier_expect(full, BLOCK_BYTES);
#pragma unroll
  for (int part = 0; part < BLOCK / PAGE_BOX; part++) {
    int key = block * BLOCK + part * PAGE_BOX, row = start + key, page = 0;
    if (PAGED) {
      // Pages beyond the sequence's last may not exist; their keys are masked, their values zeroed.
      int known = min(key, length - 1);
      page = a.tables[static_cast<long long>(item.sequence) * a.table_width + known / PAGE_SIZE];
      row = key % PAGE_SIZE;
    }
#pragma unroll
    for (int r = 0; r < REGIONS; r++)
      copy_box(into + r * REGION_BYTES + part * PAGE_BOX * 128, map, full, r * 64, item.kv_head, row, page);
  }
}

__device__ void produce(Shared& s, const TensorMap* mq, const TensorMap* mk, const TensorMap* mv, const Arguments& a) {
  Ring k_ring, v_ring;
  u32 q_phase = 0;
  for (int round = 0; more(a, round); round++) {
    Item item = item_of(a, round);
    if (item.sequence < 0) continue;
    int start = a.starts[item.sequence], length = a.lengths[item.sequence];
    int blocks = blocks_of(item, a.starts[item.sequence + 1] - start, length);
    barrier_wait(shared_address(&s.q_empty), q_phase ^ 1);
    barrier_expect(shared_address(&s.q_full), CONSUMERS * REGIONS * TOKENS * GROUP * 128);
    for (int w = 0; w < CONSUMERS; w++)
      for (int r = 0; r < REGIONS; r++)
        copy_box(shared_address(s.q[w]) + r * REGION_BYTES, mq, shared_address(&s.q_full), r * 64, 0, item.kv_head,
                 start + item.first + w * TOKENS);
    q_phase ^= 1;
    for (int block = 0; block <= blocks; block++) {  // keys are needed a block before their values
      if (block < blocks) load_block(k_ring, s.k, s.k_full, s.k_empty, mk, a, item, block, start, length);
      if (block > 0) load_block(v_ring, s.v, s.v_full, s.v_empty, mv, a, item, block - 1, start, length);
    }
  }
}

// One row's running state; a thread has two rows, 8 apart.
struct Row {
  float max, merged_max, merged_sum;
};

// Scores of one block to probabilities, in place; row maxima updated, rescale factors returned. `visible`: the last key of
// the block that each of the two rows may see; only looked at when `masked`.
__device__ __forceinline__ void soften(
    float (&scores)[32], float scale, bool masked, const int (&visible)[2], int lane, bool fresh, Row (&rows)[2],
    float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < 32; i++) scores[i] = __fmul_rn(scores[i], scale);
  if (masked) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      int key = i / 4 * 8 + 2 * (lane & 3) + i % 2;
      scores[i] = key <= visible[i / 2 % 2] ? scores[i] : NONE;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float tops[4] = {NONE, NONE, NONE, NONE};  // four at a time, for speed; a maximum has no order
#pragma unroll
    for (int i = 0; i < 16; i++) tops[i % 4] = fmaxf(tops[i % 4], scores[i / 2 * 4 + 2 * half + i % 2]);
    float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float before = fresh ? NONE : rows[half].max;
    top = fmaxf(before, top);
    float base = top == NONE ? 0.0f : top;
    rescale[half] = exp2_approx(__fsub_rn(before, base));
    rows[half].max = top;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float& x = scores[i / 2 * 4 + 2 * half + i % 2];
      x = exp2_approx(__fsub_rn(x, base));
    }
  }
}

// Not before the products of the block before are done: the compiler would put a wait in front of every product otherwise.
__device__ __forceinline__ void round_all(const float (&probabilities)[32], u32 (&p)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) p[i / 4][i % 4] = pack(probabilities[2 * i], probabilities[2 * i + 1]);
}

// Values of keys that do not exist are whatever the cache holds, NaN maybe, and 0 · NaN is not 0.
__device__ __forceinline__ void zero_values(char* v, int from, int thread, int warpgroup) {
  for (int i = from * 8 + thread; i < BLOCK * 8; i += 128)
#pragma unroll
    for (int r = 0; r < REGIONS; r++)
      reinterpret_cast<uint4*>(v + r * REGION_BYTES)[i] = make_uint4(0, 0, 0, 0);
  fence_async_shared();
  named_sync(1 + warpgroup, 128);
}

__device__ __forceinline__ void rescale_all(float (&acc)[NUM_ACC], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < NUM_ACC; i++) acc[i] = __fmul_rn(acc[i], rescale[(i / 2) & 1]);
}

// The split that ends is merged into those before it; `first` when there is none. Afterwards `acc` is free.
template <bool LAST>
__device__ __forceinline__ void merge(
    float (&acc)[NUM_ACC], float4 (*merged)[128], bool first, Row (&rows)[2], const float (&max)[2]) {
  float a[2], b[2];
  bool seen[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    Row& row = rows[half];
    seen[half] = max[half] != NONE;
    float top = fmaxf(row.merged_max, max[half]), base = top == NONE ? 0.0f : top;
    a[half] = exp2_approx(__fsub_rn(row.merged_max, base));
    b[half] = exp2_approx(__fsub_rn(max[half], base));
    if (seen[half]) {
      row.merged_max = top;
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
      before[i] = first ? 0.0f : x.x, before[i + 1] = first ? 0.0f : x.y;
      before[i + 2] = first ? 0.0f : x.z, before[i + 3] = first ? 0.0f : x.w;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      int half = (i / 2) & 1;
      float after = __fadd_rn(__fmul_rn(before[i], a[half]), __fmul_rn(acc[begin + i], b[half]));
      before[i] = seen[half] ? after : before[i];
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

// What one warpgroup holds of its tile.
struct Tile {
  u32 p[4][4];  // probabilities of the block whose product is next
  float acc[NUM_ACC];
  Row rows[2];
  int positions[2];  // of this thread's two rows
  int to_boundary;   // blocks of the present split that are not yet in acc
  bool first_split, fresh;  // fresh: the next product starts a split, acc counts as 0

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

  // Scores and probabilities of block 0.
  __device__ __forceinline__ void first(Tile& t, int last_open) {
    float scores[32], unused[2];
    wait_keys();
    mma_fence();
    t.scores_of(scores, queries(), keys());
    mma_commit();
    mma_wait<0>();
    hold(scores);
    free_keys();
    soften(scores, a.scale, last_open < 0, t.positions, lane, true, t.rows, unused);
    round_all(scores, t.p);
    t.to_boundary = a.split_blocks;
    t.first_split = t.fresh = true;
  }

  // Scores of block j + 1 and products of block j; the exponentials of j + 1 run under the products.
  __device__ __forceinline__ void step(Tile& t, int j, int last_open) {
    float scores[32], rescale[2];
    wait_values();
    wait_keys();
    if (TAKE_TURNS) named_sync(4 + warpgroup, 256);
    hold(t.acc);
    mma_fence();
    t.scores_of(scores, queries(), keys());
    mma_commit();
    t.weigh(values());
    mma_commit();
    if (TAKE_TURNS) named_arrive(4 + (warpgroup + 1) % CONSUMERS, 256);
    mma_wait<1>();
    hold(scores);
    free_keys();
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
      merge<false>(t.acc, s.merged[warpgroup], t.first_split, t.rows, before);
      t.first_split = false;
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

  // The products of the last block; acc becomes the weighted sum over all keys, not yet divided.
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
    merge<true>(t.acc, s.merged[warpgroup], t.first_split, t.rows, max);
  }

  // Reads again what the tile is, rather than hold it in registers all the while.
  __device__ __forceinline__ void store(Tile& t, int round) {
    const Item item = item_of(a, round);
    const int start = a.starts[item.sequence], count = a.starts[item.sequence + 1] - start;
    const int token0 = item.first + warpgroup * TOKENS, row = (thread >> 5) * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int within = row + 8 * half, token = token0 + within / GROUP;
      if (within >= TOKENS * GROUP || token >= count) continue;
      const int head = item.kv_head * GROUP + within % GROUP;
      const float total = t.rows[half].merged_sum;
      u32* out = a.out + (static_cast<long long>(start + token) * a.kv_heads * GROUP + head) * (D / 2) + (lane & 3);
#pragma unroll
      for (int c = 0; c < D / 8; c++)
        out[4 * c] = pack(__fdiv_rn(t.acc[4 * c + 2 * half], total), __fdiv_rn(t.acc[4 * c + 2 * half + 1], total));
      if (a.lse != nullptr && (lane & 3) == 0)
        a.lse[static_cast<long long>(head) * a.num_tokens + start + token] = log_sum_exp(t.rows[half].merged_max, total);
    }
  }

  __device__ __forceinline__ void run() {
    u32 q_phase = 0;
    const int warp = thread >> 5, row = warp * 16 + lane / 4;
    for (int round = 0; more(a, round); round++) {
      const Item item = item_of(a, round);
      if (item.sequence < 0) continue;
      const int start = a.starts[item.sequence], length = a.lengths[item.sequence];
      const int count = a.starts[item.sequence + 1] - start;
      const int blocks = blocks_of(item, count, length);
      const int token0 = item.first + warpgroup * TOKENS, position0 = length - count + token0;
      Tile t;
      t.positions[0] = position0 + row / GROUP, t.positions[1] = position0 + (row + 8) / GROUP;
#pragma unroll
      for (int half = 0; half < 2; half++) t.rows[half] = {NONE, NONE, 0.0f};

      barrier_wait(shared_address(&s.q_full), q_phase);
      q_phase ^= 1;
      // A block needs no mask while its last key is at or before the warpgroup's first token.
      const int last_open = (position0 + 1) / BLOCK - 1;
      const int missing_from = length - (blocks - 1) * BLOCK;
      first(t, last_open);
      for (int j = 0; j + 1 < blocks; j++) step(t, j, last_open);
      if (lane == 0) barrier_arrive(shared_address(&s.q_empty));
      last(t, missing_from);
      store(t, round);
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1) attend(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    const __grid_constant__ Arguments arguments) {
  extern __shared__ char raw[];
  Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<u64>(raw) + 1023) & ~1023ull);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&s.q_full), 1);
    barrier_init(shared_address(&s.q_empty), 4 * CONSUMERS);
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
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // one value for the warp, and known to be
  if (warpgroup == 0) {
    give_registers<24>();
    if (threadIdx.x == 0) produce(s, &q, &k, &v, arguments);
  } else {
    take_registers<160>();
    if (TAKE_TURNS && warpgroup == CONSUMERS) named_arrive(4, 256);
    int thread = threadIdx.x & 127;
    u32 q0 = operand(shared_address(s.q)), k0 = operand(shared_address(s.k)), v0 = operand(shared_address(s.v), REGION_BYTES);
    Consumer{s, arguments, warpgroup - 1, thread, thread & 31, q0, k0, v0}.run();
  }
}
