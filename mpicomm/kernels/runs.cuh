// Runs: a few elements of one type, side by side. One thread moves them, in accesses as wide as
// their address allows.
#pragma once

#include "bytes.cuh"

namespace mpicomm {

template <class T, u32 n>
struct alignas(n * sizeof(T) < kPacketNbytes ? n * sizeof(T) : kPacketNbytes) Run {
  T of[n];
};

// Loads the first `count` elements of a run; the other elements are undefined.
template <class T, u32 n>
MPICOMM_DEVICE Run<T, n> load_run(const u8* from, u64 count) {
  if (count >= n && width_of(from) >= alignof(Run<T, n>)) return *reinterpret_cast<const Run<T, n>*>(from);
  Run<T, n> run;
#pragma unroll
  for (u32 e = 0; e < n; ++e) {
    if (e < count) run.of[e] = reinterpret_cast<const T*>(from)[e];
  }
  return run;
}

// Stores the first `count` elements of a run.
template <class T, u32 n>
MPICOMM_DEVICE void store_run(u8* to, const Run<T, n>& run, u64 count) {
  if (count >= n && width_of(to) >= alignof(Run<T, n>)) {
    *reinterpret_cast<Run<T, n>*>(to) = run;
    return;
  }
#pragma unroll
  for (u32 e = 0; e < n; ++e) {
    if (e < count) reinterpret_cast<T*>(to)[e] = run.of[e];
  }
}

}  // namespace mpicomm
