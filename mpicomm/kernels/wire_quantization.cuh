// Quantization for the wire: floats become fp8 or int8 with a scale for each block. The compiler gets
// MPICOMM_WIRE, the quantized type: float8_e4m3fn or int8. The host's copy of this arithmetic is
// collectives/wire.py, with the same bits; a test compares them.
//
// A block has 128 elements. Its scale is a power of two, the least with which no element of the
// block exceeds the largest quantized value. So the products with scales are exact. Only the
// quantized values round: to nearest, ties to even. A block with a NaN or an infinity has the scale
// NaN, and dequantizes to NaNs.
//
// A thread quantizes a part of a block: 16 elements, which become the 16 bytes of one packet. The 8
// threads of a block are neighbours in a warp, and a warp has 4 blocks. In each line of 128 bytes of
// the block, a thread has 16 bytes. So the threads of a warp access whole lines.
//
// On the wire a scale is a byte, its exponent with the bias of a float. It is never 0. No quantized
// byte is 0xFF, so no word of a packet looks like an empty slot (packet_protocols.cuh).
#pragma once

#include "reduce_packets.cuh"

namespace mpicomm {

// The host's copies of these constants are in collectives/wire.py and arguments.py of packets; a test
// compares them.
constexpr u32 kBlockElements = 128;
constexpr u32 kPartElements = 16;
constexpr u32 kThreadsOfBlock = kBlockElements / kPartElements;
constexpr u32 kBlockNbytes = kBlockElements * sizeof(Element);
constexpr u32 kNotFinite = 255;  // the scale of a block with a NaN or an infinity

// Returns a * b + c. The product is exact, so one rounding and two give the same bits.
MPICOMM_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDACC__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// Returns four of the bytes of `low` (0 to 3) and `high` (4 to 7): each digit of `which` names a
// byte, the lowest digit the lowest byte.
MPICOMM_DEVICE u32 byte_permute(u32 low, u32 high, u32 which) {
#if defined(__CUDACC__)
  return __byte_perm(low, high, which);
#else
  const u64 both = static_cast<u64>(high) << 32 | low;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) result |= static_cast<u32>(both >> (which >> i * 4 & 7) * 8 & 0xFF) << i * 8;
  return result;
#endif
}

template <class T>
struct Quantizer;

template <>
struct Quantizer<dtype::float8_e4m3fn> {
  static constexpr u32 kLargest = 0x43E00000;  // 448, as a float

  // Returns four products with `inverse`, quantized, as a word. The products are at most `kLargest`.
  MPICOMM_DEVICE static u32 quantize(const float* values, float inverse) {
    const float a = values[0] * inverse, b = values[1] * inverse, c = values[2] * inverse, d = values[3] * inverse;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return static_cast<u32>(high) << 16 | low;
#else
    using T = dtype::float8_e4m3fn;
    return T::encode(a).bits | T::encode(b).bits << 8 | T::encode(c).bits << 16 |
           static_cast<u32>(T::encode(d).bits) << 24;
#endif
  }

  MPICOMM_DEVICE static void dequantize(u32 word, float (&to)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Exact: each value is a float16.
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      u32 both;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(static_cast<u16>(word >> half * 16)));
      asm("{ .reg .b16 low, high;\n"
          "  mov.b32 {low, high}, %2;\n"
          "  cvt.f32.f16 %0, low;\n"
          "  cvt.f32.f16 %1, high; }"
          : "=f"(to[half * 2]), "=f"(to[half * 2 + 1])
          : "r"(both));
    }
#else
#pragma unroll
    for (u32 i = 0; i < 4; ++i) to[i] = dtype::float8_e4m3fn{static_cast<u8>(word >> i * 8)}.decode();
#endif
  }
};

// Integers from -127 to 127, in two's complement, with seven bits flipped: so 0xFF would be -128.
template <>
struct Quantizer<dtype::int8> {
  static constexpr u32 kLargest = 0x42FE0000;  // 127, as a float
  static constexpr float kUnits = 12582912.0f;  // 1.5 * 2^23: the last bit of such a float stands for 1

