// What the kernels with splits in parallel share: their arguments, the items they walk, and how a row is finished.
// Compiled with -D DIM, HEADS, KV_HEADS, PAGE_SIZE.

constexpr int D = DIM, GROUP = HEADS / KV_HEADS, SPLIT = 512, BLOCK = 64, LANES = 32;
constexpr int ROW_BYTES = D * 2, SEGMENTS = ROW_BYTES / 16, STEPS = D / 16;

struct Arguments {
  const bf16 *q, *k, *v;  // row of a key = page * PAGE_SIZE + place in the page
  bf16* out;              // [tokens, HEADS, D]
  float* lse;             // [HEADS, tokens] or null
  const int* items;       // [capacity, 3] sequence, split, place
  const int* total;
  int* arrived;            // splits finished of each (sequence, kv head), 0 between launches
  float *partial, *stats;  // [place, KV_HEADS, held, D] and [place, KV_HEADS, held, 2]
  const int *starts, *lengths, *tables;
  int table_width, tokens, held, stride_q, stride_k, stride_v;  // elements from row to row
  float scale;
};

struct Item {
  int sequence, split, place, head, start, count, length, blocks;
};

__device__ __forceinline__ Item item_of(const Arguments& a, int index) {
  Item x;
  const int* pair = a.items + 3 * (index / KV_HEADS);
  x.head = index % KV_HEADS, x.sequence = pair[0], x.split = pair[1], x.place = pair[2];
  x.start = a.starts[x.sequence], x.count = a.starts[x.sequence + 1] - x.start, x.length = a.lengths[x.sequence];
  int keys = min(x.length - x.split * SPLIT, SPLIT);
  x.blocks = x.split < 0 ? 0 : (keys + BLOCK - 1) / BLOCK;
  return x;
}

__device__ __forceinline__ int splits_of(const Item& x) { return (x.length + SPLIT - 1) / SPLIT; }

__device__ __forceinline__ void store_out(const Arguments& a, const Item& item, int row, int d, float value) {
  u32 pair = pack(value, 0.0f);
  int token = item.start + row / GROUP, head = item.head * GROUP + row % GROUP;
  a.out[((u64)token * HEADS + head) * D + d] = (bf16)pair;
}

__device__ __forceinline__ void store_lse(const Arguments& a, const Item& item, int row, float m, float l) {
  int token = item.start + row / GROUP, head = item.head * GROUP + row % GROUP;
  if (a.lse) a.lse[(u64)head * a.tokens + token] = log_sum_exp(m, l);
}
