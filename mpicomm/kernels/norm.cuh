// The norm of rows with a residual. packets.cu applies it to rows that it has just reduced, and
// norm.cu applies it to a stored result. Elements of MPICOMM_DTYPE become elements of
// MPICOMM_RESULT.
//
//     h = value + linear_bias + residual, rounded            the new residual
//     out = h * (1 / sqrt(mean of h * h + eps)) * weight     without MPICOMM_CENTRED
//     out = (h - mean) * (1 / sqrt(mean of (h - mean)^2 + eps)) * weight + bias
//
// One division serves a row, because a division takes many instructions.
//
// With MPICOMM_CODES the row becomes codes of `out * scale` (scaled_codes.cuh).
//
// kNormThreads threads take a row together. Thread t adds the numbers of packets t, t + kNormThreads
// and so on, one element after the other. Then they add the sums of all threads by halves. So the
// order does not depend on the kernel, on the device, or on the addresses of the arrays.
#pragma once

#include "expressions.cuh"
#include "reduce_packets.cuh"
#include "runs.cuh"
#if defined(MPICOMM_CODES)
#include "scaled_codes.cuh"
#endif

namespace mpicomm {

// The host's copies of this constant and of Norm are in epilogue.py; a test compares them.
constexpr u32 kNormThreads = 256;

struct Norm {
  u8* output;             // of MPICOMM_RESULT
  u8* residual;           // of MPICOMM_DTYPE
  const u8* weight;       // a row of MPICOMM_WEIGHT
  const u8* bias;         // a row of MPICOMM_WEIGHT, with MPICOMM_BIAS
  const u8* linear_bias;  // a row of MPICOMM_DTYPE, with MPICOMM_LINEAR_BIAS
  u8* scales;             // with MPICOMM_SCALES
  const float* scale_at;  // null if the scale is `scale`
  u64 rows;
  u64 rows_of_shard;  // the rows that each rank reduces, except the last ranks; all rows in one hop
  u64 hidden;         // elements of a row
  u64 tiles;          // of scales side by side: see `scale_index`
  double eps;
  double scale;
};

#if defined(MPICOMM_CENTRED)
constexpr bool kCentred = true;  // a layer norm
#else
constexpr bool kCentred = false;
#endif
#if defined(MPICOMM_BIAS)
constexpr bool kBias = true;
#else
constexpr bool kBias = false;
#endif
#if defined(MPICOMM_LINEAR_BIAS)
constexpr bool kLinearBias = true;
#else
constexpr bool kLinearBias = false;
#endif
#if defined(MPICOMM_CODES)
constexpr bool kCodes = true;
#else
constexpr bool kCodes = false;
constexpr bool kScales = false;
constexpr u32 kGroup = 1;
#endif

using Finished = dtype::MPICOMM_RESULT;
using Weight = dtype::MPICOMM_WEIGHT;
using State = typename Number<Element>::Value;

constexpr bool kScaledGroups = kScales && kGroup > 0;
constexpr bool kScaledRows = kScales && kGroup == 0;

// The rows that end together. Their loads are in flight at once. Rows with more work end one after the
// other, because a thread lacks the registers for several rows.
template <u32 shards>
constexpr u32 kTogether = kCentred || kCodes || shards > 4 ? 1 : shards;

// The sums of the threads of a row, or of rows of several shards, in shared memory. Two rows of a
// shard use them in turns.
template <u32 shards>
struct Sums {
  State of[2][shards][kNormThreads];
  // The sums of squares of a centred row, and the largest magnitudes of the warps of a row with one
  // scale. The rows of a group of threads use them in turns, whatever their shards.
  State squares[2][kCentred ? kNormThreads : 1];
  u32 peaks[2][kScaledRows ? kNormThreads / kLanes : 1];
};

// Returns h for a packet of values at element `at` of a row.
MPICOMM_DEVICE Elements with_residual(
    [[maybe_unused]] const Norm& norm,
    [[maybe_unused]] u64 at,
    [[maybe_unused]] u64 count,
    const Elements& values,
    const Elements& residual) {
  Elements h;
#if defined(MPICOMM_LINEAR_BIAS)
  const auto bias = load_run<Element, kElements>(norm.linear_bias + at * sizeof(Element), count);
#endif
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    State value = Number<Element>::decode(values.of[e]);
#if defined(MPICOMM_LINEAR_BIAS)
    value += Number<Element>::decode(bias.of[e]);
#endif
    h.of[e] = Number<Element>::encode(value + Number<Element>::decode(residual.of[e]));
  }
  return h;
}

