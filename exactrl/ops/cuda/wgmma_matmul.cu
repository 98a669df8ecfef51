// y = x W^T on Hopper for few rows and long K: one fp32 accumulator per output in the matrix unit, K ascending, rounded
// once. The same bits as triton_matmul.py; what differs is who loads what when.
//
// x [M, K] and w [N, K] are bf16, K a multiple of a stage's inputs. A block multiplies some rows of x with COLUMNS rows of w;
// one warp copies both into a ring of stages through the bulk copy engine, WARPGROUPS multiply. The matrix unit takes 64
// rows of one operand: of x, or, with SWAP, 64 rows of w for each warpgroup. Of the other it takes WIDE rows, a multiple of
// 8. Two blocks (TALL) may form a cluster: they have different rows of x and take turns in loading w for both.
//
// Compiled with: COLUMNS (a multiple of 8), SWAP, WIDE (COLUMNS, or the most rows of x with SWAP), CHUNKS (of 64 inputs each,
// in one stage), WARPGROUPS, TALL, TOut (float or bfloat16) and WGMMA (the instruction; see wgmma_matmul.py).

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };
struct bfloat16 { unsigned short bits; };

constexpr int ACCUMULATORS = WIDE / 2;  // of one thread
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
    if (TALL == 1)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    else
        asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank)
                     : "memory");
}

// All chunks of a stage, from `chunk` on, of the rows from `row`: box [CHUNKS][rows][64].
template <bool MULTICAST>
__device__ __forceinline__ void copy(u32 to, const void *map, int row, int chunk, u32 barrier, u64 policy) {
    if (MULTICAST)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to), "l"(map), "r"(0), "r"(row),
                     "r"(chunk), "r"(barrier), "h"((unsigned short)((1 << TALL) - 1)), "l"(policy) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                     " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(chunk),
                     "r"(barrier), "l"(policy) : "memory");
}

// Rows of 128 bytes, 128-byte swizzle, groups of eight rows 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void multiply_chunk(float (&acc)[ACCUMULATORS], u32 tall, u32 wide) {
    u64 a = descriptor(tall), b = descriptor(wide);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        WGMMA(acc, a, b);
        a += 2;  // 16 inputs, 32 bytes
        b += 2;
    }
}

// Keeps the compiler from moving other uses of the accumulators between matrix instructions, which it would then serialize.
__device__ __forceinline__ void pin(float (&acc)[ACCUMULATORS]) {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) asm volatile("" : "+f"(acc[i])::"memory");
}

__device__ __forceinline__ void store(float *y, float a, float b) { *(float2 *)y = make_float2(a, b); }
__device__ __forceinline__ void store(bfloat16 *y, float a, float b) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    *(u32 *)y = pair;
}
__device__ __forceinline__ void store(float *y, float a) { *y = a; }
__device__ __forceinline__ void store(bfloat16 *y, float a) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y->bits) : "f"(a));
}

