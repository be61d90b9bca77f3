// Normalises the rows of the stored result of a reduction (norm.cuh), after a kernel that
// reduces. A block takes a row at a time. Only one thread reads and writes each element of the
// arrays, and the preceding kernels of the stream have ended when this kernel begins. So it needs
// no flags. It needs barriers at the begin and between the passes over a row.

#include "faults.cuh"
#include "norm.cuh"

namespace mpicomm {

// The host's copy of NormKernel is in epilogue.py; a test compares them.
struct NormKernel {
  const u8* source;   // apart from the output, or at the same address if both types are the same
  const u32* failed;  // the word of Faults: after it is set, the source holds no result
  Norm norm;
};

// Loads and stores the packet at element `at` of a row of `hidden` elements.
MPICOMM_DEVICE Packet load_packet(const u8* row, bool aligned, u64 at, u64 hidden) {
  const u8* const from = row + at * sizeof(Element);
  const u64 nbytes = (hidden - at) * sizeof(Element);
  return aligned && nbytes >= kPacketNbytes ? load_aligned(from) : load_any(from, width_of(from), nbytes);
}
MPICOMM_DEVICE void store_packet(u8* row, bool aligned, u64 at, u64 hidden, const Packet& packet) {
  u8* const to = row + at * sizeof(Element);
  const u64 nbytes = (hidden - at) * sizeof(Element);
  if (aligned && nbytes >= kPacketNbytes) store_aligned(to, packet);
  else store_any(to, packet, width_of(to), nbytes);
}

// A row, as one thread of a block sees it.
struct RowOfBlock {
  const u8* source;
  u8* residual;
  u64 hidden;
  bool aligned;

  // Calls a function for each packet of this thread, as `statistics_of` needs it: with the packet's
  // first element and the number of its elements.
  template <class Work>
  MPICOMM_DEVICE void for_each_packet(const Work& work) const {
    const u64 lane = threadIdx.x % kLanes * kElements;
    constexpr u64 kStride = static_cast<u64>(kNormThreads) * kElements;
    for (u64 at = static_cast<u64>(threadIdx.x) * kElements; at - lane < hidden; at += kStride) {
      const u64 left = at < hidden ? hidden - at : 0;
      work(at, left < kElements ? left : kElements);
    }
  }

  // Adds the residual. Returns the sum that `row_barrier` needs.
  MPICOMM_DEVICE State add(const Norm& norm) const {
    State sum = 0;
    for_each_packet([&](u64 at, u64 count) {
      if (count == 0) return;
      const Packet values = load_packet(source, aligned, at, hidden);
      const Packet h = with_residual(norm, at, count, values, load_packet(residual, aligned, at, hidden));
      sum = with_summands(sum, h, count);
      store_packet(residual, aligned, at, hidden, h);
    });
    return sum;
  }

  // Calls a function for each packet of h: see `statistics_of`.
  template <class Work>
  MPICOMM_DEVICE void operator()(const Work& work) const {
    for_each_packet([&](u64 at, u64 count) {
      Packet h{};
      if (count > 0) h = load_packet(residual, aligned, at, hidden);  // this thread has stored it
      work(at, h, count);
    });
  }
};

MPICOMM_DEVICE void normalise(const NormKernel& x, u64 row, u32 turn, Sums& sums) {
  const u64 hidden = x.norm.hidden, begin = row * hidden * sizeof(Element);
  const u8* const source = x.source + begin;
  u8* const residual = x.norm.residual + begin;
  const bool aligned = width_of(source) == kPacketNbytes && width_of(residual) == kPacketNbytes;
  const RowOfBlock of{source, residual, hidden, aligned};
  sums.of[turn][threadIdx.x] = of.add(x.norm);
  row_barrier(1, true);
  const State total = total_of(sums.of[turn], threadIdx.x);
  const Statistics statistics = statistics_of(x.norm, sums, total, threadIdx.x, 1, of);
  normalise_row(x.norm, row, statistics, threadIdx.x, of);
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kNormThreads)
    mpicomm_norm(const __grid_constant__ mpicomm::NormKernel);

MPICOMM_KERNEL void mpicomm_norm(const __grid_constant__ mpicomm::NormKernel x) {
  using namespace mpicomm;
  __shared__ Sums sums;
  // Pairs with the store of `failed` in report_fault, which a kernel of another stream may execute
  // at this moment. Then some threads see the failure and others do not. All threads leave or no
  // thread leaves, because the barrier of a row counts all threads: the remaining threads would
  // wait there for ever.
  if (!__syncthreads_and(load_relaxed(x.failed) == kClear)) return;
  u32 turn = 0;
  for (u64 row = blockIdx.x; row < x.norm.rows; row += gridDim.x, turn ^= 1) normalise(x, row, turn, sums);
}
