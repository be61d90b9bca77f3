// Reduces arrays in the memory of one rank, in their order, and converts the result. The arrays are
// the partial results of several peer domains. They are of MPICOMM_DTYPE, and the result is of
// MPICOMM_RESULT. A single array is only converted.
//
// The type in which MPICOMM_OP computes is the same for both types. So the kernel rounds the result
// once, at the end.
//
// No two threads touch the same element, and the preceding kernels of the stream have ended when
// this kernel begins. So it needs no flags.

#define MPICOMM_TREE_LEVELS 10  // for 1024 peer domains

#include "bytes.cuh"
#include "element.cuh"

namespace mpicomm {

// The host's copies of this constant and of Combination are in reductions.py; a test compares them.
constexpr u32 kCombineThreads = 512;

struct Combination {
  const u8* source;  // the first array
  u64 stride;        // from the start of an array to the start of the next, in bytes
  u8* output;        // apart from all arrays, or at the address of an array with elements of equal size
  u64 count;
  u32 sources;
  u32 divisor;  // of the result; 1 leaves the result as it is
};

using Result = dtype::MPICOMM_RESULT;

template <class State>
MPICOMM_DEVICE Result result_of(State state, u32 divisor) {
  return Number<Result>::encode(divisor == 1 ? state : divide(state, divisor));
}

// The state of logical operations.
MPICOMM_DEVICE Result result_of(bool state, u32) {
  typename Number<Result>::Value truth;
  set_truth(truth, state);
  return Number<Result>::encode(truth);
}

// Elements that a thread moves at once: 16 bytes of the narrower type.
constexpr u32 kCombined = 16 / (sizeof(Element) < sizeof(Result) ? sizeof(Element) : sizeof(Result));

template <class T>
struct alignas(16) Row {
  T of[kCombined];
};

// Combines `n` elements from index `first` on; `Sources` and `Results` hold `n` elements.
template <class Sources, class Results, u32 n>
MPICOMM_DEVICE void combine(const Combination& x, u64 first) {
  typename Op::State states[n];
  const u8* source = x.source + first * sizeof(Element);
  for (u32 place = 0; place < x.sources; ++place, source += x.stride) {
    const Sources row = *reinterpret_cast<const Sources*>(source);
#pragma unroll
    for (u32 i = 0; i < n; ++i) states[i] = place == 0 ? Op::first(row.of[i]) : next_of<Op>(states[i], row.of[i], place);
  }
  Results results;
#pragma unroll
  for (u32 i = 0; i < n; ++i) results.of[i] = result_of(value_of<Op>(states[i], x.sources), x.divisor);
  *reinterpret_cast<Results*>(x.output + first * sizeof(Result)) = results;
}

template <class T>
struct One {
  T of[1];
};

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kCombineThreads)
    mpicomm_combine(const __grid_constant__ mpicomm::Combination);

MPICOMM_KERNEL void mpicomm_combine(const __grid_constant__ mpicomm::Combination x) {
  using namespace mpicomm;
  const u64 thread = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  const bool aligned = width_of(x.output) == 16 && width_of(x.source) == 16 && x.stride % 16 == 0;
  const u64 rows = aligned ? x.count / kCombined : 0;
  for (u64 row = thread; row < rows; row += threads) {
    combine<Row<Element>, Row<Result>, kCombined>(x, row * kCombined);
  }
  for (u64 i = rows * kCombined + thread; i < x.count; i += threads) combine<One<Element>, One<Result>, 1>(x, i);
}
