// Regions: memory of any layout, as runs of bytes that nested loops visit. MPI's datatypes describe
// such memory. pack.cu packs and unpacks it, and accumulate.cu updates its elements.
//
// A region is one run and its loops. A loop has a stride in memory and a stride in packed memory.
// Runs of other regions may lie between its runs in packed memory: each field of an array of
// structures is a region. One loop of a region may have a list of displacements instead of a
// stride, as an indexed datatype has. All regions together fill packed memory, each byte once.
//
// The kernel cuts the runs of a region into units of up to 16 bytes, and each unit lies in one run.
// A thread moves several units at a time. It searches for the region of a unit from its last region
// on. It finds the place in the region by one division for each loop. Neighbouring threads move
// neighbouring units of a region. So a warp touches whole lines of packed memory if the runs of the
// region follow each other.
//
// The fields of an array of structures are regions with the same loops, and their runs follow each
// other in packed memory. The numbers of their units go structure by structure, so that a warp
// moves whole structures. If it moved one field of all structures, and then the next field, it
// would touch most lines of memory once for each field.
#pragma once

#include "bytes.cuh"

namespace mpicomm {

// The host's copies of these constants and structures are in packing.py; a test compares them.
constexpr u32 kLoops = 4;

struct Region {
  u64 memory;      // the offset of the first run from Packing::memory
  u64 packed;      // the offset of the first run in packed memory
  u64 first_unit;  // the units of all regions before; for a later field, the units of all fields, too
  u64 list;        // the offset of the displacements of the listed loop, in bytes from the first region
  u32 run_nbytes;
  u32 run_units;
  u32 listed;  // the loop that has a list of displacements, or kLoops
  u32 element_units;  // the units of a run of all fields; it has no meaning for a later field
  u32 counts[kLoops];  // the innermost loop first; 1 for a loop that does not exist
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
  u32 structures;  // the number of arrays of structures and of other regions
  u32 unused;
  Region first;  // the first region
};

// The two places of a unit. It has 0 bytes for a thread that has no unit.
struct Unit {
  u8* from;
  u8* to;
  u32 nbytes;
};

// Returns the region of a unit; `from` is a region that does not begin after the unit. The steps of
// the search double, because the region is near, except for the first unit of a thread.
MPICOMM_DEVICE u32 region_of(const Packing& x, u64 number, u32 from) {
  const auto begins = [&](u32 region) { return region < x.num_regions && x.regions[region].first_unit <= number; };
  u32 low = from, step = 1;
  while (begins(low + step)) {
    low += step;
    step *= 2;
  }
  // The region lies between low and low + step, which begins after the unit.
  while (step > 1) {
    step /= 2;
    if (begins(low + step)) low += step;
  }
  return low;
}

MPICOMM_DEVICE const i64* list_of(const Packing& x, const Region& region) {
  return reinterpret_cast<const i64*>(reinterpret_cast<u64>(x.regions) + region.list);
}

// Returns the unit with the number `number` of a region, or of the structures that have the region
// as their first field; `index` is the number of the region. `kFields` is whether there can be
// other fields. A region without fields is faster without the question.
template <bool kFields>
MPICOMM_DEVICE Unit unit_of(const Packing& x, const Region& region, u32 index, u64 number) {
  // The host cuts regions so that 32 bits hold the number of a unit, because a division of 64 bits
  // takes four times as long.
  const u32 unit = static_cast<u32>(number - region.first_unit);
  u32 run = unit / region.element_units;
  u32 rest = unit - run * region.element_units, units = region.run_units, run_nbytes = region.run_nbytes;
  u64 at = region.memory, packed_at = region.packed;
  while (kFields && rest >= units) {
    const Region& field = x.regions[++index];
    rest -= units;
    units = field.run_units, run_nbytes = field.run_nbytes, at = field.memory, packed_at = field.packed;
  }
  const u32 begin = rest * kPacketNbytes;
  u8* packed = x.packed + packed_at + begin;
  u8* memory = x.memory + at + begin;
#pragma unroll
  for (u32 loop = 0; loop < kLoops; ++loop) {
    if (region.counts[loop] == 1) break;
    const u32 rest = run / region.counts[loop], round = run - rest * region.counts[loop];
    memory += round * region.strides[loop];
    if (loop == region.listed) memory += list_of(x, region)[round];
    packed += round * region.packed_strides[loop];
    run = rest;
  }
  const u32 left = run_nbytes - begin;
  const u32 nbytes = left < kPacketNbytes ? left : kPacketNbytes;
  return x.unpacks ? Unit{packed, memory, nbytes} : Unit{memory, packed, nbytes};
}

}  // namespace mpicomm
