// y = x W^T on Hopper for few rows and long K: one fp32 accumulator per output in the matrix unit, K ascending, rounded
// once. The same bits as triton_matmul.py; what differs is who loads what when.
//
// x [M, K] and w [N, K] are bf16, K a multiple of a stage's inputs. A block multiplies at most 64 WARPGROUPS rows of x with
// BN rows of w; one warp copies both into a ring of stages through the bulk copy engine, the warpgroups multiply. A cluster
// is TALL x WIDE blocks: those of one column share their rows of w, those of one row share their rows of x, and they take
// turns in loading a chunk for all that share it.
//
// Compiled with: BN (multiple of 8), CHUNKS (of 64 inputs each, in one stage), WARPGROUPS, TALL, WIDE, TOut (float or
// bfloat16) and WGMMA (the instruction for BN; see wgmma_matmul.py).

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };
struct bfloat16 { unsigned short bits; };

constexpr int CLUSTER = TALL * WIDE, SHARERS = TALL + WIDE - 1;  // blocks in a cluster; in one block's row and column
constexpr int ROW_BYTES = 128;  // a chunk's part of one row: one swizzle span
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_LAST = 0x14F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull;

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@done bra.uni DONE;\nbra.uni AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    if (CLUSTER == 1)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    else
        asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank)
                     : "memory");
}

// Chunk `chunk` of the rows from `row`, box [1][rows][64], to the same place in each of the blocks `mask`.
template <bool MULTICAST>
__device__ __forceinline__ void copy(u32 to, const void *map, int row, int chunk, u32 barrier, u64 policy, u32 mask) {
    if (MULTICAST)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to), "l"(map), "r"(0), "r"(row),
                     "r"(chunk), "r"(barrier), "h"((unsigned short)mask), "l"(policy) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                     " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(chunk),
                     "r"(barrier), "l"(policy) : "memory");
}

// Rows of 128 bytes, 128-byte swizzle, groups of eight rows 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void multiply_chunk(float (&acc)[BN / 2], u32 x, u32 w) {
    u64 a = descriptor(x), b = descriptor(w);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        WGMMA(acc, a, b);
        a += 2;  // 16 inputs, 32 bytes
        b += 2;
    }
}

// Keeps the compiler from moving other uses of the accumulators between matrix instructions, which it would then serialize.
__device__ __forceinline__ void pin(float (&acc)[BN / 2]) {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
}

__device__ __forceinline__ void store(float *y, float a, float b) { *(float2 *)y = make_float2(a, b); }
__device__ __forceinline__ void store(bfloat16 *y, float a, float b) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    *(u32 *)y = pair;
}

// `steps` = K / (64 CHUNKS); `rows` per tile of x; `x_bytes` of one chunk of them in shared memory, a multiple of 1024;
// `row_tiles` a multiple of TALL; `stages` at most 64.
extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS + 32, 1)
wgmma_matmul(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, TOut *y, int M,
             int N, int steps, int rows, int x_bytes, int row_tiles, int stages) {
    extern __shared__ __align__(1024) unsigned char raw[];
    constexpr int W_BYTES = BN * ROW_BYTES;
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const int stage_bytes = CHUNKS * (x_bytes + W_BYTES);
    __shared__ __align__(8) u64 barriers[2 * 64];
    const u32 full = shared_address(barriers), empty = full + 8 * 64;

    const int thread = threadIdx.x, rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    const int down = rank % TALL, across = rank / TALL, cluster = blockIdx.x / CLUSTER, row_clusters = row_tiles / TALL;
    // The last tile is moved back to end with the matrix; some elements are then stored twice, with the same bits.
    const int row0 = max(min((cluster % row_clusters * TALL + down) * rows, M - rows), 0);
    const int column0 = max(min((cluster / row_clusters * WIDE + across) * BN, N - BN), 0);

    if (thread == 0) {
        for (int s = 0; s < stages; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "r"(WARPGROUPS * SHARERS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1)
        cluster_barrier();
    else
        __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, thread / 128, 0), lane = thread % 128;
    if (warpgroup == WARPGROUPS) {
        if (lane == 0) {
            const u32 bytes = CHUNKS * (rows + BN) * ROW_BYTES;
            const u32 column_mask = ((1 << TALL) - 1) << across * TALL;
            u32 row_mask = 0;
            for (int c = 0; c < WIDE; c++) row_mask |= 1 << (c * TALL + down);
            const u64 w_policy = row_clusters == 1 ? EVICT_FIRST : EVICT_NORMAL;
            int s = 0, parity = 1;
            for (int step = 0; step < steps; step++) {
                wait(empty + 8 * s, parity);
                const u32 here = full + 8 * s, x_to = base + s * stage_bytes, w_to = x_to + CHUNKS * x_bytes;
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(here), "r"(bytes) : "memory");
                for (int c = 0; c < CHUNKS; c++) {
                    const int chunk = step * CHUNKS + c;
                    // Who loads w does not load x in the same turn, where both are shared.
                    if ((chunk + across + 1) % TALL == down)
                        copy<(TALL > 1)>(w_to + c * W_BYTES, &w_map, column0, chunk, here, w_policy, column_mask);
                    if ((chunk + down) % WIDE == across)
                        copy<(WIDE > 1)>(x_to + c * x_bytes, &x_map, row0, chunk, here, EVICT_LAST, row_mask);
                }
                if (++s == stages) s = 0, parity ^= 1;
            }
        }
    } else {
        float acc[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; i++) acc[i] = 0.f;
        pin(acc);
        // Who fills this block's stages must know when they are free: its column and the rest of its row.
        const int other = lane - TALL, filler = lane < TALL ? across * TALL + lane : (other + (other >= across)) * TALL + down;
        int s = 0, parity = 0;
        u32 before = 0;
        for (int step = 0; step < steps; step++) {
            wait(full + 8 * s, parity);
            const u32 x = base + s * stage_bytes + warpgroup * 64 * ROW_BYTES, w = base + s * stage_bytes + CHUNKS * x_bytes;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) multiply_chunk(acc, x + c * x_bytes, w + c * W_BYTES);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (step && lane < SHARERS) arrive_at(before, filler);
            before = empty + 8 * s;
            if (++s == stages) s = 0, parity ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin(acc);

        const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + 8 * half;
            if (r < rows && row0 + r < M) {
                TOut *to = y + (long long)(row0 + r) * N + column0 + thread % 4 * 2;
#pragma unroll
                for (int j = 0; j < BN / 8; j++)
                    if (column0 + 8 * j < N) store(to + 8 * j, acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
            }
        }
    }
    if (CLUSTER > 1) cluster_barrier();  // nobody may leave while others still write to its memory or its barriers
}
