// CUDA's model on the host, for kernels whose machine instructions are the functions of warp_tiles.cuh and hopper.cuh.
//
// Every thread of a block is a fiber. What waits for others hands over to a fiber drawn at random, so that a missing
// barrier shows as wrong bits under some seed, and some warps seldom get a turn; copies to shared memory are carried out when
// they are issued or when they are waited for, shared memory starts as noise, and a barrier that cannot be passed ends the program. So
// does a copy of the engine to where a thread has loaded tiles or stored zeros and not fenced them since: the engine may
// overtake them, whatever barriers say. Blocks run one after another, the last one first. A product of the matrix unit is
// 16 products and one accumulator added in double, rounded once.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define memory (block.shared.data())
#define NONE (-INFINITY)
using u32 = unsigned;
using u64 = unsigned long long;
using bf16 = unsigned short;
using std::max;
using std::min;

struct float2 { float x, y; };
struct uint2 { u32 x, y; };
struct Index { u32 x; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

struct Copy {
  char* into;
  const char* from;
  int bytes;
};

struct Fiber;
using Fibers = std::vector<Fiber*>;

struct Barrier {
  int arrived = 0;
  u64 phase = 0;
  Fibers waiting = {};
};

struct Counter {  // mbarrier
  int arrivals, pending, bytes = 0;
  u32 phase = 0;
  Fibers waiting = {};
};

struct TensorMap {  // of bf16; innermost dimension first
  char* base;
  u64 strides[4], extents[4];
  u32 box[4];
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  int id;
  const char* waits_for;
  u32 which;
  bool done = false, read = false;
  std::vector<u32> unfenced = {};
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Block {
  std::vector<char> shared;
  std::vector<int> unfenced;  // accesses to each 16 bytes that the copy engine may overtake
  Barrier barrier;
  std::vector<Barrier> warps;
  std::vector<u64> exchanged;  // three words of each thread
  std::map<u32, Counter> counters;
  std::map<int, Barrier> named;
};

struct Box {  // a copy of the engine, carried out at some time
  u32 into, barrier;
  const TensorMap* map;
  int at[4];
};

static std::mt19937 random_number;
static Block block;
static std::vector<Box> boxes;
static Fiber* self;
static Fibers ready;  // to go on
static ucontext_t scheduler;
static int block_threads, waits;
static u32 block_index;
static Index gridDim;
static void (*entry)();

#define threadIdx (Index{(u32)self->id})
#define blockIdx (Index{block_index})

[[noreturn]] static void fail(const char* what) {
  fprintf(stderr, "block %u, thread %d: %s\n", block_index, self->id, what);
  exit(3);
}

static void wait_in(Fibers& fibers, const char* what = "", u32 which = 0) {
  self->waits_for = what, self->which = which;
  fibers.push_back(self);
  swapcontext(&self->context, &scheduler);
}

static void hand_over() { wait_in(ready); }

static void wake(Fibers& fibers) {
  ready.insert(ready.end(), fibers.begin(), fibers.end());
  fibers.clear();
}

static void meet(Barrier& barrier, int count) {
  u64 phase = barrier.phase;
  if (++barrier.arrived == count)
    barrier.arrived = 0, barrier.phase++, wake(barrier.waiting);
  else
    while (barrier.phase == phase) wait_in(barrier.waiting, "threads", count);
}

static void __syncthreads() { meet(block.barrier, block_threads); }
static void __syncwarp() { meet(block.warps[self->id / 32], 32); }

// All lanes of a warp give words; `read` sees those of every lane.
template <int N, typename Read>
static void exchange(const u64 (&mine)[N], Read read) {
  u64* words = &block.exchanged[self->id / 32 * 96];
  for (int i = 0; i < N; i++) words[self->id % 32 * 3 + i] = mine[i];
  meet(block.warps[self->id / 32], 32);
  read((const u64*)words);
  meet(block.warps[self->id / 32], 32);
}

template <typename T>
static T shuffled(T x, int lane) {
  T y;
  u64 word = 0;
  memcpy(&word, &x, sizeof x);
  exchange({word}, [&](const u64* words) { memcpy(&y, &words[lane % 32 * 3], sizeof y); });
  return y;
}

template <typename T>
static T __shfl_sync(u32, T x, int lane) { return shuffled(x, lane); }
template <typename T>
static T __shfl_xor_sync(u32, T x, int mask) { return shuffled(x, self->id % 32 ^ mask); }

// An address in shared memory: the offset.
static u32 shared_address(const void* p) { return (const char*)p - memory; }
static char* place(u32 address, int size) {
  if (address + size > block.shared.size()) fail("an address outside shared memory");
  if (address % size) fail("an address that is not aligned");
  return block.shared.data() + address;
}

static void touch(u32 address) {
  self->unfenced.push_back(address / 16);
  block.unfenced[address / 16]++;
}

static void land(const Copy& copy) {
  memset(copy.into, 0, 16);
  if (copy.bytes) memcpy(copy.into, copy.from, copy.bytes);
}

static void copy_16(u32 into, const void* from, int bytes) {
  self->read = true;
  if ((uintptr_t)from % 16) fail("a copy of 16 bytes that is not aligned");
  Copy copy = {place(into, 16), (const char*)from, bytes};
  if (random_number() % 2)
    land(copy);
  else
    self->open.push_back(copy);
}

static void copies_commit() {
  self->groups.push_back(self->open);
  self->open.clear();
}

template <int PENDING>
static void copies_wait() {
  for (; self->groups.size() > PENDING; self->groups.pop_front())
    for (const Copy& copy : self->groups.front()) land(copy);
}

static void store_zeros(u32 into) {
  touch(into);
  memset(place(into, 16), 0, 16);
}

static void named_sync(int id, int threads) { meet(block.named[id], threads); }
static void fence_async_shared() {
  for (u32 at : self->unfenced) block.unfenced[at]--;
  self->unfenced.clear();
}
static void barriers_ready() {}

static void wait_for_kernels_before() {
  if (self->read) fail("memory is read before the kernels before are done");
  waits++;
}

static void prefetch_map(const TensorMap*) {}

static Counter& counter(u32 barrier) {
  auto found = block.counters.find(barrier);
  if (found == block.counters.end()) fail("a barrier that was not set up");
  return found->second;
}

static void settle(Counter& c) {
  if (c.pending < 0) fail("more arrivals at a barrier than it counts");
  if (c.pending == 0 && c.bytes == 0) c.pending = c.arrivals, c.phase++, wake(c.waiting);
}

static void barrier_init(u32 barrier, int arrivals) { block.counters[barrier] = {arrivals, arrivals}; }

static void barrier_arrive(u32 barrier) {
  Counter& c = counter(barrier);
  c.pending--;
  settle(c);
  if (random_number() % 8 == 0) hand_over();
}

static void barrier_expect(u32 barrier, u32 bytes) {
  counter(barrier).bytes += bytes;
  barrier_arrive(barrier);
}

static void barrier_wait(u32 barrier, u32 phase) {
  Counter& c = counter(barrier);
  while ((c.phase & 1) == phase) wait_in(c.waiting, "barrier", barrier);
}

static void copy_box(u32 into, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  self->read = true;
  boxes.push_back({into, barrier, map, {c0, c1, c2, c3}});
}

// Rows of 128 bytes, 16-byte segments exchanged by the row's place in an atom of 1024 bytes. Returns the bytes.
static int copy_rows(const Box& box) {
  const TensorMap& map = *box.map;
  int rows = map.box[2], bytes = 0;
  for (int row = 0; row < rows; row++)
    for (u32 segment = 0; segment < map.box[0] / 8; segment++, bytes += 16) {
      u64 from = box.at[0] * map.strides[0] + segment * 8 + box.at[1] * map.strides[1] + (box.at[2] + row) * map.strides[2] +
                 box.at[3] * map.strides[3];
      if (box.at[2] + row >= (int)map.extents[2] || (u64)box.at[3] >= map.extents[3]) fail("a box outside the tensor");
      u32 into = box.into + row * 128 + segment * 16;
      into ^= into >> 3 & 0x70;
      if (into + 16 > block.shared.size()) fail("a box outside shared memory");
      if (block.unfenced[into / 16]) fail("a box overtakes loads or stores that were not fenced");
      memcpy(&block.shared[into], map.base + from * 2, 16);
    }
  return bytes;
}

static void carry_out(const Box& box) {
  Counter& c = counter(box.barrier);
  c.bytes -= copy_rows(box);
  settle(c);
}

static float bits_to_float(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}

static u32 float_to_bits(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}

// Four matrices of 8 x 8; lanes 8i to 8i + 7 name the rows of matrix i.
static void load_matrices(u32 (&a)[4], u32 address, bool transpose) {
  int lane = self->id % 32;
  exchange({address}, [&](const u64* words) {
    for (int i = 0; i < 4; i++) {
      bf16 pair[2];
      for (int j = 0; j < 2; j++) {
        int row = lane / 4, column = lane % 4 * 2 + j;
        if (transpose) std::swap(row, column);
        u32 address = (u32)words[(i * 8 + row) * 3];
        touch(address);
        memcpy(&pair[j], place(address, 16) + column * 2, 2);
      }
      a[i] = pair[0] | (u32)pair[1] << 16;
    }
  });
}

static void load_tile(u32 (&a)[4], u32 address) { load_matrices(a, address, false); }
static void load_tile_transposed(u32 (&a)[4], u32 address) { load_matrices(a, address, true); }

static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  int lane = self->id % 32;
  auto element = [](u64 words, int half) { return (double)bits_to_float((u32)(words >> 16 * half & 0xffff) << 16); };
  exchange({(u64)a[0] | (u64)a[1] << 32, (u64)a[2] | (u64)a[3] << 32, (u64)b0 | (u64)b1 << 32}, [&](const u64* words) {
    for (int e = 0; e < 4; e++) {
      int m = lane / 4 + e / 2 * 8, n = lane % 4 * 2 + e % 2;
      double sum = c[e];
      for (int k = 0; k < 16; k++) {
        const u64 *of_a = words + (m % 8 * 4 + k % 8 / 2) * 3, *of_b = words + (n * 4 + k % 8 / 2) * 3;
        sum += element(of_a[k / 8], m / 8 * 2 + k % 2) * element(of_b[2], k / 8 * 2 + k % 2);
      }
      c[e] = (float)sum;
    }
  });
}

static float exp2_approx(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

static bf16 to_bf16(float x) {
  u32 y = float_to_bits(x);
  return std::isnan(x) ? 0x7fff : (y + 0x7fff + (y >> 16 & 1)) >> 16;
}

// Lane l gives row l / 4, elements l % 4 * 2 and the next.
static u32 transposed(u32 x) {
  u32 y = 0;
  int lane = self->id % 32;
  exchange({x}, [&](const u64* words) {
    for (int j = 0; j < 2; j++) {
      int row = lane % 4 * 2 + j, column = lane / 4;
      y |= (u32)(words[(row * 4 + column / 2) * 3] >> 16 * (column % 2) & 0xffff) << 16 * j;
    }
  });
  return y;
}

static u32 pack(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __int_as_float(int x) { return bits_to_float((u32)x); }
static float log_sum_exp(float max, float sum) { return (max + log2f(sum)) * 0.693147182464599609375f; }
template <typename T>
static T __ldcg(const T* p) { return self->read = true, *p; }

static void run_fiber() {
  entry();
  self->done = true;
  swapcontext(&self->context, &scheduler);
}

template <typename T>
static T draw(std::vector<T>& from) {
  std::swap(from[random_number() % from.size()], from.back());
  T drawn = from.back();
  from.pop_back();
  return drawn;
}

static void run_block(std::vector<Fiber>& fibers) {
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
    fiber.done = fiber.read = false, fiber.open.clear(), fiber.groups.clear(), fiber.unfenced.clear();
    ready.push_back(&fiber);
  }
  std::vector<bool> slow(fibers.size() / 32);
  for (size_t i = 0; i < slow.size(); i++) slow[i] = random_number() % 4 == 0;
  while (!ready.empty() || !boxes.empty()) {
    if (!boxes.empty() && (ready.empty() || random_number() % 64 == 0)) carry_out(draw(boxes));
    if (ready.empty()) continue;
    self = draw(ready);
    if (slow[(self - fibers.data()) / 32] && random_number() % 64) {
      ready.push_back(self);
      continue;
    }
    swapcontext(&scheduler, &self->context);
  }
}

static void launch(int grid, int threads, int shared_bytes, void (*kernel)()) {
  entry = kernel, block_threads = threads, gridDim = {(u32)grid}, waits = 0;
  std::vector<Fiber> fibers(threads);
  for (int i = 0; i < threads; i++) fibers[i].id = i;
  for (int index = grid - 1; index >= 0; index--) {
    block_index = index, block = {};
    block.shared.resize(shared_bytes), block.unfenced.resize(shared_bytes / 16 + 1);
    block.warps.resize(threads / 32), block.exchanged.resize(threads * 3);
    for (char& c : block.shared) c = random_number();
    run_block(fibers);
    for (Fiber& fiber : fibers)
      if (!fiber.done) fprintf(stderr, "thread %d waits for %s %u\n", fiber.id, fiber.waits_for, fiber.which);
    for (Fiber& fiber : fibers)
      if (self = &fiber; !fiber.done) fail("waits for what never comes");
  }
}
