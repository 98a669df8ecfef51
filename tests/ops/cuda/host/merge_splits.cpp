// merge_splits on the host.
#include "common.h"

extern "C" void attend_on_host(int grid, int cluster_blocks, int threads, int seed, void** arguments) {
  given = arguments;
  launch(grid, cluster_blocks, threads, 0, [] {
    merge_splits(
        argument<bf16*>(0), argument<float*>(1), argument<int>(2), argument<int*>(3), argument<float*>(4), argument<float*>(5),
        argument<int*>(6), argument<int*>(7), argument<int>(8), argument<int>(9));
  });
}
