// What the kernels on the host share: the list of items, and the functions that the definition needs.
// Compiled with the -D of the kernel and KERNEL, its text without shared memory's declaration.
#include "device_on_host.h"
#include "split_items.cuh"
#include "list_splits.cu"
#include KERNEL

static void** given;

template <typename T>
static T argument(int i) { return *(T*)given[i]; }

// How many threads waited for the kernels before.
static int launch_with(void** arguments, int seed, int grid, int threads, int shared_bytes, void (*kernel)()) {
  given = arguments;
  random_number.seed(seed);
  launch(grid, threads, shared_bytes, kernel);
  return waits;
}

extern "C" int list_on_host(int grid, int threads, int shared_bytes, int seed, void** arguments) {
  return launch_with(arguments, seed, grid, threads, shared_bytes, [] {
    list_items(
        argument<int*>(0), argument<int*>(1), argument<int*>(2), argument<int*>(3), argument<int*>(4), argument<int>(5),
        argument<int*>(6));
  });
}

extern "C" float exp2_on_host(float x) { return exp2_approx(x); }
extern "C" float lse_on_host(float max, float sum) { return log_sum_exp(max, sum); }
