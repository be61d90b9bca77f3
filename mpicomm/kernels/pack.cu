// Packs and unpacks memory of any layout: see regions.cuh for the layouts and the units.
//
// No two threads move the same unit, and the preceding kernels of the stream have ended when this
// kernel begins. So it needs no flags.

#include "faults.cuh"
#include "regions.cuh"

namespace mpicomm {

// The host's copy of this constant is in packing.py; a test compares them.
constexpr u32 kPackThreads = 256;
constexpr u32 kAtOnce = 4;  // the units that a thread loads before it stores the first

// Words of eight bytes are frequent: the elements of a column of doubles, and structures with
// doubles.
MPICOMM_DEVICE bool is_double(const u8* at, u32 nbytes) { return nbytes == 8 && width_of(at) >= 8; }
MPICOMM_DEVICE bool is_two_doubles(const u8* at, u32 nbytes) { return nbytes == kPacketNbytes && width_of(at) == 8; }

MPICOMM_DEVICE Packet load_unit(const u8* from, u32 nbytes) {
  const u64* words = reinterpret_cast<const u64*>(from);
  if (nbytes == kPacketNbytes && width_of(from) == kPacketNbytes) return load_aligned(from);
  if (is_double(from, nbytes)) return {{static_cast<u32>(words[0]), static_cast<u32>(words[0] >> 32), 0, 0}};
  if (is_two_doubles(from, nbytes)) {
    const u64 first = words[0], second = words[1];
    return {{static_cast<u32>(first), static_cast<u32>(first >> 32), static_cast<u32>(second),
             static_cast<u32>(second >> 32)}};
  }
  return load_any(from, width_of(from), nbytes);
}

MPICOMM_DEVICE void store_unit(u8* to, const Packet& packet, u32 nbytes) {
  u64* words = reinterpret_cast<u64*>(to);
  const u64 first = static_cast<u64>(packet.words[1]) << 32 | packet.words[0];
  if (nbytes == kPacketNbytes && width_of(to) == kPacketNbytes) {
    store_aligned(to, packet);
  } else if (is_double(to, nbytes)) {
    words[0] = first;
  } else if (is_two_doubles(to, nbytes)) {
    words[0] = first;
    words[1] = static_cast<u64>(packet.words[3]) << 32 | packet.words[2];
  } else {
    store_any(to, packet, width_of(to), nbytes);
  }
}

// Moves the units from `begin` to `end`; each `step`th of them belongs to this thread. `kOne` is
// whether all are units of the first region or of its structures. The first region lies in the
// argument of the kernel, because a thread would else wait for the table before it loads data.
template <bool kOne, bool kFields>
MPICOMM_DEVICE void move_units(const Packing& x, u64 begin, u64 end, u64 step) {
  // After a failure packed memory may hold other data, which must not get into the user's memory.
  // Pairs with the store in report_fault: a wait of this stream was an earlier kernel, so a plain
  // load sees its store. A plain load also hits the cache of the multiprocessor. Loads of the one
  // word by all threads would otherwise queue up. The load is in flight during the first loads of
  // data.
  const u32 failed = x.unpacks ? *x.failed : kClear;
  u32 region = 0;
  // All loads come before the first store, so that kAtOnce loads are in flight at once.
  for (u64 first = begin + threadIdx.x; first < end; first += kAtOnce * step) {
    Unit units[kAtOnce];
    Packet packets[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u64 number = first + i * step;
      units[i].nbytes = 0;
      if (number >= end) continue;
      if (!kOne) region = region_of(x, number, region);
      units[i] = unit_of<kFields>(x, kOne ? x.first : x.regions[region], region, number);
      packets[i] = load_unit(units[i].from, units[i].nbytes);
    }
    if (failed != kClear) return;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      if (units[i].nbytes != 0) store_unit(units[i].to, packets[i], units[i].nbytes);
    }
  }
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kPackThreads)
    mpicomm_pack(const __grid_constant__ mpicomm::Packing);

MPICOMM_KERNEL void mpicomm_pack(const __grid_constant__ mpicomm::Packing x) {
  using mpicomm::u64;
  if (x.structures == 1) {
    // All blocks move side by side, because this order is the fastest for the memory.
    const u64 begin = static_cast<u64>(blockIdx.x) * blockDim.x, step = static_cast<u64>(gridDim.x) * blockDim.x;
    if (x.num_regions == 1) {
      mpicomm::move_units<true, false>(x, begin, x.units, step);
    } else {
      mpicomm::move_units<true, true>(x, begin, x.units, step);
    }
  } else {
    // Each block moves consecutive units, because the search for a near region is short.
    const u64 share = (x.units + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share, end = begin + share;
    mpicomm::move_units<false, true>(x, begin, end < x.units ? end : x.units, blockDim.x);
  }
}
