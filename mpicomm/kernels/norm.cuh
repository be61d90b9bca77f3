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
// With MPICOMM_QUANTIZED the results are `out * scale`, quantized (block_scaled.cuh).
//
// kNormThreads threads take a row together. Thread t adds the numbers of packets t, t + kNormThreads
// and so on, one element after the other. Then they add the sums of all threads by halves. So the
// order does not depend on the kernel, on the device, or on the addresses of the arrays.
#pragma once

#include "expressions.cuh"
#include "reduce_packets.cuh"
#include "runs.cuh"
#if defined(MPICOMM_QUANTIZED)
#include "block_scaled.cuh"
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
#if defined(MPICOMM_QUANTIZED)
constexpr bool kQuantizes = true;
#else
constexpr bool kQuantizes = false;
constexpr bool kScales = false;
constexpr u32 kGroup = 1;
#endif

// Whether all arrays lie at multiples of 16 bytes, and rows are whole packets. Then the kernel has no
// code for other arrays. It is shorter by a seventh, and the GPU fetches it sooner.
#if defined(MPICOMM_ALIGNED)
constexpr bool kAligned = true;
#else
constexpr bool kAligned = false;
#endif

using Finished = dtype::MPICOMM_RESULT;
using Weight = dtype::MPICOMM_WEIGHT;
using State = typename Number<Element>::Value;

constexpr bool kScaledGroups = kScales && kGroup > 0;
constexpr bool kScaledRows = kScales && kGroup == 0;

// The values that the threads of a row exchange through shared memory. Each thread stores its sum, and its
// sum of squares if the row is centred. Each warp stores its largest magnitude. Two rows use the sums in turns.
struct Sums {
  State of[2][kNormThreads];
  State squares[kCentred ? kNormThreads : 1];
  u32 peaks[kScaledRows ? kNormThreads / kLanes : 1];
};

// Loads and stores the first `count` elements of a run: all or none, if the arrays are aligned.
template <class T>
MPICOMM_DEVICE Run<T, kElements> load_elements(const u8* array, u64 at, u64 count) {
  const u8* const from = array + at * sizeof(T);
  if constexpr (kAligned) return *reinterpret_cast<const Run<T, kElements>*>(from);
  else return load_run<T, kElements>(from, count);
}
template <class T, u32 n>
MPICOMM_DEVICE void store_elements(u8* to, const Run<T, n>& run, u64 count) {
  if constexpr (!kAligned) store_run(to, run, count);
  else if (count > 0) *reinterpret_cast<Run<T, n>*>(to) = run;
}

// Returns h for a packet of values at element `at` of a row.
MPICOMM_DEVICE Packet with_residual(
    [[maybe_unused]] const Norm& norm,
    [[maybe_unused]] u64 at,
    [[maybe_unused]] u64 count,
    const Packet& reduced,
    const Packet& old) {
  const auto values = __builtin_bit_cast(Elements, reduced), residual = __builtin_bit_cast(Elements, old);
  Elements h;
#if defined(MPICOMM_LINEAR_BIAS)
  const auto bias = load_elements<Element>(norm.linear_bias, at, count);
#endif
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    State value = Number<Element>::decode(values.of[e]);
#if defined(MPICOMM_LINEAR_BIAS)
    value += Number<Element>::decode(bias.of[e]);
#endif
    h.of[e] = Number<Element>::encode(value + Number<Element>::decode(residual.of[e]));
  }
  return __builtin_bit_cast(Packet, h);
}

