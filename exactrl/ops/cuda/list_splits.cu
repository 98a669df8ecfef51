// Follows split_items.cuh. A block writes down one item.

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