  MPICOMM_DEVICE static u32 quantize(const float* values, float inverse) {
    // The addition rounds to nearest even, and leaves the integer in the low bits.
    u32 of[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) of[i] = bits_of(multiply_add(values[i], inverse, kUnits));
    return byte_permute(byte_permute(of[0], of[1], 0x0040), byte_permute(of[2], of[3], 0x0040), 0x5410) ^ 0x7F7F7F7Fu;
  }

  MPICOMM_DEVICE static void dequantize(u32 word, float (&to)[4]) {
    constexpr float kRaised = 8388736.0f;  // 2^23 + 128
    const u32 raised = ~word;              // each integer plus 128
#pragma unroll
    for (u32 i = 0; i < 4; ++i) to[i] = float_of(byte_permute(raised, 0x4B000000u, 0x7550 + i)) - kRaised;
  }
};

using WireType = Quantizer<dtype::MPICOMM_WIRE>;

// The values of a thread's part of a block.
struct Values {
  float of[kPartElements];
};

// Returns the scale for elements of at most the magnitude with these bits. A larger magnitude has no
// smaller scale.
MPICOMM_DEVICE u32 scale_for(u32 magnitude) {
  constexpr u32 kExponent = (WireType::kLargest >> 23) - 127, kMantissa = WireType::kLargest & 0x7FFFFF;
  if (magnitude >= 0x7F800000u) return kNotFinite;
  // A larger mantissa than the mantissa of the largest quantized value carries into the exponent.
  const i32 scale = static_cast<i32>((magnitude + (0x7FFFFF - kMantissa)) >> 23) - static_cast<i32>(kExponent);
  return scale < 1 ? 1 : static_cast<u32>(scale);
}

// Returns the larger of two magnitudes. As integers the bits of magnitudes have the order of the
// floats, and NaNs are the largest.
MPICOMM_DEVICE u32 larger(u32 one, u32 other) { return one < other ? other : one; }

MPICOMM_DEVICE float larger_magnitude(float one, float other) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(one)), "f"(fabsf(other)));
  return result;
#else
  return float_of(larger(bits_of(one) & 0x7FFFFFFFu, bits_of(other) & 0x7FFFFFFFu));
#endif
}

// Returns the bits of the largest magnitude. It compares in pairs, because a thread would wait for
// each step of a longer chain.
MPICOMM_DEVICE u32 magnitude_of(const Values& values) {
  const auto largest = [&](u32 e, u32 distance) { return larger_magnitude(values.of[e], values.of[e + distance]); };
  float four[4];
#pragma unroll
  for (u32 e = 0; e < 4; ++e) four[e] = larger_magnitude(largest(e, 4), largest(e + 8, 4));
  return bits_of(larger_magnitude(larger_magnitude(four[0], four[1]), larger_magnitude(four[2], four[3])));
}
static_assert(kPartElements == 16);

// Returns the larger of two numbers in each half of a word.
MPICOMM_DEVICE u32 larger_halves(u32 one, u32 other) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 both;
  asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(one), "r"(other));
  return both;
#else
  return larger(one >> 16, other >> 16) << 16 | larger(one & 0xFFFF, other & 0xFFFF);
#endif
}

// Makes the scales of this thread's parts the scales of their blocks. All threads of the warp call it
// together. One exchange of words serves two parts.
template <u32 parts>
MPICOMM_DEVICE void reduce_scales(u32 (&scales)[parts]) {
  static_assert(parts <= 2);
  u32 both = scales[0] | (parts > 1 ? scales[parts - 1] << 16 : 0);
#pragma unroll
  for (u32 distance = 1; distance < kThreadsOfBlock; distance *= 2) {
    both = larger_halves(both, __shfl_xor_sync(kWarp, both, static_cast<int>(distance)));
  }
  scales[0] = both & 0xFFFF;
  if constexpr (parts > 1) scales[1] = both >> 16;
}

// Returns a part of a block, quantized with this scale.
MPICOMM_DEVICE Packet quantize(const Values& values, u32 scale) {
  Packet quantized{};
  if (scale == kNotFinite) return quantized;
  const float inverse = float_of((254 - scale) << 23);
#pragma unroll
  for (u32 word = 0; word < 4; ++word) quantized.words[word] = WireType::quantize(values.of + word * 4, inverse);
  return quantized;
}

