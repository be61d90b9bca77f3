// Groups: the threads that call a function together.
//
// All threads of the group call the function with the same arguments, and no thread of it may have
// returned from the kernel. A block may have one to three dimensions and any number of threads.
#pragma once

#include "../../memory_order.cuh"

namespace mpicomm {

// The number of the calling thread in its block, and the number of threads of the block.
MPICOMM_DEVICE u32 thread_of_block() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
MPICOMM_DEVICE u32 threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }

// Only the calling thread.
struct Thread {
  MPICOMM_DEVICE u32 number() const { return 0; }
  MPICOMM_DEVICE u32 size() const { return 1; }
  MPICOMM_DEVICE void sync() const {}
  MPICOMM_DEVICE bool all(bool value) const { return value; }
};

// The threads of the caller's warp. The last warp of a block may have fewer than 32 threads.
struct Warp {
  MPICOMM_DEVICE u32 number() const { return thread_of_block() % kLanes; }
  MPICOMM_DEVICE u32 size() const {
    const u32 threads = threads_of_block() - thread_of_block() / kLanes * kLanes;
    return threads < kLanes ? threads : kLanes;
  }
  // Waits for all threads of the group. Each thread then sees the earlier stores of the other
  // threads.
  MPICOMM_DEVICE void sync() const { __syncwarp(kWarp); }
  // Like sync, and returns whether `value` is true on all threads.
  MPICOMM_DEVICE bool all(bool value) const {
    const bool agreed = __all_sync(kWarp, value);
    __syncwarp(kWarp);  // a vote orders no memory
    return agreed;
  }
};

// The threads of the caller's block.
struct Block {
  MPICOMM_DEVICE u32 number() const { return thread_of_block(); }
  MPICOMM_DEVICE u32 size() const { return threads_of_block(); }
  MPICOMM_DEVICE void sync() const { __syncthreads(); }
  MPICOMM_DEVICE bool all(bool value) const { return __syncthreads_and(value); }
};

}  // namespace mpicomm