// Returns `sum` with the squares of the first `count` elements of a packet, less `mean`.
MPICOMM_DEVICE State with_squares(State sum, const Elements& h, u64 count, State mean = 0) {
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    State each = Number<Element>::decode(h.of[e]);
    if constexpr (kCentred) each -= mean;
    if (e < count) sum += each * each;
  }
  return sum;
}

// Returns `sum` with the first `count` elements of a packet of h: their squares, or themselves if the
// row is centred.
MPICOMM_DEVICE State with_summands(State sum, const Elements& h, u64 count) {
  if constexpr (kCentred) {
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) {
      if (e < count) sum += Number<Element>::decode(h.of[e]);
    }
    return sum;
  } else {
    return with_squares(sum, h, count);
  }
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

// Returns the sum of the sums of all threads. All threads of the warp call it together.
MPICOMM_DEVICE State total_of(const State (&all)[kNormThreads], u32 thread) {
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
  return __shfl_sync(kWarp, total, 0);
}

// The numbers of a row by which its elements become normal.
struct Statistics {
  State mean = 0;     // only if the row is centred
  State scale = 1;    // 1 / the root of the mean of the squares, with eps
  float factor = 1;   // of the results before they become codes
  float inverse = 1;  // of the scale of the row
};

// The weights for the first `count` elements of a packet at element `at` of each row.
struct Weights {
  Run<Weight, kElements> weight{};
  Run<Weight, kElements> bias{};

  MPICOMM_DEVICE Weights(const Norm& norm, u64 at, u64 count) {
    if (count == 0) return;
    weight = load_run<Weight, kElements>(norm.weight + at * sizeof(Weight), count);
    if constexpr (kBias) bias = load_run<Weight, kElements>(norm.bias + at * sizeof(Weight), count);
  }
};

// The results for the first `count` elements of a packet of h. The others are 0.
struct Normals {
  State of[kElements];

  MPICOMM_DEVICE Normals(const Weights& weights, const Elements& h, u64 count, const Statistics& row) {
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) {
      of[e] = 0;
      if (e >= count) continue;
      State value = Number<Element>::decode(h.of[e]);
      if constexpr (kCentred) value -= row.mean;
      value = value * row.scale * fn::element<State>(weights.weight.of, e);
      if constexpr (kBias) value += fn::element<State>(weights.bias.of, e);
      if constexpr (kCodes) value *= row.factor;
      of[e] = value;
    }
  }
};

#if defined(MPICOMM_CODES)
// Stores the codes of the first `count` values of a packet at element `at` of row `row`. All threads
// of the warp call it together if groups have scales.
MPICOMM_DEVICE void store_codes(const Norm& norm, u64 row, u64 at, const Normals& normals, u64 count, float inverse) {
#if defined(MPICOMM_SCALES)
  if constexpr (kScaledGroups) {
    static_assert(kGroup % kElements == 0 && kGroup / kElements <= kLanes, "the lanes of a warp have whole groups");
    const Scale scale = Scale::of(peak_of_lanes(with_magnitudes(0, normals.of), kGroup / kElements));
    inverse = inverse_of(scale);
    if (count > 0 && at % kGroup == 0) {
      const u64 index = scale_index(row, at / kGroup, norm.hidden / kGroup, norm.tiles);
      reinterpret_cast<decltype(scale.stored)*>(norm.scales)[index] = scale.stored;
    }
  }
#endif
  Run<u8, kElements / kCodesOfByte> out{};
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    out.of[e / kCodesOfByte] |= static_cast<u8>(code_of(normals.of[e] * inverse) << e % kCodesOfByte * 4);
  }
  store_run(norm.output + (row * norm.hidden + at) / kCodesOfByte, out, count / kCodesOfByte);
}
#endif

