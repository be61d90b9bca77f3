// All memory-ordering instructions of mpicomm, and the clock that bounds its spins. No other file
// of the package contains such an instruction. So this file says which thread sees which store, and
// when, and a port to other hardware begins here.
//
// Scope. Every access and fence has *system* scope, except functions with "device" or "in_block" in
// their name. The other side of a flag is another GPU, another process on this GPU, or the host.
// With gpu scope a flag could stay in an L2 cache that a peer across the link does not read.
//
// How a flag works, here and on the peer:
//
//     writer                                    reader
//     data = ...                                while (load_acquire(flag) < target) {}
//     __syncthreads() if others wrote data      __syncthreads() if others read data
//     store_release(flag, target)               ... = data
//
// The release is cumulative. It publishes the stores of its thread, and the stores of other threads
// that its thread has seen. This thread has seen a store of another thread if a barrier of the
// block lies between. It has also seen all stores of earlier kernels and copies of the same stream.
//
// nvcc and NVRTC compile PTX. Any other compiler compiles C++ atomics of the same meaning. So the
// same kernels run on CPU threads, and tools look for races there.
#pragma once

// MPICOMM_DEVICE_CALL is for functions that run rarely. They stay out of line because a kernel
// waits until the GPU has fetched even the code that the kernel jumps over.
#if defined(__CUDACC__)
#define MPICOMM_DEVICE __device__ __forceinline__
#define MPICOMM_DEVICE_CALL __device__ __noinline__
#define MPICOMM_KERNEL extern "C" __global__
#else
// The program that runs the threads may have a clock that stands still while a rank lacks a processor.
#if !defined(MPICOMM_CLOCK_NS)
#include <chrono>
#define MPICOMM_CLOCK_NS() std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count()
#endif
#define MPICOMM_DEVICE inline
#define MPICOMM_DEVICE_CALL inline
#define MPICOMM_KERNEL extern "C"
#endif

namespace mpicomm {

// Not <cstdint>: NVRTC brings no such header, and these kernels also compile on machines without
// CUDA headers.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "flags and records have fixed layouts");

struct alignas(16) Pair {
  u64 first, second;
};

constexpr u32 kLanes = 32;  // threads of a warp
constexpr u32 kWarp = ~0u;  // the mask of all lanes
constexpr u64 kLineNbytes = 128;  // a cache line: words that different ranks or channels write never share one

#if defined(__CUDACC__)

// The "memory" clobber keeps the compiler from moving other accesses across the instruction.
// `volatile` keeps the compiler from dropping or merging the access itself.

// Loads a flag before all accesses that follow in program order. It pairs with a release of the
// same word.
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
// Loads two words at once. Each word is an acquire as above, but no order holds between the two
// words: one of them may be older than the other.
MPICOMM_DEVICE Pair load_acquire(const Pair* p) {
  Pair value;
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.first), "=l"(value.second)
               : "l"(p)
               : "memory");
  return value;
}

