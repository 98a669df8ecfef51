// How a warp of split_attention.cu gets its keys and values: a ring of chunks in shared memory that is filled ahead, through
// the bulk copy engine (TMA 1) or by copies of 16 bytes (TMA 0).

constexpr int TILES = KEYS / 16, CHUNKS = BLOCK / KEYS;  // of 16 keys in a chunk; chunks of K in a block
constexpr int CHUNK_BYTES = KEYS * ROW_BYTES, ROWS_AT_ONCE = LANES / SEGMENTS;
constexpr int BOX = KEYS < PAGE_SIZE ? KEYS : PAGE_SIZE, REGIONS = D / 64;  // keys, and parts of D, of a copy

// Place of a 16-byte segment of a key's row in a chunk: regions of 64 elements, swizzled by the copy engine.
__device__ __forceinline__ u32 place_of(int row, int segment) {
  return (segment >> 3) * KEYS * 128 + row * 128 + (((segment ^ row) & 7) << 4);
}

// The copies of a warp, in the order in which they are used: for each block K, then V.
struct Feed {
  const Arguments& a;
  const TensorMap *k_map, *v_map;
  u32 ring, full;  // addresses in shared memory: chunks, and a barrier for each
  int lane, index, step, total, slot = 0, position = 0, chunks = 0, page = 0;
  Item item;

  __device__ __forceinline__ void open() {
    chunks = position = 0;
    if (index >= total) return;
    item = item_of(a, index);
    chunks = item.blocks * 2 * CHUNKS;
    int key = item.split * SPLIT + 16 * lane;  // one table entry covers 16 keys, for any size of page
    page = item.blocks && key < item.length ? a.tables[(u64)item.sequence * a.table_width + key / PAGE_SIZE] : 0;
  }

  // Starts the next copy. From the sequence's end on nothing is read.
  __device__ __forceinline__ void next() {
    if (position < chunks) {
      int first = position / (2 * CHUNKS) * BLOCK + position % CHUNKS * KEYS, key0 = item.split * SPLIT + first;
      bool values = position / CHUNKS % 2;
      u32 into = ring + slot * CHUNK_BYTES;
#if TMA
      copy_boxes(values ? v_map : k_map, into, full + slot * 8, first, key0);
#else
      copy_segments((values ? a.v : a.k) + item.head * D, values ? a.stride_v : a.stride_k, into, first, key0);
#endif
      if (++slot == RING) slot = 0;
      if (++position == chunks) advance();
    }
    if (!TMA) copies_commit();  // also an empty one: take() counts them
  }

#if TMA
  __device__ __forceinline__ void copy_boxes(const TensorMap* map, u32 into, u32 barrier, int first, int key0) {
    int boxes = min(max(item.length - key0 + BOX - 1, 0) / BOX, KEYS / BOX);
    if (lane == 0) barrier_expect(barrier, boxes * BOX * ROW_BYTES);
#pragma unroll
    for (int part = 0; part < KEYS / BOX; part++) {
      int entry = __shfl_sync(~0u, page, (first + part * BOX) / 16);
      if (lane == 0 && part < boxes)
#pragma unroll
        for (int region = 0; region < REGIONS; region++)
          copy_box(into + region * KEYS * 128 + part * BOX * 128, map, barrier, region * 64, item.head,
                   (key0 + part * BOX) % PAGE_SIZE, entry);
    }
  }
#else
  __device__ __forceinline__ void copy_segments(const bf16* base, int stride, u32 into, int first, int key0) {
#pragma unroll
    for (int i = 0; i < KEYS * SEGMENTS / LANES; i++) {
      int row = (i * LANES + lane) / SEGMENTS, segment = (i * LANES + lane) % SEGMENTS;
      int entry = __shfl_sync(~0u, page, first / 16 + i * ROWS_AT_ONCE / 16);
      u64 at = (u64)entry * PAGE_SIZE + (key0 + row) % PAGE_SIZE;
      int bytes = key0 + row < item.length ? 16 : 0;  // the rest is filled with zeros
      copy_16(into + place_of(row, segment), base + at * stride + segment * 8, bytes);
    }
  }
#endif

  __device__ __forceinline__ void advance() {
    do {
      index += step;
      open();
    } while (index < total && chunks == 0);
  }
};

struct Ring {
  int slot = 0;
  u32 phase = 0;
};

// Waits for the oldest copy and starts another, into the place of the one used before.
__device__ __forceinline__ u32 take(Feed& feed, Ring& ring) {
  u32 address = feed.ring + ring.slot * CHUNK_BYTES;
#if TMA
  u32 barrier = feed.full + ring.slot * 8, done = 0;
  fence_async_shared();  // loads from the place used before may still be on their way: the engine must not overtake them
  __syncwarp();
  feed.next();
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(ring.phase) : "memory");
#else
  copies_wait<RING - 2>();
  __syncwarp();
  feed.next();
#endif
  if (++ring.slot == RING) ring.slot = 0, ring.phase ^= 1;
  return address;
}

// Values count as zero from the sequence's end on, whatever the page holds there.
__device__ __forceinline__ void clear_from(u32 chunk, int row0, int lane) {
  if (row0 >= KEYS) return;
  for (int i = lane; i < KEYS * SEGMENTS; i += LANES) {
    int row = i / SEGMENTS, segment = i % SEGMENTS;
    if (row >= row0)
      store_zeros(chunk + place_of(row, segment));
  }
  fence_async_shared();  // before the copy engine writes there again
  __syncwarp();
}

