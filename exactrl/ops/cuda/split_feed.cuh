// How a warp of split_attention.cu gets its keys and values: a ring of chunks in shared memory that is filled ahead by copies
// of 16 bytes.

constexpr int KEYS = 16, CHUNKS = BLOCK / KEYS;  // of a chunk: one table entry; chunks of K in a block
constexpr int CHUNK_BYTES = KEYS * ROW_BYTES, SEGMENTS = ROW_BYTES / 16;

// Place of a 16-byte segment of a key's row in a chunk: regions of 64 elements, swizzled.
__device__ __forceinline__ u32 place_of(int row, int segment) {
  return (segment >> 3) * KEYS * 128 + row * 128 + (((segment ^ row) & 7) << 4);
}

// The copies of a warp, in the order in which they are used: for each block K, then V.
struct Feed {
  const Arguments& a;
  u32 ring;  // address in shared memory
  int lane, index, step, total, slot = 0, position = 0, chunks = 0, page = 0;
  Item item;

  __device__ __forceinline__ void open() {
    chunks = position = 0;
    if (index >= total) return;
    item = item_of(header_of(a, index), index);
    chunks = item.blocks * 2 * CHUNKS;
    page = page_of(a, index, lane);
  }

  // Starts the next copy. From the sequence's end on nothing is read.
  __device__ __forceinline__ void next() {
    if (position < chunks) {
      int first = position / (2 * CHUNKS) * BLOCK + position % CHUNKS * KEYS;
      bool values = position / CHUNKS % 2;
      copy_chunk((values ? a.v : a.k) + item.head * D, values ? a.stride_v : a.stride_k, ring + slot * CHUNK_BYTES, first);
      if (++slot == RING) slot = 0;
      if (++position == chunks) advance();
    }
    copies_commit();  // also an empty one: take() counts them
  }

  __device__ __forceinline__ void copy_chunk(const bf16* base, int stride, u32 into, int first) {
    int key0 = item.split * SPLIT + first;
    u64 page_row = (u64)__shfl_sync(~0u, page, first / KEYS) * PAGE_SIZE;
#pragma unroll
    for (int i = 0; i < KEYS * SEGMENTS / LANES; i++) {
      int row = (i * LANES + lane) / SEGMENTS, segment = (i * LANES + lane) % SEGMENTS;
      u64 at = page_row + (key0 + row) % PAGE_SIZE;
      int bytes = key0 + row < item.length ? 16 : 0;  // the rest is filled with zeros
      copy_16(into + place_of(row, segment), base + at * stride + segment * 8, bytes);
    }
  }

  __device__ __forceinline__ void advance() {
    do {
      index += step;
      open();
    } while (index < total && chunks == 0);
  }
};

// Waits for the oldest copy, in `place` of the ring, and starts another, into the place of the one used before.
__device__ __forceinline__ u32 take(Feed& feed, int& place) {
  u32 address = feed.ring + place * CHUNK_BYTES;
  copies_wait<RING - 2>();
  __syncwarp();
  feed.next();
  if (++place == RING) place = 0;
  return address;
}