// Returns `sum` with the squares of the first `count` elements of a packet, less `mean`.
MPICOMM_DEVICE State with_squares(State sum, const Packet& packet, u64 count, State mean = 0) {
  const auto h = __builtin_bit_cast(Elements, packet);
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
MPICOMM_DEVICE State with_summands(State sum, const Packet& packet, u64 count) {
  if constexpr (kCentred) {
    const auto h = __builtin_bit_cast(Elements, packet);
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) {
      if (e < count) sum += Number<Element>::decode(h.of[e]);
    }
    return sum;
  } else {
    return with_squares(sum, packet, count);
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
MPICOMM_DEVICE bool row_barrier(u32 barrier, bool ok) { return named_barrier(barrier, kNormThreads, ok); }

// Returns the sum of the sums of all threads. All threads of the warp call it together.
MPICOMM_DEVICE State total_of(const State* all, u32 thread) {
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

// The numbers of a row by which its elements become normal. They travel in a packet.
template <class T>
struct StatisticsOf {
  T mean = 0;         // only if the row is centred
  T scale = 1;        // 1 / the root of the mean of the squares, with eps
  u32 peak = 0;       // the bits of the largest magnitude, if the row has one scale
  float inverse = 1;  // of that scale
};
template <>
struct StatisticsOf<double> {
  double mean = 0, scale = 1;
  static constexpr float inverse = 1;  // only sums of up to 32 bits are quantized
};
using Statistics = StatisticsOf<State>;
static_assert(sizeof(Statistics) == kPacketNbytes);

// The weights for the first `count` elements of a packet at element `at` of each row.
struct Weights {
  Run<Weight, kElements> weight{};
  Run<Weight, kElements> bias{};
  float factor = 1;  // of the results before they are quantized

  MPICOMM_DEVICE Weights(const Norm& norm, u64 at, u64 count) {
    if constexpr (kQuantizes) factor = norm.scale_at != nullptr ? *norm.scale_at : static_cast<float>(norm.scale);
    if (count == 0) return;
    weight = load_elements<Weight>(norm.weight, at, count);
    if constexpr (kBias) bias = load_elements<Weight>(norm.bias, at, count);
  }
};

// The results for the first `count` elements of a packet of h. The others are 0.
struct Normals {
  State of[kElements];

  MPICOMM_DEVICE Normals(const Weights& weights, const Packet& packet, u64 count, const Statistics& row) {
    const auto h = __builtin_bit_cast(Elements, packet);
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) {
      of[e] = 0;
      if (e >= count) continue;
      State value = Number<Element>::decode(h.of[e]);
      if constexpr (kCentred) value -= row.mean;
      value = value * row.scale * fn::element<State>(weights.weight.of, e);
      if constexpr (kBias) value += fn::element<State>(weights.bias.of, e);
      if constexpr (kQuantizes) value *= weights.factor;
      of[e] = value;
    }
  }
};

#if defined(MPICOMM_QUANTIZED)
// Quantizes and stores the first `count` values of a packet at element `at` of row `row`. All threads of
// the warp call it together if groups have scales.
MPICOMM_DEVICE void store_quantized(
    const Norm& norm, u64 row, u64 at, const Normals& normals, u64 count, float inverse) {
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
  Run<u8, kElements / kQuantizedOfByte> out{};
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    const u32 bits = quantized_bits(normals.of[e] * inverse);
    out.of[e / kQuantizedOfByte] |= static_cast<u8>(bits << e % kQuantizedOfByte * 4);
  }
  store_elements(norm.output + (row * norm.hidden + at) / kQuantizedOfByte, out, count / kQuantizedOfByte);
}
#endif

// Stores the result for the first `count` elements of a packet of h, which begins at element `at`
// of row `row`.
MPICOMM_DEVICE void store_normal(
    const Norm& norm,
    u64 row,
    u64 at,
    const Weights& weights,
    const Packet& h,
    u64 count,
    const Statistics& statistics) {
  const Normals normals(weights, h, count, statistics);
#if defined(MPICOMM_QUANTIZED)
  store_quantized(norm, row, at, normals, count, statistics.inverse);
#else
  Run<Finished, kElements> out{};
#pragma unroll
  for (u32 e = 0; e < kElements; ++e) {
    if (e >= count) break;
    out.of[e] = fn::rounded<Finished>(normals.of[e]);
  }
  store_elements(norm.output + (row * norm.hidden + at) * sizeof(Finished), out, count);
#endif
}

// Stores the scale of row `row`, if it has one. One thread of the row calls it.
MPICOMM_DEVICE void store_scale(
    [[maybe_unused]] const Norm& norm, [[maybe_unused]] u64 row, [[maybe_unused]] const Statistics& of) {
#if defined(MPICOMM_SCALES)
  if constexpr (kScaledRows) {
    const Scale scale = Scale::of(of.peak);
    reinterpret_cast<decltype(scale.stored)*>(norm.scales)[scale_index(row, 0, 1, norm.tiles)] = scale.stored;
  }
#endif
}

// Returns the statistics of a row, after its threads have met at its end. `total` is the sum of their
// sums. `for_each` calls a function for each packet that this thread has: with the packet's first
// element, the packet of h, and the number of its elements. All threads of a warp make equally many
// calls, some of them for no elements. A thread calls `for_each` in all passes with the same packets.
//
// A slow thread may still read the sums of squares and the magnitudes after the others. Another thread
// stores the next ones after the barrier of the next row, which the slow thread has to reach first.
template <class ForEach>
MPICOMM_DEVICE Statistics statistics_of(
    const Norm& norm,
    [[maybe_unused]] Sums& sums,
    State total,
    [[maybe_unused]] u32 thread,
    [[maybe_unused]] u32 barrier,
    [[maybe_unused]] const ForEach& for_each) {
  const State hidden = static_cast<State>(norm.hidden), eps = static_cast<State>(norm.eps);
  const State mean = total / hidden;
  Statistics of;
  if constexpr (kCentred) {
    of.mean = mean;
    State sum = 0;
    for_each([&](u64, const Packet& h, u64 count) { sum = with_squares(sum, h, count, mean); });
    sums.squares[thread] = sum;
    // Publishes the sums of all threads, as in `row_barrier`.
    named_barrier(barrier, kNormThreads, true);
    of.scale = 1 / fn::sqrt(total_of(sums.squares, thread) / hidden + eps);
  } else {
    of.scale = 1 / fn::sqrt(mean + eps);
  }
#if defined(MPICOMM_SCALES)
  if constexpr (kScaledRows) {
    u32 peak = 0;
    for_each([&](u64 at, const Packet& h, u64 count) {
      peak = with_magnitudes(peak, Normals(Weights(norm, at, count), h, count, of).of);
    });
    peak = peak_of_lanes(peak, kLanes);
    if (thread % kLanes == 0) sums.peaks[thread / kLanes] = peak;
    // Publishes the magnitudes of all warps. Without it a thread would take a smaller scale.
    named_barrier(barrier, kNormThreads, true);
#pragma unroll
    for (u32 warp = 0; warp < kNormThreads / kLanes; ++warp) peak = larger_magnitude(peak, sums.peaks[warp]);
    of.peak = peak, of.inverse = inverse_of(Scale::of(peak));
  }
#endif
  return of;
}

// Normalises row `row`. `for_each` is as above.
template <class ForEach>
MPICOMM_DEVICE void normalise_row(
    const Norm& norm, u64 row, const Statistics& statistics, u32 thread, const ForEach& for_each) {
  if (thread == 0) store_scale(norm, row, statistics);
  for_each([&](u64 at, const Packet& h, u64 count) {
    if (!kScaledGroups && count == 0) return;
    store_normal(norm, row, at, Weights(norm, at, count), h, count, statistics);
  });
}

}  // namespace mpicomm
