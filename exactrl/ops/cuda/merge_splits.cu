// Merges the partial results of all splits, a block for each (sequence, kv head), once all of them are there: a launch of
// its own, for contexts of many splits. Definition in attention.py. Follows split_items.cuh and split_merge.cuh.
// Compiled with -D of split_items.cuh and MERGED (splits in flight).

constexpr int MERGE_THREADS = 128;

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge_splits(
    bf16* out, float* lse, int wants_lse, const int* merges, float* partial, float* stats, const int* starts,
    const int* lengths, int tokens, int held) {
  Arguments a = {};
  a.out = out, a.lse = wants_lse ? lse : nullptr, a.partial = partial, a.stats = stats, a.tokens = tokens, a.held = held;
  Item item = {};
  item.sequence = merges[2 * (blockIdx.x / KV_HEADS)], item.place = merges[2 * (blockIdx.x / KV_HEADS) + 1];
  if (item.place < 0) return;
  item.head = blockIdx.x % KV_HEADS, item.start = starts[item.sequence];
  item.count = starts[item.sequence + 1] - item.start, item.length = lengths[item.sequence];
  merge_rows<MERGED>(a, item, threadIdx.x, MERGE_THREADS);
}
