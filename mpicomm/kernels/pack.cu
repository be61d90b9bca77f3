// Packs and unpacks memory of any layout: runs of bytes that nested loops visit, as MPI's datatypes describe them.
//
// A region is one run and its loops. A loop has a stride in memory and a stride in packed memory, because the runs of
// other regions may lie between its own runs there: the fields of an array of structures are one region each. The
// places of one loop of a region may be listed instead, as those of an indexed datatype. All regions together fill
// packed memory, each byte once.
//
// The runs of a region are cut into units of up to 16 bytes, which lie in one run. A thread moves several units at a
// time. It searches for the region of a unit from its last region on, and finds the place in the region by one division
// for each loop. Neighbouring threads move neighbouring units of a region, so that a warp touches whole lines of packed
// memory where the runs of the region follow each other.
//
// No unit is moved by two threads, and kernels ahead of this one are over when it begins. So it needs no flags.

#include "bytes.cuh"
#include "faults.cuh"

namespace mpicomm {

// The host's copies of these constants and structures are in packing.py; a test compares them.
constexpr u32 kPackThreads = 256;
constexpr u32 kLoops = 4;
constexpr u32 kAtOnce = 4;  // the units that a thread loads before it stores the first

struct Region {
  u64 memory;      // where the first run lies, from Packing::memory on
  u64 packed;      // where it lies in packed memory
  u64 first_unit;  // the units of all regions before this one
  u64 list;        // where the places of the listed loop lie, in bytes from the first region on
  u32 run_nbytes;
  u32 run_units;
  u32 listed;  // the loop whose places are listed, kLoops where none are
  u32 unused;
  u32 counts[kLoops];  // the innermost loop first; 1 for a loop that there is not
  i64 strides[kLoops];  // in memory; 0 for the listed loop
  u64 packed_strides[kLoops];
};

struct Packing {
  const Region* regions;
  u8* memory;
  u8* packed;
  const u32* failed;  // the word of Faults
  u64 units;
  u32 num_regions;
  u32 unpacks;
  Region first;  // the first region, which a launch of one region reads from here
};

// The two places of a unit. It has 0 bytes for a thread that has no unit.
struct Unit {
  u8* from;
  u8* to;
  u32 nbytes;
};

// Returns the region of a unit; `from` is a region that does not begin behind the unit. The steps of the search double,
// because the region is near for all but the first unit of a thread.
MPICOMM_DEVICE u32 region_of(const Packing& x, u64 number, u32 from) {
  const auto begins = [&](u32 region) { return region < x.num_regions && x.regions[region].first_unit <= number; };
  u32 low = from, step = 1;
  while (begins(low + step)) {
    low += step;
    step *= 2;
  }
  // The region lies between low and low + step, which begins behind the unit.
  while (step > 1) {
    step /= 2;
    if (begins(low + step)) low += step;
  }
  return low;
}

MPICOMM_DEVICE const i64* list_of(const Packing& x, const Region& region) {
  return reinterpret_cast<const i64*>(reinterpret_cast<u64>(x.regions) + region.list);
}

MPICOMM_DEVICE Unit unit_of(const Packing& x, const Region& region, u64 number) {
  // The host cuts regions so that 32 bits hold the number of a unit: a division of 64 bits takes four times as long.
  const u32 unit = static_cast<u32>(number - region.first_unit);
  u32 run = unit / region.run_units;
  const u32 begin = (unit - run * region.run_units) * kPacketNbytes;
  u8* packed = x.packed + region.packed + begin;
  u8* memory = x.memory + region.memory + begin;
#pragma unroll
  for (u32 loop = 0; loop < kLoops; ++loop) {
    if (region.counts[loop] == 1) break;
    const u32 rest = run / region.counts[loop], round = run - rest * region.counts[loop];
    memory += round * region.strides[loop];
    if (loop == region.listed) memory += list_of(x, region)[round];
    packed += round * region.packed_strides[loop];
    run = rest;
  }
  const u32 left = region.run_nbytes - begin;
  const u32 nbytes = left < kPacketNbytes ? left : kPacketNbytes;
  return x.unpacks ? Unit{packed, memory, nbytes} : Unit{memory, packed, nbytes};
}

// Runs of eight bytes are frequent, because they are the elements of a column of doubles.
MPICOMM_DEVICE bool is_doubles(const u8* at, u32 nbytes) { return nbytes == 8 && width_of(at) >= 8; }

MPICOMM_DEVICE Packet load_unit(const u8* from, u32 nbytes) {
  if (nbytes == kPacketNbytes && width_of(from) == kPacketNbytes) return load_aligned(from);
  if (is_doubles(from, nbytes)) {
    const u64 word = *reinterpret_cast<const u64*>(from);
    return {{static_cast<u32>(word), static_cast<u32>(word >> 32), 0, 0}};
  }
  return load_any(from, width_of(from), nbytes);
}

MPICOMM_DEVICE void store_unit(u8* to, const Packet& packet, u32 nbytes) {
  if (nbytes == kPacketNbytes && width_of(to) == kPacketNbytes) {
    store_aligned(to, packet);
  } else if (is_doubles(to, nbytes)) {
    *reinterpret_cast<u64*>(to) = static_cast<u64>(packet.words[1]) << 32 | packet.words[0];
  } else {
    store_any(to, packet, width_of(to), nbytes);
  }
}

// Moves the units from `begin` to `end`, of which this thread has each `step`th. `kOne` is whether there is one region:
// it lies in the kernel's argument, because a thread would else wait for the table before it can load data.
template <bool kOne>
MPICOMM_DEVICE void move_units(const Packing& x, u64 begin, u64 end, u64 step) {
  // After a failure packed memory may hold other data, which must not get into the user's memory. Pairs with the store
  // in report_fault: a wait of this stream was an earlier kernel, so a plain load sees its store. A plain load also
  // stays in the cache of the multiprocessor, where a load of each thread from the one word would queue up. It is in
  // flight during the first loads of data.
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
      units[i] = unit_of(x, kOne ? x.first : x.regions[region], number);
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
  if (x.num_regions == 1) {
    // All blocks move side by side, which the memory likes best.
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
    mpicomm::move_units<true>(x, static_cast<u64>(blockIdx.x) * blockDim.x, x.units, step);
  } else {
    // Each block moves consecutive units, because the search for a near region is short.
    const u64 share = (x.units + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share, end = begin + share;
    mpicomm::move_units<false>(x, begin, end < x.units ? end : x.units, blockDim.x);
  }
}
