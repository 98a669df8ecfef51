// attend_clusters on the host.
#include "common.h"

extern "C" void attend_on_host(int grid, int cluster_blocks, int threads, int seed, void** arguments) {
  given = arguments;
  random_number.seed(seed);
  launch(grid, cluster_blocks, threads, SHARED_BYTES, [] {
    attend_clusters(
        argument<bf16*>(0), argument<bf16*>(1), argument<bf16*>(2), argument<bf16*>(3), argument<float*>(4), argument<int>(5),
        argument<int*>(6), argument<int*>(7), argument<int*>(8), argument<float*>(9), argument<float*>(10), argument<int>(11),
        argument<int>(12), argument<int>(13), argument<int>(14), argument<int>(15), argument<float>(16));
  });
}

