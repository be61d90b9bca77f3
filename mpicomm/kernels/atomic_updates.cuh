// Updates of single elements, each atomic against all other updates of the element. They have system
// scope, because any rank may update the element, and order nothing (memory_order.cuh has the
// accesses that do).

#pragma once

#include "memory_order.cuh"

namespace mpicomm {

#if defined(__CUDACC__)

// As compare_and_swap of memory_order.cuh, for sixteen bytes. Only sm_90 and newer have the
// instruction, and the host asks no other GPU for it.
MPICOMM_DEVICE Pair compare_and_swap(Pair* p, const Pair& expected, const Pair& value) {
  Pair before{};
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b128 expected, value, before;\n"
      "  mov.b128 expected, {%3, %4};\n"
      "  mov.b128 value, {%5, %6};\n"
      "  atom.relaxed.sys.global.cas.b128 before, [%2], expected, value;\n"
      "  mov.b128 {%0, %1}, before; }"
      : "=l"(before.first), "=l"(before.second)
      : "l"(p), "l"(expected.first), "l"(expected.second), "l"(value.first), "l"(value.second)
      : "memory");
#endif
  return before;
}

// Adds to a word, and does not wait for its previous content.
MPICOMM_DEVICE void add_to(u32* p, u32 value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MPICOMM_DEVICE void add_to(u64* p, u64 value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
MPICOMM_DEVICE void add_to(float* p, float value) {
  asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(p), "f"(value) : "memory");
}
MPICOMM_DEVICE void add_to(double* p, double value) {
  asm volatile("red.relaxed.sys.global.add.f64 [%0], %1;" ::"l"(p), "d"(value) : "memory");
}

// Updates a word, and returns its previous content.
MPICOMM_DEVICE u32 fetch_add(u32* p, u32 value) { return atomicAdd_system(p, value); }
MPICOMM_DEVICE u64 fetch_add(u64* p, u64 value) { return atomicAdd_system(p, value); }
MPICOMM_DEVICE float fetch_add(float* p, float value) { return atomicAdd_system(p, value); }
MPICOMM_DEVICE double fetch_add(double* p, double value) { return atomicAdd_system(p, value); }
MPICOMM_DEVICE u32 fetch_and(u32* p, u32 value) { return atomicAnd_system(p, value); }
MPICOMM_DEVICE u64 fetch_and(u64* p, u64 value) { return atomicAnd_system(p, value); }
MPICOMM_DEVICE u32 fetch_or(u32* p, u32 value) { return atomicOr_system(p, value); }
MPICOMM_DEVICE u64 fetch_or(u64* p, u64 value) { return atomicOr_system(p, value); }
MPICOMM_DEVICE u32 fetch_xor(u32* p, u32 value) { return atomicXor_system(p, value); }
MPICOMM_DEVICE u64 fetch_xor(u64* p, u64 value) { return atomicXor_system(p, value); }

#else

// Sixteen bytes: tests on x86-64 are the only callers on a CPU.
#if defined(__x86_64__)
__attribute__((target("cx16"))) inline Pair compare_and_swap(Pair* p, const Pair& expected, const Pair& value) {
  MPICOMM_YIELD();
  using Whole = unsigned __int128;
  const Whole before = __sync_val_compare_and_swap(
      reinterpret_cast<Whole*>(p), __builtin_bit_cast(Whole, expected), __builtin_bit_cast(Whole, value));
  return __builtin_bit_cast(Pair, before);
}
#endif

template <class T>
MPICOMM_DEVICE T fetch_add(T* p, T value) {
  MPICOMM_YIELD();
  if constexpr (static_cast<T>(1) / 2 == 0) {
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
  } else {  // C++17 has no atomic addition of floats
    T before, sum;
    __atomic_load(p, &before, __ATOMIC_RELAXED);
    do sum = before + value;
    while (!__atomic_compare_exchange(p, &before, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
  }
}
template <class T>
MPICOMM_DEVICE void add_to(T* p, T value) {
  fetch_add(p, value);
}
template <class T>
MPICOMM_DEVICE T fetch_and(T* p, T value) {
  MPICOMM_YIELD();
  return __atomic_fetch_and(p, value, __ATOMIC_RELAXED);
}
template <class T>
MPICOMM_DEVICE T fetch_or(T* p, T value) {
  MPICOMM_YIELD();
  return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);
}
template <class T>
MPICOMM_DEVICE T fetch_xor(T* p, T value) {
  MPICOMM_YIELD();
  return __atomic_fetch_xor(p, value, __ATOMIC_RELAXED);
}

#endif

}  // namespace mpicomm
