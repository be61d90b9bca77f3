// Adds a residual to the stored result of a reduction and normalises its rows, behind the kernel that reduces: elements
// of MPICOMM_DTYPE become elements of MPICOMM_RESULT.
//
//     h = value + residual, rounded            the new residual
//     out = h / sqrt(mean of h * h + eps) * weight
//
// A block takes a row at a time. Thread t adds the squares of packets t, t + kNormThreads and so on, one element after
// the other, and the sums of all threads are added by halves. So the order does not depend on the device or on where
// the arrays lie. Each element of the arrays is read and written by one thread alone, and kernels ahead of this one are
// over when it begins. So it needs no flags but the barriers around the sums.

#include "bytes.cuh"
#include "element.cuh"
#include "expressions.cuh"
#include "faults.cuh"

namespace mpicomm {

// The host's copies of this constant and of RmsNorm are in epilogue.py; a test compares them.
constexpr u32 kNormThreads = 256;

struct RmsNorm {
  const u8* source;
  u8* output;         // apart from the source, or the same place where both types are the same
  const u32* failed;  // the word of Faults: once it is set, the source holds no result
  u8* residual;       // of MPICOMM_DTYPE
  const u8* weight;   // a row of MPICOMM_WEIGHT
  u64 rows;
  u64 hidden;  // elements of a row
  double eps;
};

using Finished = dtype::MPICOMM_RESULT;
using Weight = dtype::MPICOMM_WEIGHT;
using State = typename Number<Element>::Value;
constexpr u32 kPerPacket = kPacketNbytes / sizeof(Element);

struct Elements {
  Element of[kPerPacket];
};

// Loads and stores the packet at element `at` of a row of `hidden` elements.
MPICOMM_DEVICE Elements load_elements(const u8* row, bool aligned, u64 at, u64 hidden) {
  const u8* const from = row + at * sizeof(Element);
  const u64 nbytes = (hidden - at) * sizeof(Element);
  const bool whole = aligned && nbytes >= kPacketNbytes;
  return __builtin_bit_cast(Elements, whole ? load_aligned(from) : load_any(from, width_of(from), nbytes));
}
MPICOMM_DEVICE void store_elements(u8* row, bool aligned, u64 at, u64 hidden, const Elements& elements) {
  u8* const to = row + at * sizeof(Element);
  const u64 nbytes = (hidden - at) * sizeof(Element);
  const Packet packet = __builtin_bit_cast(Packet, elements);
  if (aligned && nbytes >= kPacketNbytes) store_aligned(to, packet);
  else store_any(to, packet, width_of(to), nbytes);
}

MPICOMM_DEVICE void normalise(const RmsNorm& x, u64 row, State (&sums)[kNormThreads]) {
  const u64 hidden = x.hidden, begin = row * hidden;
  const u8* const source = x.source + begin * sizeof(Element);
  u8* const residual = x.residual + begin * sizeof(Element);
  Finished* const output = reinterpret_cast<Finished*>(x.output) + begin;
  const Weight* const weight = reinterpret_cast<const Weight*>(x.weight);
  const bool aligned = width_of(source) == 16 && width_of(residual) == 16;
  const u64 first = static_cast<u64>(threadIdx.x) * kPerPacket;
  constexpr u64 kStride = static_cast<u64>(kNormThreads) * kPerPacket;
  State sum = 0;
  for (u64 at = first; at < hidden; at += kStride) {
    const Elements values = load_elements(source, aligned, at, hidden);
    Elements h = load_elements(residual, aligned, at, hidden);
#pragma unroll
    for (u32 e = 0; e < kPerPacket; ++e) {
      h.of[e] = Number<Element>::encode(Number<Element>::decode(values.of[e]) + Number<Element>::decode(h.of[e]));
      const State each = Number<Element>::decode(h.of[e]);
      if (at + e < hidden) sum += each * each;
    }
    store_elements(residual, aligned, at, hidden, h);
  }
  __syncthreads();  // all threads have read the sums of the row before
  sums[threadIdx.x] = sum;
  for (u32 half = kNormThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  const State root = fn::sqrt(sums[0] / static_cast<State>(hidden) + static_cast<State>(x.eps));
  for (u64 at = first; at < hidden; at += kStride) {
    const Elements h = load_elements(residual, aligned, at, hidden);  // this thread has stored it
#pragma unroll
    for (u32 e = 0; e < kPerPacket; ++e) {
      if (at + e >= hidden) break;
      const State normal = Number<Element>::decode(h.of[e]) / root * fn::element<State>(weight, at + e);
      output[at + e] = Number<Finished>::encode(fn::number<typename Number<Finished>::Value>(normal));
    }
  }
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kNormThreads)
    mpicomm_rms_norm(const __grid_constant__ mpicomm::RmsNorm);

MPICOMM_KERNEL void mpicomm_rms_norm(const __grid_constant__ mpicomm::RmsNorm x) {
  using namespace mpicomm;
  __shared__ State sums[kNormThreads];
  if (load_relaxed(x.failed) != kClear) return;
  for (u64 row = blockIdx.x; row < x.rows; row += gridDim.x) normalise(x, row, sums);
}
