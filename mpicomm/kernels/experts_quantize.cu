// Quantizes tokens for a dispatch: each group of 128 elements becomes fp8 values and a scale. The largest
// magnitude of a group becomes the largest fp8 value. An element is about its fp8 value, multiplied by
// the scale.
//
// Half a warp computes a group. No other thread touches the group's memory, so the kernel needs no flags.

#include "bytes.cuh"
#include "element.cuh"

namespace mpicomm {

// The host's copies of these constants and of Quantize are in experts.py; a test compares them.
constexpr u32 kGroup = 128;
constexpr u32 kLanesOfAGroup = 16;
constexpr u32 kQuantizeThreads = 384;
constexpr u32 kOfALane = kGroup / kLanesOfAGroup;
constexpr float kLargest = 448;        // of float8_e4m3fn
constexpr float kLeastLargest = 1e-4f;  // groups of smaller elements have the scale of this magnitude

struct Quantize {
  const u8* x;
  u8* values;
  float* scales;
  u64 groups;
};

struct alignas(16) Given {
  Element of[kOfALane];
};
struct alignas(8) Quantized {
  dtype::float8_e4m3fn of[kOfALane];
};

MPICOMM_DEVICE void quantize(const Quantize& x) {
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u32 lane = threadIdx.x % kLanesOfAGroup;
  const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x / kLanesOfAGroup;
  const u64 rounds = (x.groups + stride - 1) / stride;
  u64 group = thread / kLanesOfAGroup;
  // All lanes of a warp make all rounds, because they shuffle together.
  for (u64 round = 0; round < rounds; ++round, group += stride) {
    const bool has = group < x.groups;
    float values[kOfALane];
    float largest = kLeastLargest;
    Given given{};
    if (has) given = reinterpret_cast<const Given*>(x.x)[group * kLanesOfAGroup + lane];
#pragma unroll
    for (u32 i = 0; i < kOfALane; ++i) {
      values[i] = Number<Element>::decode(given.of[i]);
      const float magnitude = float_of(bits_of(values[i]) & 0x7FFFFFFFu);
      largest = magnitude > largest ? magnitude : largest;
    }
    for (u32 lanes = 1; lanes < kLanesOfAGroup; lanes *= 2) {
      const float other = __shfl_xor_sync(kWarp, largest, lanes);
      largest = other > largest ? other : largest;
    }
    const float factor = kLargest / largest;
    Quantized quantized;
#pragma unroll
    for (u32 i = 0; i < kOfALane; ++i) quantized.of[i] = dtype::float8_e4m3fn::encode(values[i] * factor);
    if (!has) continue;
    reinterpret_cast<Quantized*>(x.values)[group * kLanesOfAGroup + lane] = quantized;
    if (lane == 0) x.scales[group] = largest / kLargest;
  }
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kQuantizeThreads)
    mpicomm_experts_quantize(const __grid_constant__ mpicomm::Quantize);

MPICOMM_KERNEL void mpicomm_experts_quantize(const __grid_constant__ mpicomm::Quantize x) { mpicomm::quantize(x); }