// `steps` = K / (64 CHUNKS); `rows` per tile of x, of which `x_rows` are copied; in shared memory `padded_rows`, a multiple
// of 8; `row_tiles` a multiple of TALL; `stages` at most 64. `settled`: no kernel under way writes w, which is then copied
// before those are done.
extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS + 32, 1)
wgmma_matmul(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, TOut *y, int M,
             int N, int steps, int rows, int x_rows, int padded_rows, int row_tiles, int stages, int settled) {
    extern __shared__ __align__(1024) unsigned char raw[];
    constexpr int W_BYTES = COLUMNS * ROW_BYTES;
    const u32 base = (shared_address(raw) + 1023) & ~1023u;
    const int x_bytes = padded_rows * ROW_BYTES, stage_bytes = CHUNKS * (x_bytes + W_BYTES);
    __shared__ __align__(8) u64 barriers[2 * 64];
    const u32 full = shared_address(barriers), empty = full + 8 * 64;

    const int thread = threadIdx.x, rank = TALL > 1 ? rank_in_cluster() : 0;
    const int cluster = blockIdx.x / TALL, row_clusters = row_tiles / TALL;
    // Neighbouring blocks share w. The last tile is moved back to end with the matrix; some elements are then stored twice, with the same bits.
    const int row0 = max(min((cluster % row_clusters * TALL + rank) * rows, M - rows), 0);
    const int column0 = max(min(cluster / row_clusters * COLUMNS, N - COLUMNS), 0);

    if (thread == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        for (int s = 0; s < stages; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "r"(WARPGROUPS * TALL) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Rows that are not there are zeros: power bounds the clock here, and zeros take less than what memory happens to hold.
    const int missing = (padded_rows - x_rows) * ROW_BYTES / 16;
    for (int i = thread; i < stages * CHUNKS * missing; i += blockDim.x) {
        const int slot = i / missing, stage = slot / CHUNKS, chunk = slot % CHUNKS;
        const u32 to = base + stage * stage_bytes + chunk * x_bytes + x_rows * ROW_BYTES + i % missing * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (TALL > 1)
        cluster_barrier();
    else
        __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, thread / 128, 0), lane = thread % 128;
    if (warpgroup == WARPGROUPS) {
        if (lane == 0) {
            const u32 bytes = CHUNKS * (x_rows + COLUMNS) * ROW_BYTES;
            const u64 w_policy = row_clusters == 1 ? EVICT_FIRST : EVICT_NORMAL;
            auto copy_w = [&](int step, int s) {
                const u32 here = full + 8 * s, to = base + s * stage_bytes + CHUNKS * x_bytes;
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(here), "r"(bytes) : "memory");
                if (step % TALL == rank) copy<(TALL > 1)>(to, &w_map, column0, step * CHUNKS, here, w_policy);
            };
            const int ahead = settled ? min(stages, steps) : 0;
            for (int step = 0; step < ahead; step++) copy_w(step, step);
            // The kernels before are done: x is there, and nobody needs y's memory. The next kernel may start to wait.
            asm volatile("griddepcontrol.wait;" ::: "memory");
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            int s = 0, parity = 1;
            for (int step = 0; step < steps; step++) {
                wait(empty + 8 * s, parity);
                if (step >= ahead) copy_w(step, s);
                copy<false>(base + s * stage_bytes, &x_map, row0, step * CHUNKS, full + 8 * s, EVICT_LAST);
                if (++s == stages) s = 0, parity ^= 1;
            }
        }
    } else {
        float acc[ACCUMULATORS];
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i++) acc[i] = 0.f;
        pin(acc);
        int s = 0, parity = 0;
        u32 before = 0;
        for (int step = 0; step < steps; step++) {
            wait(full + 8 * s, parity);
            const u32 x = base + s * stage_bytes, w = x + CHUNKS * x_bytes + (SWAP ? warpgroup * 64 * ROW_BYTES : 0);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const u32 x_chunk = x + c * x_bytes, w_chunk = w + c * W_BYTES;
                multiply_chunk(acc, SWAP ? w_chunk : x_chunk, SWAP ? x_chunk : w_chunk);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            // One step late. Of two neighbouring steps the other block of a pair has loaded part, after its own stage was
            // free: it cannot meet two arrivals from here in one phase.
            if (step && lane < TALL) arrive_at(before, lane);
            before = empty + 8 * s;
            if (++s == stages) s = 0, parity ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin(acc);

        const int tall = thread / 32 * 16 + thread % 32 / 4, wide = thread % 4 * 2;  // of the first accumulator
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = tall + 8 * half;
            if (SWAP && r < COLUMNS && column0 + r < N) {
                TOut *to = y + (long long)row0 * N + column0 + r;
#pragma unroll
                for (int i = 0; i < WIDE / 4; i++) {
                    const int row = i / 2 * 8 + wide + i % 2;
                    if (row < rows && row0 + row < M) store(to + (long long)row * N, acc[i / 2 * 4 + 2 * half + i % 2]);
                }
            }
            if (!SWAP && r < rows && row0 + r < M) {
                TOut *to = y + (long long)(row0 + r) * N + column0 + wide;
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; j++)
                    if (column0 + 8 * j < N) store(to + 8 * j, acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
            }
        }
    }
    if (TALL > 1) cluster_barrier();  // nobody may leave while others still write to its memory or its barriers
}
