// attend_splits on the host.
#include "common.h"

extern "C" int attend_on_host(int grid, int threads, int shared_bytes, int seed, void** arguments) {
  return launch_with(arguments, seed, grid, threads, shared_bytes, [] {
    attend_splits(argument<Arguments>(0));
  });
}
