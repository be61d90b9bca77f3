// The kernels of `python -m mpicomm.p2p`: one holds a stream, one copies, and one times single loads.

#include "bytes.cuh"

namespace mpicomm {

// The host's copies of these structures and of the constant are in gpu.py; a test compares them.
constexpr u32 kCopyThreads = 512;

struct Gate {
  const u32* released;
  u64 limit_ns;
};

struct Copying {
  u8* target;
  const u8* source;
  u64 nbytes;
};

// Loads in a chain: each load waits for the one before.
struct PointerChase {
  const u64* word;  // 0
  u64* result;      // nanoseconds and loads
  u32 loads;
};

}  // namespace mpicomm

// Holds its stream until the host has enqueued all later work. So the timed work contains
// no time of the host.
MPICOMM_KERNEL void mpicomm_p2p_gate(const __grid_constant__ mpicomm::Gate x) {
  const mpicomm::u64 begin = mpicomm::clock_ns();
  while (mpicomm::load_volatile(x.released) == 0 && mpicomm::clock_ns() - begin < x.limit_ns) mpicomm::pause();
}

extern "C" __global__ void __launch_bounds__(mpicomm::kCopyThreads)
    mpicomm_p2p_copy(const __grid_constant__ mpicomm::Copying);

MPICOMM_KERNEL void mpicomm_p2p_copy(const __grid_constant__ mpicomm::Copying x) {
  const mpicomm::u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  mpicomm::copy_bytes(x.target, x.source, x.nbytes, thread, gridDim.x * blockDim.x);
}

MPICOMM_KERNEL void mpicomm_p2p_pointer_chase(const __grid_constant__ mpicomm::PointerChase x) {
  const mpicomm::u64* at = x.word + mpicomm::load_volatile(x.word);  // the first load may have to fetch a translation
  const mpicomm::u64 begin = mpicomm::clock_ns();
  // Each load gives the address of the next load: the same address, which the compiler cannot know.
  for (mpicomm::u32 load = 0; load < x.loads; ++load) at += mpicomm::load_volatile(at);
  x.result[0] = mpicomm::clock_ns() - begin + (at - x.word);
  x.result[1] = x.loads;
}
