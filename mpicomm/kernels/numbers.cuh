// Number formats that neither C++ nor NVRTC knows without headers: float16, bfloat16 and the two
// float8 of ml_dtypes.
//
// Each conversion is integer arithmetic and at most one float operation, which is exact or rounds
// to nearest even. So a GPU and a CPU give the same bits, and a test on a CPU holds for both. For
// float16, and for bfloat16 from Ampere on, the GPU has instructions with the same result, except
// for the payload of a NaN. They keep the kernels of these types short.
#pragma once

#include "memory_order.cuh"

namespace mpicomm {

using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;

MPICOMM_DEVICE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
MPICOMM_DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

// A float that has, from the top, a sign bit, `exponent` bits and `mantissa` bits. `largest` is the
// largest finite magnitude. `overflow` is the result for a larger magnitude. `nan` is the NaN that
// `encode` writes. All three are without the sign.
template <class Bits, u32 exponent, u32 mantissa, u32 largest, u32 overflow, u32 nan>
struct Small {
  Bits bits;

  static constexpr u32 kBias = (1u << (exponent - 1)) - 1;
  static constexpr u32 kMagnitude = (1u << (exponent + mantissa)) - 1;
  static constexpr bool kIsHalf = exponent == 5 && mantissa == 10;
  static constexpr bool kIsBrain = exponent == 8 && mantissa == 7;

  // Exact: every value of the format is a float.
  MPICOMM_DEVICE float decode() const {
    if constexpr (exponent == 8) return float_of(static_cast<u32>(bits) << 16);  // the upper half of a float
#if defined(__CUDACC__)
    if constexpr (kIsHalf) {
      float value;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
      return value;
    }
#endif
    const u32 magnitude = bits & kMagnitude;
    // The fields stand at their places in a float. A float has a larger bias. The power of two
    // makes up for it, and normalises subnormal values. The product needs subnormal floats, so no
    // compiler option may flush them.
    float value = float_of(magnitude << (23 - mantissa)) * float_of((254 - kBias) << 23);
    if (magnitude > largest) {
      const bool infinite = overflow != nan && magnitude == overflow;
      value = float_of(infinite ? 0x7F800000u : 0x7FC00000u);
    }
    return float_of(bits_of(value) | (bits & (kMagnitude + 1)) << (31 - exponent - mantissa));
  }

  // Rounds to nearest, ties to even.
  MPICOMM_DEVICE static Small encode(float value) {
#if defined(__CUDACC__)
    if constexpr (kIsHalf) {
      Small half;
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
      return half;
    }
#endif
#if __CUDA_ARCH__ >= 800
    if constexpr (kIsBrain) {
      Small brain;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(brain.bits) : "f"(value));
      return brain;
    }
#endif
    const u32 magnitude = bits_of(value) & 0x7FFFFFFFu;
    const u32 sign = bits_of(value) >> 31 << (exponent + mantissa);
    u32 rounded;
    if (magnitude > 0x7F800000u) {
      rounded = nan;
    } else if (exponent < 8 && magnitude < (128 - kBias) << 23) {
      // The value is subnormal in this format. In the sum with this power of two, the lowest bit
      // stands for the smallest subnormal. So the addition rounds correctly, and leaves the result
      // in the low bits. This also holds for values that round up to the smallest normal number.
      const u32 power = (151 - kBias - mantissa) << 23;
      rounded = bits_of(float_of(magnitude) + float_of(power)) - power;
    } else {
      const u32 odd = magnitude >> (23 - mantissa) & 1;
      rounded = (magnitude - ((127 - kBias) << 23) + ((1u << (22 - mantissa)) - 1) + odd) >> (23 - mantissa);
      if (rounded > largest) rounded = overflow;
    }
    return {static_cast<Bits>(sign | rounded)};
  }
};

template <class Float>
struct Complex {
  Float real, imag;
};

// NumPy's bool: a byte; only zero is false.
struct Boolean {
  u8 byte;

  MPICOMM_DEVICE u8 decode() const { return byte != 0; }
  MPICOMM_DEVICE static Boolean encode(u8 value) { return {value}; }
};

// The names of NumPy and ml_dtypes. The host picks a type by its name.
namespace dtype {
using boolean = Boolean;
using int8 = i8;
using int16 = i16;
using int32 = i32;
using int64 = i64;
using uint8 = u8;
using uint16 = u16;
using uint32 = u32;
using uint64 = u64;
using float16 = Small<u16, 5, 10, 0x7BFF, 0x7C00, 0x7E00>;
using bfloat16 = Small<u16, 8, 7, 0x7F7F, 0x7F80, 0x7FC0>;
using float8_e5m2 = Small<u8, 5, 2, 0x7B, 0x7C, 0x7E>;
using float8_e4m3fn = Small<u8, 4, 3, 0x7E, 0x7F, 0x7F>;  // it has no infinities, so overflow gives NaN
using float32 = float;
using float64 = double;
using complex64 = Complex<float>;
using complex128 = Complex<double>;
}  // namespace dtype

// `Value` is the type in which reductions of T compute. `decode` converts to `Value`, and `encode`
// converts back.
template <class T>
struct Number {
  using Value = T;
  MPICOMM_DEVICE static T decode(T x) { return x; }
  MPICOMM_DEVICE static T encode(T x) { return x; }
};
template <class Bits, u32... format>
struct Number<Small<Bits, format...>> {
  using Value = float;
  MPICOMM_DEVICE static float decode(Small<Bits, format...> x) { return x.decode(); }
  MPICOMM_DEVICE static Small<Bits, format...> encode(float x) { return Small<Bits, format...>::encode(x); }
};
template <>
struct Number<Boolean> {
  using Value = u8;
  MPICOMM_DEVICE static u8 decode(Boolean x) { return x.decode(); }
  MPICOMM_DEVICE static Boolean encode(u8 x) { return Boolean::encode(x); }
};

}  // namespace mpicomm
