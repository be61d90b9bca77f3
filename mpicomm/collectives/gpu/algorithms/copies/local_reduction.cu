// Reduces arrays in this rank's memory: its own contribution and the other ranks' contributions,
// which copy engines have brought.

#include "element.cuh"
#include "reduce_bytes.cuh"
#include "team.cuh"

namespace mpicomm {

// The host's copies of this constant and of LocalReduction are in plan.py; a test compares
// them.
constexpr u32 kReductionThreads = 512;

struct LocalReduction {
  const u8* sources[kMaxRanks];  // in the order of the reduction
  u8* output;                    // may be one of the sources
  u64 nbytes;
  u32 num_sources;
  u32 unused;
};

}  // namespace mpicomm

// Bounds the registers for one block on a multiprocessor. Without this the compiler may aim at two
// blocks, with 64 registers for each thread. Then loads would wait for each other.
extern "C" __global__ void __launch_bounds__(mpicomm::kReductionThreads, 1)
    mpicomm_local_reduction(const __grid_constant__ mpicomm::LocalReduction);

MPICOMM_KERNEL void mpicomm_local_reduction(const __grid_constant__ mpicomm::LocalReduction x) {
  using mpicomm::u32;
  bool aligned = mpicomm::width_of(x.output) == 16;
  for (u32 place = 0; place < x.num_sources; ++place) aligned = aligned && mpicomm::width_of(x.sources[place]) == 16;
  // There are few blocks, so each thread has as many loads in flight as its 128 registers hold.
  mpicomm::reduce_bytes<mpicomm::Op, mpicomm::Element, 2 * mpicomm::kAtOnce<mpicomm::Element>>(
      x.output, [&](u32 place) { return x.sources[place]; }, x.num_sources, x.nbytes, aligned,
      blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}
