// For kernels of users: `#include <mpicomm.cuh>`, compiled with -I and the directory that mpicomm.include_dir()
// returns.
//
// Kernels of different ranks meet at flags: words of a SymmetricArray of uint64, zero at first. Data goes into another
// SymmetricArray. A kernel reaches its parts on all ranks through `pointers`:
//
//     mpicomm::part<float>(data, peer)[i] = ...;                      // all threads of the block, in the peer's memory
//     mpicomm::signal_from_block(mpicomm::part<u64>(flags, peer), number);
//
//     if (!mpicomm::wait_in_block(mpicomm::part<u64>(flags, rank), number, timeout_ns)) return;    // on the peer
//     ... = mpicomm::part<float>(data, rank)[i];
//
// A flag has one writer, and its number only grows. No rank resets a flag, because it could not know which kernels
// still look at it. A writer also has to learn when it may write a buffer again: from a flag in the other direction, or
// from later data of the reader. examples/ring_sum.cu uses two buffers in turns.
//
// All blocks that wait must run at once with the blocks that they wait for. In a grid that is larger than the GPU, or
// between ranks that share a GPU, blocks could wait for blocks that cannot begin.
#pragma once

#include "../memory_order.cuh"

namespace mpicomm {

// Returns the part of `rank` of a SymmetricArray, as mapped on this rank; null for ranks of other nodes. `pointers` is
// the address of the array that `SymmetricArray.pointers` returns.
template <class T>
MPICOMM_DEVICE T* part(const u64* pointers, u32 rank) {
  return reinterpret_cast<T*>(pointers[rank]);
}

// Raises a flag to `number`. Pairs with `wait`. Publishes the stores of this thread, on any rank, and the stores of
// other threads that it has seen.
MPICOMM_DEVICE void signal(u64* flag, u64 number) { store_release(flag, number); }

// Waits until a flag has reached `number`. Pairs with `signal`: the caller may then read what the signal published.
// Returns false if `timeout_ns` have passed first; the caller may not read it then.
MPICOMM_DEVICE bool wait(const u64* flag, u64 number, u64 timeout_ns) {
  constexpr u32 kPollsBeforeClock = 1000;
  u64 start = 0;
  // Signed, as for every flag: a flag that is ahead has reached the number, too.
  for (u32 polls = 0; static_cast<long long>(load_acquire(flag) - number) < 0; ++polls) {
    if (polls < kPollsBeforeClock) continue;
    const u64 now = clock_ns();
    if (start == 0) start = now;
    if (now - start > timeout_ns) return false;
  }
  return true;
}

// `signal` by a block: raises the flag once all threads of the block have made their stores before the call. All
// threads of the block call it together; none may have returned.
MPICOMM_DEVICE void signal_from_block(u64* flag, u64 number) {
  // The first thread has seen the stores of the other threads at the barrier, and its release publishes them. Without
  // the barrier the flag could arrive before their data.
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) signal(flag, number);
}

// `wait` by a block: all threads of the block call it together and get the same answer.
MPICOMM_DEVICE bool wait_in_block(const u64* flag, u64 number, u64 timeout_ns) {
  const bool first = threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
  return __syncthreads_and(!first || wait(flag, number, timeout_ns));
}

}  // namespace mpicomm
