// Every memory-ordering instruction of mpicomm, and the clock that bounds its spins. Nothing else in this package
// writes one, so this is the only file to read (or to port) when the question is who sees what, and when.
//
// Scope: all of it is at *system* scope, but for what says "device" or "in block". The other side is another GPU, another
// process on this GPU, or the host; gpu scope would let a flag stay in an L2 cache that a peer across the link does not
// look into.
//
// How a flag works, here and on the peer:
//
//     writer                                    reader
//     data = ...                                while (load_acquire(flag) < target) {}
//     __syncthreads() if others wrote data      __syncthreads() if others read data
//     store_release(flag, target)               ... = data
//
// The release is cumulative: it publishes what its thread wrote, and what that thread had seen written by others, be
// it through a barrier of the block or because an earlier kernel or copy of the same stream wrote it.
//
// nvcc and NVRTC get PTX; any other compiler gets the C++ atomics of the same meaning, so that the same kernels run on
// CPU threads, where tools can look for races.
#pragma once

#if defined(__CUDACC__)
#define MPICOMM_DEVICE __device__ __forceinline__
#define MPICOMM_DEVICE_CALL __device__ __noinline__
#define MPICOMM_KERNEL extern "C" __global__
#else
#include <atomic>
#include <chrono>
#define MPICOMM_DEVICE inline
#define MPICOMM_DEVICE_CALL inline
#define MPICOMM_KERNEL extern "C"
#endif

namespace mpicomm {

// Not <cstdint>: NVRTC has none of its own, and these kernels compile where no CUDA headers are installed.
using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "flags and records have fixed layouts");

struct alignas(16) Pair {
  u64 first, second;
};

constexpr u32 kLanes = 32;  // threads of a warp
constexpr u32 kWarp = ~0u;  // all of them
constexpr u64 kLineNbytes = 128;  // what different ranks or channels write never shares a line

#if defined(__CUDACC__)

// A "memory" clobber on each keeps the compiler from moving other accesses across; `volatile` keeps it from dropping
// or merging the access itself.

// Reads what follows in program order only after the flag. Pairs with a release of the same word.
MPICOMM_DEVICE u32 load_acquire(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE u64 load_acquire(const u64* p) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
// Of two words at once: what is said of either half holds of both, in no order between them.
MPICOMM_DEVICE Pair load_acquire(const Pair* p) {
  Pair value;
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.first), "=l"(value.second)
               : "l"(p)
               : "memory");
  return value;
}

