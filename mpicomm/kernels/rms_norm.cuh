// The RMS norm of rows with a residual. packets.cu applies it to rows that it has just reduced, and
// rms_norm.cu applies it to a stored result. Elements of MPICOMM_DTYPE become elements of
// MPICOMM_RESULT.
//
//     h = value + residual, rounded            the new residual
//     out = h / sqrt(mean of h * h + eps) * weight
//
// kNormThreads threads take a row together, or rows of several shards at once. Thread t adds the
// squares of packets t, t + kNormThreads and so on, one element after the other. Then they add the
// sums of all threads by halves. So the order does not depend on the kernel, on the device, or on the addresses of the
// arrays.
#pragma once

#include "expressions.cuh"
#include "reduce_packets.cuh"
#include "runs.cuh"

namespace mpicomm {

// The host's copies of this constant and of Norm are in epilogue.py; a test compares them.
constexpr u32 kNormThreads = 256;

struct Norm {
  u8* output;         // of MPICOMM_RESULT
  const u8* reduced;  // with fan-out: where the reduced elements lie, of MPICOMM_DTYPE
  u8* residual;      // of MPICOMM_DTYPE
  const u8* weight;  // a row of MPICOMM_WEIGHT
  u64 rows;
  u64 rows_of_shard;  // the rows that each rank reduces, except the last ranks; all rows in one hop
  u64 hidden;         // elements of a row
  double eps;
};

using Finished = dtype::MPICOMM_RESULT;
using Weight = dtype::MPICOMM_WEIGHT;
using State = typename Number<Element>::Value;

// The sums of squares of the threads of a row, or of rows of several shards, in shared memory. Two
// rows of a shard use them in turns.
template <u32 shards>
struct Sums {
  State of[2][shards][kNormThreads];
};

// Returns h for a packet of values.
MPICOMM_DEVICE Elements with_residual(const Elements& values, const Elements& residual) {
  Elements h;
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    h.of[e] = Number<Element>::encode(Number<Element>::decode(values.of[e]) + Number<Element>::decode(residual.of[e]));
  }
  return h;
}

// Returns `sum` with the squares of the first `count` elements of a packet.
MPICOMM_DEVICE State with_squares(State sum, const Elements& h, u64 count) {
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    const State each = Number<Element>::decode(h.of[e]);
    if (e < count) sum += each * each;
  }
  return sum;
}

// The threads of a row meet at the end of the row, after each has stored its sum of squares. Returns
// false if a thread is not `ok`: then the row has no mean, and all threads must leave. Only these
// threads use the number `barrier`.
//
// It publishes the sums of all threads to all threads. Without this barrier, a thread would add sums
// that other threads have not stored yet. A slow thread may still read the sums afterwards. No second
// barrier is needed, because the next sums in this place come two rows later. They come after the
// barrier of the next row, which the slow thread has to reach first.
MPICOMM_DEVICE bool meet_at_end(u32 barrier, bool ok) { return meet(barrier, kNormThreads, ok); }

// Returns the root of the mean of a row with eps, from the sums of all threads. All threads of the
// warp call it together.
MPICOMM_DEVICE State root_of(const Norm& norm, const State (&all)[kNormThreads], u32 thread) {
  static_assert(kNormThreads == 8 * kLanes, "each lane adds eight sums");
  // Each warp adds all sums. So no more barriers are needed, because the last five halves are the
  // lanes of a warp.
  const u32 lane = thread % kLanes;
  State halves[8];
#pragma unroll
  for (u32 each = 0; each < 8; ++each) halves[each] = all[each * kLanes + lane];
#pragma unroll
  for (u32 half = 4; half > 0; half /= 2) {
#pragma unroll
    for (u32 each = 0; each < half; ++each) halves[each] += halves[each + half];
  }
  State total = halves[0];
  // The lanes from `lanes` on add values that no lane uses. The first lane has the sum of all.
#pragma unroll
  for (u32 lanes = kLanes / 2; lanes > 0; lanes /= 2) total += __shfl_down_sync(kWarp, total, lanes);
  total = __shfl_sync(kWarp, total, 0);
  return fn::sqrt(total / static_cast<State>(norm.hidden) + static_cast<State>(norm.eps));
}

// Stores the result for the first `count` elements of a packet of h, which begins at element `at`
// of row `row`.
MPICOMM_DEVICE void store_normal(const Norm& norm, u64 row, u64 at, const Elements& h, u64 count, State root) {
  const auto weight = load_run<Weight, kElements>(norm.weight + at * sizeof(Weight), count);
  Run<Finished, kElements> out{};
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    if (e >= count) break;
    const State normal = Number<Element>::decode(h.of[e]) / root * fn::element<State>(weight.of, e);
    out.of[e] = Number<Finished>::encode(fn::number<typename Number<Finished>::Value>(normal));
  }
  store_run(norm.output + (row * norm.hidden + at) * sizeof(Finished), out, count);
}

}  // namespace mpicomm
