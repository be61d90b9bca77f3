// Adds the numbers of all ranks in one kernel: what each rank has travels around the ring, and every rank adds what
// passes by. One block; see ring_sum.py.

#include <mpicomm.cuh>

using mpicomm::u32;
using mpicomm::u64;

// `inboxes` and `flags` are the pointers of two symmetric arrays: of 2 * size * count floats, and of one uint64. Calls
// are counted from 0. `failed` becomes 1 where a rank does not come within `timeout_ns`.
extern "C" __global__ void ring_sum(float* sums, const float* values, u32 count, const u64* inboxes, const u64* flags,
                                    u32 rank, u32 size, u64 call, u64 timeout_ns, u32* failed) {
  const u32 next = (rank + 1) % size;
  const float* passing = values;
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) sums[i] = values[i];
  for (u32 step = 0; step + 1 < size; ++step) {
    // Two sets of inboxes by turns. This rank is here because the last call is over, in which it heard of the next
    // rank: that one had begun the last call, and read its inboxes of the call before, which are written to now.
    const u64 inbox = (call % 2 * size + step) * count;
    const u64 number = call * (size - 1) + step + 1;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) mpicomm::part<float>(inboxes, next)[inbox + i] = passing[i];
    mpicomm::signal_from_block(mpicomm::part<u64>(flags, next), number);
    if (!mpicomm::wait_in_block(mpicomm::part<u64>(flags, rank), number, timeout_ns)) {
      if (threadIdx.x == 0) *failed = 1;
      return;
    }
    passing = mpicomm::part<float>(inboxes, rank) + inbox;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sums[i] += passing[i];
  }
}
