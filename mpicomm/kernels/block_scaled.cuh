// Block-scaled rows: floats become fp8 or fp4, with saturation, and groups of them have scales. The
// compiler gets MPICOMM_QUANTIZED, the quantized type. It gets MPICOMM_SCALES, the type of the scales,
// and MPICOMM_GROUP, the elements of a group, if each group has a scale. A group of 0 elements is a row.
// The host's copy of this arithmetic is epilogues/block_scaled.py, with the same bits.
//
//     scale = largest magnitude of the group / largest quantized value    rounded to the type of scales
//     quantized = value * (1 / scale)                                     rounded to nearest, ties to even
//
// A scale float8_e8m0fnu is a power of two, and rounds up. So no value saturates with it. The other
// scales round to nearest. The scale of a group with a NaN or an infinity is NaN.
#pragma once

#include "numbers.cuh"

namespace mpicomm {

namespace dtype {
// Two of them lie in a byte, the first in the lower half.
struct float4_e2m1fn {
  u32 bits;

  // Rounds to nearest, ties to even. NaN becomes 0.
  MPICOMM_DEVICE static float4_e2m1fn encode(float value) {
    const float magnitude = float_of(bits_of(value) & 0x7FFFFFFFu);
    // The bounds between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A magnitude with an even number
    // takes both of its bounds.
    const u32 number = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                     (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
    return {bits_of(value) >> 31 << 3 | number};
  }
};
}  // namespace dtype

template <class T>
constexpr float kLargestOf = 6;
template <>
constexpr float kLargestOf<dtype::float8_e4m3fn> = 448;
template <>
constexpr float kLargestOf<dtype::float8_e5m2> = 57344;

using Quantized = dtype::MPICOMM_QUANTIZED;
constexpr float kLargestQuantized = kLargestOf<Quantized>;
constexpr u32 kQuantizedOfByte = sizeof(Quantized) == 1 ? 1 : 2;

MPICOMM_DEVICE float saturated(float value, float largest) {
  return value > largest ? largest : value < -largest ? -largest : value;  // NaN stays NaN
}
MPICOMM_DEVICE u32 quantized_bits(float value) { return Quantized::encode(saturated(value, kLargestQuantized)).bits; }

#if defined(MPICOMM_SCALES)
constexpr bool kScales = true;
constexpr u32 kGroup = MPICOMM_GROUP;

constexpr u32 kInfinity = 0x7F800000, kNaN = 0x7FC00000;

// `of` returns the scale for the largest magnitude, which has the bits `peak`.
namespace scale {
struct float32 {
  float stored;
  MPICOMM_DEVICE static float32 of(u32 peak) {
    constexpr float kLeast = 1.17549435e-38f;  // 2^-126: so the inverse is finite
    if (peak >= kInfinity) return {float_of(kNaN)};
    const float quotient = float_of(peak) / kLargestQuantized;
    return {quotient < kLeast ? kLeast : quotient};
  }
  MPICOMM_DEVICE float value() const { return stored; }
};

struct float8_e8m0fnu {
  u8 stored;  // an exponent with the bias of a float, at least 1; 255 is NaN
  MPICOMM_DEVICE static float8_e8m0fnu of(u32 peak) {
    if (peak >= kInfinity) return {255};
    const u32 largest = bits_of(kLargestQuantized);
    // A larger mantissa than the mantissa of the largest quantized value carries into the exponent.
    const u32 carried = (peak + (0x7FFFFF - (largest & 0x7FFFFF))) >> 23, exponent = (largest >> 23) - 127;
    return {static_cast<u8>(carried > exponent ? carried - exponent : 1)};
  }
  MPICOMM_DEVICE float value() const { return float_of(stored == 255 ? kNaN : static_cast<u32>(stored) << 23); }
};

struct float8_e4m3fn {
  dtype::float8_e4m3fn stored;
  MPICOMM_DEVICE static float8_e4m3fn of(u32 peak) {
    if (peak >= kInfinity) return {dtype::float8_e4m3fn::encode(float_of(kNaN))};
    return {dtype::float8_e4m3fn::encode(saturated(float_of(peak) / kLargestQuantized, 448))};
  }
  MPICOMM_DEVICE float value() const { return stored.decode(); }
};
}  // namespace scale

using Scale = scale::MPICOMM_SCALES;

// The factor of the values of a group. If the scale of a group has become 0, its quantized values are 0.
MPICOMM_DEVICE float inverse_of(const Scale& scale) {
  const float value = scale.value();
  return value == 0 ? 0 : 1 / value;
}

// Returns the larger of two magnitudes. As integers the bits of magnitudes have the order of the
// floats, and NaNs are the largest.
MPICOMM_DEVICE u32 larger_magnitude(u32 one, u32 other) { return one < other ? other : one; }

template <u32 n>
MPICOMM_DEVICE u32 with_magnitudes(u32 peak, const float (&values)[n]) {
#pragma unroll
  for (u32 e = 0; e < n; ++e) peak = larger_magnitude(peak, bits_of(values[e]) & 0x7FFFFFFFu);
  return peak;
}

// Returns the largest magnitude of `lanes` neighbouring lanes. All threads of the warp call it
// together.
MPICOMM_DEVICE u32 peak_of_lanes(u32 peak, u32 lanes) {
#pragma unroll
  for (u32 distance = 1; distance < lanes; distance *= 2) {
    peak = larger_magnitude(peak, __shfl_xor_sync(kWarp, peak, static_cast<int>(distance)));
  }
  return peak;
}

// The index of the scale of a group. `tiles` is 0 if the scales of a row lie side by side, and a row
// has `columns`. Otherwise the scales lie in tiles of 128 rows and 4 columns, and `tiles` of them lie
// side by side. Block-scaled products of cuBLAS take them so.
MPICOMM_DEVICE u64 scale_index(u64 row, u64 column, u64 columns, u64 tiles) {
  if (tiles == 0) return row * columns + column;
  return (row / 128 * tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}
#else
constexpr bool kScales = false;
constexpr u32 kGroup = 1;
#endif

}  // namespace mpicomm