// Publishes all accesses that precede it in program order together with the flag. It pairs with an
// acquire of the same word.
MPICOMM_DEVICE void store_release(u32* p, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MPICOMM_DEVICE void store_release(u64* p, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// The same acquire and release, between threads of one device.
MPICOMM_DEVICE u64 load_acquire_on_device(const u64* p) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE void store_release_on_device(u64* p, u64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// The same acquire and release, between threads of one block.
MPICOMM_DEVICE u32 load_acquire_in_block(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.cta.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE void store_release_in_block(u32* p, u32 value) {
  asm volatile("st.release.cta.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Relaxed accesses: the word is whole and fresh, but the access orders nothing. They serve words
// that publish no other data.
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

// Like the relaxed accesses, in the form that PTX also has for vectors. They serve packets, because
// a packet shows by its content whether it has come.
MPICOMM_DEVICE u32 load_volatile(const u8* p) {
  u32 value;
  asm volatile("ld.volatile.global.u8 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE u32 load_volatile(const u16* p) {
  u16 value;
  asm volatile("ld.volatile.global.u16 %0, [%1];" : "=h"(value) : "l"(p) : "memory");
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
MPICOMM_DEVICE void store_volatile(u16* p, u32 value) {
  asm volatile("st.volatile.global.u16 [%0], %1;" ::"l"(p), "h"(static_cast<u16>(value)) : "memory");
}
MPICOMM_DEVICE void store_volatile(u32* p, u32 value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
MPICOMM_DEVICE void store_volatile(u64* p, u64 value) {
  asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Accesses of sixteen bytes. Each half is whole and fresh, but a load may see one half of a store
// without the other half.
MPICOMM_DEVICE Pair load_volatile(const Pair* p) {
  Pair value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.first), "=l"(value.second) : "l"(p) : "memory");
  return value;
}
MPICOMM_DEVICE void store_volatile(Pair* p, const Pair& value) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(value.first), "l"(value.second) : "memory");
}

// Orders the accesses of this thread before the fence against its accesses after the fence, for
// every observer.
MPICOMM_DEVICE void fence_system() { __threadfence_system(); }
// The same for observers on this device, and for the observers that those observers inform in turn.
MPICOMM_DEVICE void fence_device() { __threadfence(); }

// A barrier of `threads` threads of a block. They are whole warps, and all name the same `number`.
// Numbers begin at 1, because 0 is the barrier of __syncthreads. It returns whether all threads
// passed `ok`. Like __syncthreads, it orders the accesses of these threads before it against their
// accesses after it. The threads of a warp may come one by one, because PTX allows that for `barrier`
// without `.aligned`. The tool synccheck of compute-sanitizer calls such threads divergent.
MPICOMM_DEVICE bool named_barrier(u32 number, u32 threads, bool ok) {
  u32 all;
  asm volatile(
      "{ .reg .pred mine, all;\n"
      "  setp.ne.u32 mine, %3, 0;\n"
      "  barrier.red.and.pred all, %1, %2, mine;\n"
      "  selp.u32 %0, 1, 0, all; }"
      : "=r"(all)
      : "r"(number), "r"(threads), "r"(static_cast<u32>(ok))
      : "memory");
  return all != 0;
}

// Programmatic dependent launch. A kernel that is launched this way may begin before the preceding
// kernel of its stream has ended. It must not touch memory before `wait_for_predecessor` returns:
// then all accesses of the preceding kernel are done and visible. The next kernel may begin after
// all blocks of this kernel have called `let_successor_start` or have returned.
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

// The thread sleeps for two microseconds, and leaves the multiprocessor to other threads.
MPICOMM_DEVICE void pause() { __nanosleep(2000); }

// Stores `value` if the word holds `expected`. Returns the previous content. Orders nothing.
MPICOMM_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(p), "r"(expected), "r"(value)
               : "memory");
  return before;
}

MPICOMM_DEVICE u64 compare_and_swap(u64* p, u64 expected, u64 value) {
  u64 before;
  asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(p), "l"(expected), "l"(value)
               : "memory");
  return before;
}

// Atomic updates for locks. An acquire that stores orders all accesses that follow after it. It pairs
// with a release of the same word, which orders all accesses that precede it before it.
MPICOMM_DEVICE u64 compare_and_swap_acquire(u64* p, u64 expected, u64 value) {
  u64 before;
  asm volatile("atom.acquire.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(p), "l"(expected), "l"(value)
               : "memory");
  return before;
}
MPICOMM_DEVICE u64 fetch_or_acquire(u64* p, u64 value) {
  u64 before;
  asm volatile("atom.acquire.sys.global.or.b64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(value) : "memory");
  return before;
}
MPICOMM_DEVICE u64 fetch_and_release(u64* p, u64 value) {
  u64 before;
  asm volatile("atom.release.sys.global.and.b64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(value) : "memory");
  return before;
}

// Nanoseconds of a clock that all multiprocessors share. It advances in steps of up to a
// microsecond. Unlike clock64, it runs at one rate whatever the clocks of the GPU do, and a thread
// always reads the same clock.
MPICOMM_DEVICE u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

#else

// On a CPU a waiting thread has to let other threads run. Every thread yields at each of these
// accesses, because this also gives the most interleavings.
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
MPICOMM_DEVICE u64 load_acquire_on_device(const u64* p) { return load_acquire(p); }
MPICOMM_DEVICE void store_release_on_device(u64* p, u64 value) { store_release(p, value); }
MPICOMM_DEVICE u32 load_acquire_in_block(const u32* p) { return load_acquire(p); }
MPICOMM_DEVICE void store_release_in_block(u32* p, u32 value) { store_release(p, value); }
MPICOMM_DEVICE u32 load_relaxed(const u32* p) { return yield_and_load(p, __ATOMIC_RELAXED); }
MPICOMM_DEVICE u64 load_relaxed(const u64* p) { return yield_and_load(p, __ATOMIC_RELAXED); }
MPICOMM_DEVICE void store_relaxed(u32* p, u32 value) { yield_and_store(p, value, __ATOMIC_RELAXED); }
MPICOMM_DEVICE void store_relaxed(u64* p, u64 value) { yield_and_store(p, value, __ATOMIC_RELAXED); }
MPICOMM_DEVICE u32 load_volatile(const u8* p) { return yield_and_load(p, __ATOMIC_RELAXED); }
MPICOMM_DEVICE u32 load_volatile(const u16* p) { return yield_and_load(p, __ATOMIC_RELAXED); }
MPICOMM_DEVICE u32 load_volatile(const u32* p) { return load_relaxed(p); }
MPICOMM_DEVICE u64 load_volatile(const u64* p) { return load_relaxed(p); }
MPICOMM_DEVICE void store_volatile(u8* p, u32 value) { yield_and_store(p, static_cast<u8>(value), __ATOMIC_RELAXED); }
MPICOMM_DEVICE void store_volatile(u16* p, u32 value) { yield_and_store(p, static_cast<u16>(value), __ATOMIC_RELAXED); }
MPICOMM_DEVICE void store_volatile(u32* p, u32 value) { store_relaxed(p, value); }
MPICOMM_DEVICE void store_volatile(u64* p, u64 value) { store_relaxed(p, value); }
MPICOMM_DEVICE Pair load_volatile(const Pair* p) { return {load_relaxed(&p->first), load_relaxed(&p->second)}; }
MPICOMM_DEVICE void store_volatile(Pair* p, const Pair& value) {
  store_relaxed(&p->first, value.first);
  store_relaxed(&p->second, value.second);
}
MPICOMM_DEVICE void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// The program that runs the threads of a block knows which threads have come to a barrier.
#if defined(MPICOMM_NAMED_BARRIER)
MPICOMM_DEVICE bool named_barrier(u32 number, u32 threads, bool ok) {
  return MPICOMM_NAMED_BARRIER(number, threads, ok);
}
#endif
MPICOMM_DEVICE void pause() {}
MPICOMM_DEVICE void wait_for_predecessor() {}
MPICOMM_DEVICE void let_successor_start() {}
MPICOMM_DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T>
MPICOMM_DEVICE T yield_and_swap(T* p, T expected, T value, int order, int order_of_failure) {
  MPICOMM_YIELD();
  __atomic_compare_exchange_n(p, &expected, value, false, order, order_of_failure);
  return expected;
}
MPICOMM_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 value) {
  return yield_and_swap(p, expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
MPICOMM_DEVICE u64 compare_and_swap(u64* p, u64 expected, u64 value) {
  return yield_and_swap(p, expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
MPICOMM_DEVICE u64 compare_and_swap_acquire(u64* p, u64 expected, u64 value) {
  return yield_and_swap(p, expected, value, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
MPICOMM_DEVICE u64 fetch_or_acquire(u64* p, u64 value) {
  MPICOMM_YIELD();
  return __atomic_fetch_or(p, value, __ATOMIC_ACQUIRE);
}
MPICOMM_DEVICE u64 fetch_and_release(u64* p, u64 value) {
  MPICOMM_YIELD();
  return __atomic_fetch_and(p, value, __ATOMIC_RELEASE);
}
MPICOMM_DEVICE u64 clock_ns() { return MPICOMM_CLOCK_NS(); }

#endif

// The fence between the reset of a slot and the message that the slot is free. packets.cu and
// chain.cu need it for slots that a launch uses again. A receiver that has taken a packet of the
// sentinel protocol resets its slot to "absent" (packet_protocols.cuh). The sender may store the
// next packet there only after the reset has reached the slot. A reset that arrives later would
// wipe out the packet, and the receiver would wait for the packet until time is up. The fence
// orders resets before all later messages of this thread to the sender. It orders the resets that
// this thread has made, and the resets of other threads that this thread has seen.
//
// Slots in the memory of the receiving device need only device scope. This memory is the one place
// that orders the resets of the receiver and the packets of the sender. A fence of system scope
// would also wait for the receiver's stores to other ranks.
//
// Slots in host memory (MPICOMM_HOST_SLOTS) lie in no device. The stores of the receiver take
// another path to these slots than the stores of its peers. So the fence has system scope: when it
// ends, the resets have arrived in host memory.
//
// The PTX memory model promises none of this, because packets neither release nor acquire. The code
// rests on these properties of the hardware:
// - A device fence ends only after the memory of the device has all stores to it by certain
//   threads: the thread of the fence, and the threads from which this thread has acquired.
// - The same memory orders the stores of peers with these stores.
// - If a peer has loaded a packet, has branched on it, and stores afterwards, the store does not
//   arrive before the load is done.
MPICOMM_DEVICE void fence_slots() {
#if defined(MPICOMM_HOST_SLOTS)
  fence_system();
#else
  fence_device();
#endif
}

}  // namespace mpicomm
