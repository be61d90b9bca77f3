// For kernels of users: `#include <mpicomm.cuh>`, with -I and what mpicomm.include_dir() returns.
//
// Kernels of different ranks meet at flags: words of a SymmetricArray of uint64, zero at first. Data goes into another
// SymmetricArray, whose parts on all ranks a kernel reaches through `pointers`:
//
//     mpicomm::part<float>(data, peer)[i] = ...;                      // all threads of the block, in the peer's memory
//     mpicomm::signal_from_block(mpicomm::part<u64>(flags, peer), number);
//
//     if (!mpicomm::wait_in_block(mpicomm::part<u64>(flags, rank), number, timeout_ns)) return;    // there
//     ... = mpicomm::part<float>(data, rank)[i];
//
// A flag has one writer, and its number only grows: it is never reset, as the writer could not know who still looks at
// it. That a buffer may be written again has to be learnt as well, from a flag in the other direction or from what the
// reader sends later; examples/ring_sum.cu uses two buffers by turns.
//
// All blocks that wait must be able to run at once with those they wait for: a grid that is larger than the GPU, or
// ranks that share one, would wait for blocks that cannot begin.
#pragma once

#include "../memory_order.cuh"

namespace mpicomm {

// The part of `rank` of a SymmetricArray, mapped on this rank; null for ranks of other nodes. `pointers` is the address
// of the array that `SymmetricArray.pointers` returns.
template <class T>
MPICOMM_DEVICE T* part(const u64* pointers, u32 rank) {
  return reinterpret_cast<T*>(pointers[rank]);
}

// Raises a flag to `number`. Publishes what this thread wrote, on any rank, and what it has seen written by others.
MPICOMM_DEVICE void signal(u64* flag, u64 number) { store_release(flag, number); }

// Waits until a flag has reached `number`: what was published with it can be read then. False when `timeout_ns` has
// passed first; then nothing may be read.
MPICOMM_DEVICE bool wait(const u64* flag, u64 number, u64 timeout_ns) {
  constexpr u32 kPollsBeforeClock = 1000;
  u64 start = 0;
  // Signed, as for every flag: one that is ahead has been reached.
  for (u32 polls = 0; static_cast<long long>(load_acquire(flag) - number) < 0; ++polls) {
    if (polls < kPollsBeforeClock) continue;
    const u64 now = clock_ns();
    if (start == 0) start = now;
    if (now - start > timeout_ns) return false;
  }
  return true;
}

// For all threads of a block together, none of which may have returned: `signal` once all have written what they are
// to write before it.
MPICOMM_DEVICE void signal_from_block(u64* flag, u64 number) {
  // The release of the first thread publishes what the barrier has shown it of the others.
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) signal(flag, number);
}

// For all threads of a block together: `wait`, with the same answer for all.
MPICOMM_DEVICE bool wait_in_block(const u64* flag, u64 number, u64 timeout_ns) {
  const bool first = threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
  return __syncthreads_and(!first || wait(flag, number, timeout_ns));
}

}  // namespace mpicomm
