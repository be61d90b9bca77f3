// A kernel of a user between two signals: it writes into a peer's memory.

#include <mpicomm.cuh>

MPICOMM_KERNEL void write_words(mpicomm::u64* to, mpicomm::u64 first, mpicomm::u32 count) {
  const mpicomm::u32 threads = blockDim.x * gridDim.x;
  for (mpicomm::u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) to[i] = first + i;
}

// Adds up the words that a peer has written here.
MPICOMM_KERNEL void add_words(mpicomm::u64* sum, const mpicomm::u64* words, mpicomm::u32 count) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    for (mpicomm::u32 i = 0; i < count; ++i) *sum += words[i];
  }
}
