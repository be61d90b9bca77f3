// The part of CUDA C++ that the kernels use, in C++17. It is included before a .cu file that g++ compiles.
//
// memory_order.cuh has the accesses that order memory, and calls MPICOMM_YIELD before each. A kernel that polls in
// another way has to call it, too, or the threads for which it waits never run.

#include <stdint.h>
#include <string.h>

// The result of compiling this file is loaded by every kernel: few headers keep that short.
#include <type_traits>
#include <utility>

#include "block.hpp"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// A block is a thread of the operating system, so shared memory belongs to that thread. As on a GPU, it is not cleared
// between kernels. `extern __shared__` is not supported.
#define __shared__ static thread_local

#define threadIdx (::cpu::place().thread)
#define blockIdx (::cpu::place().block)
#define blockDim (::cpu::place().threads)
#define gridDim (::cpu::place().blocks)
constexpr int warpSize = 32;

#define MPICOMM_YIELD() ::cpu::yield()
#define MPICOMM_CLOCK_NS() ::cpu::clock_ns()
#define MPICOMM_NAMED_BARRIER(number, threads, ok) ::cpu::meet_some(number, threads, ok)

using dim3 = cpu::Index;

// clang-format off
#define CPU_VECTOR(name, type, align)                                                \
  struct alignas(sizeof(type) * 2) name##2 { type x, y; };                           \
  struct alignas(align) name##4 { type x, y, z, w; };                                \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                   \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
// clang-format on
CPU_VECTOR(int, int, 16)
CPU_VECTOR(uint, unsigned, 16)
CPU_VECTOR(float, float, 16)
CPU_VECTOR(longlong, long long, 16)
CPU_VECTOR(ulonglong, unsigned long long, 16)
#undef CPU_VECTOR

// ---- barriers

inline void __syncthreads() { cpu::meet_block(false); }
inline int __syncthreads_count(int predicate) { return static_cast<int>(cpu::meet_block(predicate != 0).agreed); }
inline int __syncthreads_or(int predicate) { return cpu::meet_block(predicate != 0).agreed > 0; }
inline int __syncthreads_and(int predicate) {
  const cpu::Tally tally = cpu::meet_block(predicate != 0);
  return tally.agreed == tally.arrived;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cpu::meet_warp(mask & cpu::live_lanes()); }

// ---- exchanges within a warp, which order no memory

namespace cpu {

inline unsigned lane() { return place().thread.x % 32; }

// Returns the value of lane `from`. All lanes of the mask call it, each with a value.
template <class T>
T from_lane(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  unsigned long long word = 0;
  memcpy(&word, &value, sizeof(T));
  word = exchange(mask & live_lanes(), word).of[from];
  T result;
  memcpy(&result, &word, sizeof(T));
  return result;
}

// Returns the lane at `offset` from this one, or this lane if that one lies outside this lane's segment.
inline unsigned within(int offset, int width) {
  const int first = static_cast<int>(lane()) / width * width, target = static_cast<int>(lane()) + offset;
  return static_cast<unsigned>(target >= first && target < first + width ? target : static_cast<int>(lane()));
}

}  // namespace cpu

inline unsigned __activemask() { return cpu::live_lanes(); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return cpu::from_lane(mask, value, cpu::lane() / width * width + static_cast<unsigned>(lane) % width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const int other = static_cast<int>(cpu::lane()) ^ lanes;
  return cpu::from_lane(mask, value, cpu::within(other - static_cast<int>(cpu::lane()), width));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned offset, int width = 32) {
  return cpu::from_lane(mask, value, cpu::within(static_cast<int>(offset), width));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned offset, int width = 32) {
  return cpu::from_lane(mask, value, cpu::within(-static_cast<int>(offset), width));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cpu::exchange(mask & cpu::live_lanes(), predicate != 0).set;
}
// Returns the lanes of the mask whose values equal this lane's value.
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  mask &= cpu::live_lanes();
  const unsigned long long own = static_cast<unsigned long long>(value);
  const cpu::Words& words = cpu::exchange(mask, own);
  unsigned alike = 0;
  for (unsigned lane = 0; lane < 32; ++lane) alike |= static_cast<unsigned>(words.of[lane] == own) << lane;
  return alike & mask;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  mask &= cpu::live_lanes();
  return __ballot_sync(mask, predicate) == mask;
}

// ---- arithmetic, caches and time

template <class T>
constexpr T max(T a, T b) { return a < b ? b : a; }
template <class T>
constexpr T min(T a, T b) { return b < a ? b : a; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
void __stcs(T* p, T value) { *p = value; }
template <class T>
void __stcg(T* p, T value) { *p = value; }
inline void __nanosleep(unsigned) { cpu::yield(); }

// All of them are a fence between processes, which also orders within a block or a device. ThreadSanitizer knows no
// fences.
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

namespace cpu {
template <class T>
struct Same { using Type = T; };
// Only the pointer of an atomic determines T.
template <class T>
using Value = typename Same<T>::Type;
}  // namespace cpu

template <class T>
T atomicAdd(T* p, cpu::Value<T> value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
template <class T>
T atomicOr(T* p, cpu::Value<T> value) { return __atomic_fetch_or(p, value, __ATOMIC_RELAXED); }
template <class T>
T atomicExch(T* p, cpu::Value<T> value) { return __atomic_exchange_n(p, value, __ATOMIC_RELAXED); }
template <class T>
T atomicCAS(T* p, cpu::Value<T> expected, cpu::Value<T> value) {
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// Here a kernel that may begin early begins when the kernel before it is over.
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// ---- entries

namespace cpu {
template <class... P, size_t... number>
void call(void (*kernel)(P...), void* const* parameters, std::index_sequence<number...>) {
  kernel(*static_cast<std::remove_reference_t<P>*>(parameters[number])...);
}
template <class... P>
void call(void (*kernel)(P...), void* const* parameters) {
  call(kernel, parameters, std::index_sequence_for<P...>{});
}
}  // namespace cpu

// The function that the launcher calls. As cuLaunchKernel, it gets the addresses of the parameters. Without parameters
// it only creates the library's shared memory, which contains `touched`.
#define CPU_ENTRY(kernel)                                   \
  extern "C" void enter_##kernel(void* const* parameters) { \
    static thread_local volatile char touched;              \
    if (parameters) cpu::call(&kernel, parameters);         \
    else touched = 1;                                       \
  }