// Returns the factor of quantized values with this scale.
MPICOMM_DEVICE float factor_of(u32 scale) { return float_of(scale == kNotFinite ? 0x7FC00000u : scale << 23); }

MPICOMM_DEVICE Values dequantize(const Packet& quantized, u32 scale) {
  const float factor = factor_of(scale);
  Values values;
#pragma unroll
  for (u32 word = 0; word < 4; ++word) {
    float four[4];
    WireType::dequantize(quantized.words[word], four);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) values.of[word * 4 + i] = four[i] * factor;
  }
  return values;
}

// Adds a contribution.
MPICOMM_DEVICE void add(Values& sum, const Packet& quantized, u32 scale) {
  const float factor = factor_of(scale);
#pragma unroll
  for (u32 word = 0; word < 4; ++word) {
    float four[4];
    WireType::dequantize(quantized.words[word], four);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sum.of[word * 4 + i] = multiply_add(four[i], factor, sum.of[word * 4 + i]);
  }
}

// The elements of a part in memory, by the lines of its block.
struct Part {
  Packet packets[sizeof(Element)];
};

MPICOMM_DEVICE Values values_of(const Part& part) {
  Values values;
#pragma unroll
  for (u32 line = 0; line < sizeof(Element); ++line) {
    const auto elements = __builtin_bit_cast(Elements, part.packets[line]);
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) {
      values.of[line * kElements + e] = Number<Element>::decode(elements.of[e]);
    }
  }
  return values;
}

// Returns the bits of the largest magnitude of the elements of a part, as a float.
template <class T>
MPICOMM_DEVICE u32 magnitude_of(const Part& part) {
  if constexpr (sizeof(T) == 4) return magnitude_of(values_of(part));
  else {
    u32 largest[4];  // of two magnitudes
#pragma unroll
    for (u32 word = 0; word < 4; ++word) {
      largest[word] = part.packets[0].words[word] & 0x7FFF7FFFu;
#pragma unroll
      for (u32 line = 1; line < sizeof(T); ++line) {
        largest[word] = larger_halves(largest[word], part.packets[line].words[word] & 0x7FFF7FFFu);
      }
    }
    const u32 both = larger_halves(larger_halves(largest[0], largest[1]), larger_halves(largest[2], largest[3]));
    return bits_of(T{static_cast<u16>(larger(both >> 16, both & 0xFFFF))}.decode());
  }
}

MPICOMM_DEVICE Packet quantize(const Part& part, u32 scale) { return quantize(values_of(part), scale); }
MPICOMM_DEVICE u32 scale_for(const Part& part) { return scale_for(magnitude_of<Element>(part)); }
MPICOMM_DEVICE u32 scale_for(const Values& values) { return scale_for(magnitude_of(values)); }

template <class T>
constexpr bool kIsBfloat16 = false;
template <>
constexpr bool kIsBfloat16<dtype::bfloat16> = true;

// Returns two elements of 16 bits as a word.
template <class T>
MPICOMM_DEVICE u32 pack_two(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (kIsBfloat16<T>) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
#endif
  return static_cast<u32>(Number<T>::encode(high).bits) << 16 | Number<T>::encode(low).bits;
}

// Returns the part of a line, from the first of its values.
template <class T>
MPICOMM_DEVICE Packet packet_of(const float* values) {
  Packet packet;
#pragma unroll
  for (u32 word = 0; word < 4; ++word) {
    if constexpr (sizeof(T) == 4) packet.words[word] = bits_of(values[word]);
    else packet.words[word] = pack_two<T>(values[word * 2], values[word * 2 + 1]);
  }
  return packet;
}

MPICOMM_DEVICE Part part_of(const Values& values) {
  Part part;
#pragma unroll
  for (u32 line = 0; line < sizeof(Element); ++line) {
    part.packets[line] = packet_of<Element>(values.of + line * kElements);
  }
  return part;
}

}  // namespace mpicomm
