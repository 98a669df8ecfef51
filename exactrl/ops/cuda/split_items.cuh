// What the kernels with splits in parallel share: their arguments, the items they walk, and how a row is finished. An item
// has all that its copies need, so that a kernel waits for one load; list_splits.cu makes them, once a step.
// Compiled with -D DIM, HEADS, KV_HEADS, PAGE_SIZE.

constexpr int D = DIM, GROUP = HEADS / KV_HEADS, SPLIT = 512, BLOCK = 64, LANES = 32;
constexpr int ROW_BYTES = D * 2, STEPS = D / 16;
constexpr int LISTED = 8 + LANES;  // words: sequence, split, place, first row, rows, length; pages of every 16th key

struct Arguments {
  const bf16 *q, *k, *v;  // row of a key = page * PAGE_SIZE + place in the page
  bf16* out;              // [tokens, HEADS, D]
  float* lse;             // [HEADS, tokens] or null
  const int* items;       // [capacity, LISTED]
  const int* total;
  float *partial, *stats;                          // [place, KV_HEADS, held, D] and [place, KV_HEADS, held, 2]
  int tokens, held, stride_q, stride_k, stride_v;  // elements from row to row
  float scale;
};

struct Item {
  int sequence, split, place, head, start, count, length, blocks;
};

struct Header {
  int4 x, y;  // the first eight words
};

__device__ __forceinline__ Header header_of(const Arguments& a, int index) {
  const int4* words = (const int4*)(a.items + (u64)LISTED * (index / KV_HEADS));
  return {words[0], words[1]};
}

__device__ __forceinline__ Item item_of(const Header& h, int index) {
  int split = h.x.y, length = h.y.y, keys = split < 0 ? 0 : min(length - split * SPLIT, SPLIT);
  return {h.x.x, split, h.x.z, index % KV_HEADS, h.x.w, h.y.x, length, (keys + BLOCK - 1) / BLOCK};
}

// The page of key 16 * lane of the split: one table entry covers 16 keys, for any size of page.
__device__ __forceinline__ int page_of(const Arguments& a, int index, u32 lane) {
  return a.items[(u64)LISTED * (index / KV_HEADS) + 8 + lane];
}

// Keys of the split that exist.
__device__ __forceinline__ int keys_of(const Item& x) { return x.blocks ? min(x.length - x.split * SPLIT, SPLIT) : 0; }

__device__ __forceinline__ int splits_of(const Item& x) { return (x.length + SPLIT - 1) / SPLIT; }

// Not merged with others: the only split of its sequence, or, where the plan has no room, none.
__device__ __forceinline__ bool alone(const Item& x) { return x.split < 0 || splits_of(x) == 1; }

__device__ __forceinline__ void store_out(const Arguments& a, const Item& item, int row, int d, float value) {
  u32 pair = pack(value, 0.0f);
  int token = item.start + row / GROUP, head = item.head * GROUP + row % GROUP;
  a.out[((u64)token * HEADS + head) * D + d] = (bf16)pair;
}

__device__ __forceinline__ void store_lse(const Arguments& a, const Item& item, int row, float m, float l) {
  int token = item.start + row / GROUP, head = item.head * GROUP + row % GROUP;
  if (a.lse) a.lse[(u64)head * a.tokens + token] = log_sum_exp(m, l);
}