// Stores the result for the first `count` elements of a packet of h, which begins at element `at`
// of row `row`.
MPICOMM_DEVICE void store_normal(
    const Norm& norm,
    u64 row,
    u64 at,
    const Weights& weights,
    const Elements& h,
    u64 count,
    const Statistics& statistics) {
  const Normals normals(weights, h, count, statistics);
#if defined(MPICOMM_CODES)
  store_codes(norm, row, at, normals, count, statistics.inverse);
#else
  Run<Finished, kElements> out{};
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    if (e >= count) break;
    out.of[e] = Number<Finished>::encode(fn::number<typename Number<Finished>::Value>(normals.of[e]));
  }
  store_run(norm.output + (row * norm.hidden + at) * sizeof(Finished), out, count);
#endif
}

// Returns the statistics of row `row`, after its threads have met at its end. `total` is the sum of
// their sums, and `place` is 0 and 1 in turns for the rows of these threads. `for_each` calls a
// function for each packet that this thread has: with the packet's first element, the packet of h in
// an array, and the number of its elements. All threads of a warp make equally many calls, some of
// them for no elements. A thread calls `for_each` in all passes with the same packets.
template <u32 shards, class ForEach>
MPICOMM_DEVICE Statistics statistics_of(
    const Norm& norm,
    [[maybe_unused]] Sums<shards>& sums,
    State total,
    [[maybe_unused]] u32 place,
    [[maybe_unused]] u32 thread,
    [[maybe_unused]] u32 barrier,
    [[maybe_unused]] u64 row,
    [[maybe_unused]] const ForEach& for_each) {
  const State hidden = static_cast<State>(norm.hidden), eps = static_cast<State>(norm.eps);
  Statistics of;
  of.mean = total / hidden;
  if constexpr (kCentred) {
    State sum = 0;
    for_each([&](u64, const Elements(&h)[1], u64 count) { sum = with_squares(sum, h[0], count, of.mean); });
    // Two rows that follow each other have a barrier in between: the barrier below, or the barrier of
    // `meet_at_end`. So a slow thread has read a place before another thread stores the next but one.
    auto& squares = sums.squares[place];
    squares[thread] = sum;
    // Publishes the sums of all threads, as in `meet_at_end`.
    meet(barrier, kNormThreads, true);
    if constexpr (kCentred) of.scale = 1 / fn::sqrt(total_of(squares, thread) / hidden + eps);
  } else {
    of.scale = 1 / fn::sqrt(of.mean + eps);
  }
#if defined(MPICOMM_CODES)
  of.factor = norm.scale_at != nullptr ? *norm.scale_at : static_cast<float>(norm.scale);
#endif
#if defined(MPICOMM_SCALES)
  if constexpr (kScaledRows) {
    u32 peak = 0;
    for_each([&](u64 at, const Elements(&h)[1], u64 count) {
      peak = with_magnitudes(peak, Normals(Weights(norm, at, count), h[0], count, of).of);
    });
    peak = peak_of_lanes(peak, kLanes);
    u32* const peaks = sums.peaks[place];
    if (thread % kLanes == 0) peaks[thread / kLanes] = peak;
    // Publishes the magnitudes of all warps. Without it a thread would take a smaller scale.
    meet(barrier, kNormThreads, true);
#pragma unroll
    for (u32 warp = 0; warp < kNormThreads / kLanes; ++warp) peak = larger_magnitude(peak, peaks[warp]);
    const Scale scale = Scale::of(peak);
    of.inverse = inverse_of(scale);
    if (thread == 0) {
      reinterpret_cast<decltype(scale.stored)*>(norm.scales)[scale_index(row, 0, 1, norm.tiles)] = scale.stored;
    }
  }
#endif
  return of;
}

// Normalises rows that end together. `present` of them exist. `for_each` is as above, and its arrays
// have a packet of each row.
template <u32 n, class ForEach>
MPICOMM_DEVICE void normalise_rows(
    const Norm& norm, const u64 (&rows)[n], u32 present, const Statistics (&of)[n], const ForEach& for_each) {
  for_each([&](u64 at, const Elements(&h)[n], u64 count) {
    if (!kScaledGroups && count == 0) return;
    const Weights weights(norm, at, count);
#pragma unroll
    for (u32 each = 0; each < n; ++each) {
      if (each < present) store_normal(norm, rows[each], at, weights, h[each], count, of[each]);
    }
  });
}

}  // namespace mpicomm