// Publishes all that precedes it in program order with the flag. Pairs with an acquire of the same word.
MPICOMM_DEVICE void store_release(u32* p, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MPICOMM_DEVICE void store_release(u64* p, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// The same between the threads of one block.
MPICOMM_DEVICE u32 load_acquire_in_block(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.cta.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE void store_release_in_block(u32* p, u32 value) {
  asm volatile("st.release.cta.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Whole and fresh, but ordering nothing: for words whose reader needs no data beside them.
MPICOMM_DEVICE u32 load_relaxed(const u32* p) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE u64 load_relaxed(const u64* p) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE void store_relaxed(u32* p, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MPICOMM_DEVICE void store_relaxed(u64* p, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// As relaxed, in the form that also exists for vectors: packets that carry their own flag.
MPICOMM_DEVICE u32 load_volatile(const u8* p) {
  u32 value;
  asm volatile("ld.volatile.global.u8 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE u32 load_volatile(const u32* p) {
  u32 value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE u64 load_volatile(const u64* p) {
  u64 value;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE void store_volatile(u8* p, u32 value) {
  asm volatile("st.volatile.global.u8 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MPICOMM_DEVICE void store_volatile(u32* p, u32 value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MPICOMM_DEVICE void store_volatile(u64* p, u64 value) {
  asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Sixteen bytes at once. Each half is whole and fresh; nothing says that both halves of one store are seen together.
MPICOMM_DEVICE Pair load_volatile(const Pair* p) {
  Pair value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.first), "=l"(value.second) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE void store_volatile(Pair* p, const Pair& value) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(value.first), "l"(value.second) : "memory");
}

// Orders this thread's accesses before it against those after it, for every observer.
MPICOMM_DEVICE void fence_system() { __threadfence_system(); }
// The same for observers on this device, and for what they are told in turn.
MPICOMM_DEVICE void fence_device() { __threadfence(); }

// Programmatic dependent launch. A kernel that is launched that way may begin before the one ahead of it on its stream
// is over: it must not touch memory before `wait_for_predecessor`, which returns when all of that one is done and
// visible. From `let_successor_start` in all its blocks on, the next kernel may begin in that sense.
MPICOMM_DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
MPICOMM_DEVICE void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Leaves the multiprocessor to others for two microseconds.
MPICOMM_DEVICE void pause() { __nanosleep(2000); }

// Returns what the word held; the word is `value` afterwards if that was `expected`. Orders nothing.
MPICOMM_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(p), "r"(expected), "r"(value)
               : "memory");
  return before;
}

// Nanoseconds of a clock that all SMs share, in steps of up to a microsecond. Unlike clock64 it runs at one rate
// whatever the GPU's clocks do, and a thread keeps reading the same one.
MPICOMM_DEVICE u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

#else

// On a processor other threads have to get a turn where one waits: at each of these accesses, which also gives the most
// ways in which threads can follow each other.
#if !defined(MPICOMM_YIELD)
#define MPICOMM_YIELD() static_cast<void>(0)
#endif
template <class T>
MPICOMM_DEVICE T yield_and_load(const T* p, int order) {
  MPICOMM_YIELD();
  return __atomic_load_n(p, order);
}
template <class T>
MPICOMM_DEVICE void yield_and_store(T* p, T value, int order) {
  MPICOMM_YIELD();
  __atomic_store_n(p, value, order);
}

MPICOMM_DEVICE u32 load_acquire(const u32* p) { return yield_and_load(p, __ATOMIC_ACQUIRE); }
MPICOMM_DEVICE u64 load_acquire(const u64* p) { return yield_and_load(p, __ATOMIC_ACQUIRE); }
MPICOMM_DEVICE Pair load_acquire(const Pair* p) { return {load_acquire(&p->first), load_acquire(&p->second)}; }
MPICOMM_DEVICE void store_release(u32* p, u32 value) { yield_and_store(p, value, __ATOMIC_RELEASE); }
MPICOMM_DEVICE void store_release(u64* p, u64 value) { yield_and_store(p, value, __ATOMIC_RELEASE); }
MPICOMM_DEVICE u32 load_acquire_in_block(const u32* p) { return load_acquire(p); }
MPICOMM_DEVICE void store_release_in_block(u32* p, u32 value) { store_release(p, value); }
MPICOMM_DEVICE u32 load_relaxed(const u32* p) { return yield_and_load(p, __ATOMIC_RELAXED); }
MPICOMM_DEVICE u64 load_relaxed(const u64* p) { return yield_and_load(p, __ATOMIC_RELAXED); }
MPICOMM_DEVICE void store_relaxed(u32* p, u32 value) { yield_and_store(p, value, __ATOMIC_RELAXED); }
MPICOMM_DEVICE void store_relaxed(u64* p, u64 value) { yield_and_store(p, value, __ATOMIC_RELAXED); }
MPICOMM_DEVICE u32 load_volatile(const u8* p) { return yield_and_load(p, __ATOMIC_RELAXED); }
MPICOMM_DEVICE u32 load_volatile(const u32* p) { return load_relaxed(p); }
MPICOMM_DEVICE u64 load_volatile(const u64* p) { return load_relaxed(p); }
MPICOMM_DEVICE void store_volatile(u8* p, u32 value) { yield_and_store(p, static_cast<u8>(value), __ATOMIC_RELAXED); }
MPICOMM_DEVICE void store_volatile(u32* p, u32 value) { store_relaxed(p, value); }
MPICOMM_DEVICE void store_volatile(u64* p, u64 value) { store_relaxed(p, value); }
MPICOMM_DEVICE Pair load_volatile(const Pair* p) { return {load_relaxed(&p->first), load_relaxed(&p->second)}; }
MPICOMM_DEVICE void store_volatile(Pair* p, const Pair& value) {
  store_relaxed(&p->first, value.first);
  store_relaxed(&p->second, value.second);
}
MPICOMM_DEVICE void fence_device() { std::atomic_thread_fence(std::memory_order_seq_cst); }
MPICOMM_DEVICE void pause() {}
MPICOMM_DEVICE void wait_for_predecessor() {}
MPICOMM_DEVICE void let_successor_start() {}
MPICOMM_DEVICE void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
MPICOMM_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 value) {
  MPICOMM_YIELD();
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
MPICOMM_DEVICE u64 clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

#endif

// Orders what a rank puts back in its slots, or has seen put back there, before what it tells those who write there next.
// In its own memory the scope of the device is enough, as all stores to a slot come to be ordered in that one place. To
// memory of the host its stores go by another way than those of the peers: it has to wait until they are there.
MPICOMM_DEVICE void fence_slots() {
#if defined(MPICOMM_HOST_SLOTS)
  fence_system();
#else
  fence_device();
#endif
}

}  // namespace mpicomm
