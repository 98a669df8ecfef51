// Items with all that their copies need, so that a kernel waits for one load: made once a step from the list of splits.
// Follows split_items.cuh.

constexpr int LISTED = 8 + LANES;  // words: sequence, split, place, first row, rows, length; pages of every 16th key

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

// Not merged with others: the only split of its sequence, or, where the plan has no room, none.
__device__ __forceinline__ bool alone(const Item& x) { return x.split < 0 || splits_of(x) == 1; }

// A block writes down one split.
extern "C" __global__ void list_items(
    const int* splits, const int* total, const int* starts, const int* lengths, const int* tables, int table_width, int* items) {
  if (blockIdx.x >= *total) return;
  const int* split = splits + 3 * blockIdx.x;
  int lane = threadIdx.x, sequence = split[0], start = starts[sequence], length = lengths[sequence];
  int* into = items + (u64)LISTED * blockIdx.x;
  if (lane == 0) *(int4*)into = make_int4(sequence, split[1], split[2], start);
  if (lane == 1) *(int4*)(into + 4) = make_int4(starts[sequence + 1] - start, length, 0, 0);
  int key = max(split[1], 0) * SPLIT + 16 * lane;
  into[8 + lane] = key < length && split[1] >= 0 ? tables[(u64)sequence * table_width + key / PAGE_SIZE] : 0;
}
