// The kernel of `python -m mpicomm.p2p`.

#include "bytes.cuh"

namespace mpicomm {

// The host's copies of the structure and of the constant are in __main__.py; a test compares them.
constexpr u32 kCopyThreads = 512;

struct Copying {
  u8* target;
  const u8* source;
  u64 nbytes;
};

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kCopyThreads)
    mpicomm_p2p_copy(const __grid_constant__ mpicomm::Copying);

MPICOMM_KERNEL void mpicomm_p2p_copy(const __grid_constant__ mpicomm::Copying x) {
  const mpicomm::u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  mpicomm::copy_bytes(x.target, x.source, x.nbytes, thread, gridDim.x * blockDim.x);
}
