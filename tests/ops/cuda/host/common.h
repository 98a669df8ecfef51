// What the kernels on the host share: the list of items, and the functions that the definition needs.
// Compiled with the -D of the kernel and KERNEL, its text without shared memory's declaration.
#include "device_on_host.h"
#include "split_items.cuh"
#include "listed_items.cuh"
#include KERNEL

static void** given;

template <typename T>
static T argument(int i) { return *(T*)given[i]; }

extern "C" void list_on_host(int grid, int cluster_blocks, int threads, int seed, void** arguments) {
  given = arguments;
  launch(grid, cluster_blocks, threads, 0, [] {
    list_items(
        argument<int*>(0), argument<int*>(1), argument<int*>(2), argument<int*>(3), argument<int*>(4), argument<int>(5),
        argument<int*>(6));
  });
}

extern "C" float exp2_on_host(float x) { return exp2_approx(x); }
extern "C" float lse_on_host(float max, float sum) { return log_sum_exp(max, sum); }
