// Reduces what lies in this rank's memory: its own contribution and what copy engines have brought of the others'.

#include "reduce_bytes.cuh"
#include "team.cuh"

namespace mpicomm {

// The host's copies of this constant and of LocalReduction are in arguments.py; a test compares them.
constexpr u32 kReductionThreads = 512;

struct LocalReduction {
  const u8* sources[kMaxRanks];  // in the order of the reduction
  u8* output;                    // may be one of them
  u64 nbytes;
  u32 num_sources;
  u32 unused;
};

}  // namespace mpicomm

// Of one block: else the compiler may aim at two in 64 registers, where loads wait for each other (of int32, half as
// fast).
extern "C" __global__ void __launch_bounds__(mpicomm::kReductionThreads, 1)
    mpicomm_local_reduction(const __grid_constant__ mpicomm::LocalReduction);

MPICOMM_KERNEL void mpicomm_local_reduction(const __grid_constant__ mpicomm::LocalReduction x) {
  using mpicomm::u32;
  bool aligned = mpicomm::width_of(x.output) == 16;
  for (u32 place = 0; place < x.num_sources; ++place) aligned = aligned && mpicomm::width_of(x.sources[place]) == 16;
  // Blocks are few, so each has as much under way as its registers, 128 a thread, hold.
  mpicomm::reduce_bytes<2 * mpicomm::kAtOnce>(
      x.output, [&](u32 place) { return x.sources[place]; }, x.num_sources, x.nbytes, aligned,
      blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}
