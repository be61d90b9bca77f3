// Applies an epilogue to the stored result of a reduction, if the kernel that reduces has not
// applied it. Elements of MPICOMM_DTYPE become elements of MPICOMM_RESULT. No two threads touch the
// same element, and the preceding kernels of the stream have ended when this kernel begins. So it
// needs no flags.

#include "epilogue.cuh"
#include "faults.cuh"
#include "runs.cuh"

namespace mpicomm {

// The host's copies of this constant and of Epilogue are in epilogue.py; a test compares them.
constexpr u32 kEpilogueThreads = 512;

struct Epilogue {
  const u8* source;
  u8* output;         // apart from the source, or at the same address if both types are the same
  const u32* failed;  // the word of Faults: after it is set, the source holds no result
  Operands operands;
};

// Elements that a thread moves at once: 16 bytes of the narrower type.
constexpr u32 kAtOnce = 16 / (sizeof(Element) < sizeof(Finished) ? sizeof(Element) : sizeof(Finished));

template <u32 n>
MPICOMM_DEVICE void apply(const Epilogue& x, u64 first) {
  const auto in = load_run<Element, n>(x.source + first * sizeof(Element), n);
  Run<Finished, n> out;
#pragma unroll
  for (u32 e = 0; e < n; ++e) out.of[e] = finish(in.of[e], static_cast<i64>(first + e), x.operands);
  store_run(x.output + first * sizeof(Finished), out, n);
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kEpilogueThreads)
    mpicomm_epilogue(const __grid_constant__ mpicomm::Epilogue);

MPICOMM_KERNEL void mpicomm_epilogue(const __grid_constant__ mpicomm::Epilogue x) {
  using namespace mpicomm;
  if (load_relaxed(x.failed) != kClear) return;
  const u64 thread = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  const bool aligned = width_of(x.source) == 16 && width_of(x.output) == 16;
  const u64 rows = aligned ? x.operands.count / kAtOnce : 0;
  for (u64 row = thread; row < rows; row += threads) apply<kAtOnce>(x, row * kAtOnce);
  for (u64 e = rows * kAtOnce + thread; e < x.operands.count; e += threads) apply<1>(x, e);
}
