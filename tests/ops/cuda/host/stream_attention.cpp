// attend_stream on the host.
#include "common.h"

extern "C" void attend_on_host(int grid, int cluster_blocks, int threads, int seed, void** arguments) {
  given = arguments;
  random_number.seed(seed);
  launch(grid, cluster_blocks, threads, SHARED_BYTES, [] {
    attend_stream(
        argument<bf16*>(0), argument<TensorMap>(1), argument<TensorMap>(2), argument<bf16*>(3), argument<float*>(4),
        argument<int>(5), argument<int*>(6), argument<int*>(7), argument<float*>(8), argument<float*>(9), argument<int>(10),
        argument<int>(11), argument<int>(12), argument<float>(13));
  });
}
