// Adds the numbers of all ranks in one kernel: the numbers of each rank travel around the ring, and
// every rank adds the numbers that pass. The kernel has one block; see ring_sum.py.

#include <mpicomm.cuh>

using mpicomm::u32;
using mpicomm::u64;

// `inboxes` and `flags` are the pointers of two symmetric arrays, of 2 * size * count floats and of
// one uint64. `call` counts from 0. `failed` becomes 1 if a rank does not come within `timeout_ns`.
extern "C" __global__ void ring_sum(float* sums, const float* values, u32 count, const u64* inboxes, const u64* flags,
                                    u32 rank, u32 size, u64 call, u64 timeout_ns, u32* failed) {
  const u32 next = (rank + 1) % size;
  const float* passing = values;
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) sums[i] = values[i];
  for (u32 step = 0; step + 1 < size; ++step) {
    // Calls use two sets of inboxes in turn, so this kernel overwrites the inboxes of the call before
    // the last one. The next rank has read them, because it had begun the last call: in that call its
    // numbers came around to this rank.
    const u64 inbox = (call % 2 * size + step) * count;
    const u64 number = call * (size - 1) + step + 1;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) mpicomm::part<float>(inboxes, next)[inbox + i] = passing[i];
    mpicomm::signal(mpicomm::Block(), mpicomm::part<u64>(flags, next), number);
    if (!mpicomm::wait(mpicomm::Block(), mpicomm::part<u64>(flags, rank), number, timeout_ns)) {
      if (threadIdx.x == 0) *failed = 1;
      return;
    }
    passing = mpicomm::part<float>(inboxes, rank) + inbox;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sums[i] += passing[i];
  }
}
