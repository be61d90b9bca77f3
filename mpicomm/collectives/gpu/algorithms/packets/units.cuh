// Units of packets.cu: what a thread loads, sends in one packet, and stores. Usually a unit is the
// bytes of one packet. With eight bits on the wire (MPICOMM_WIRE) it is a thread's part of a block
// (eight_bits.cuh): the packet has its codes, and a word beside the slots has the scales of the
// blocks of the warp.
//
// The threads of a warp have neighbouring slots in every step. Their scales lie where the packets of
// the first 4 slots would have their escapes. No packet of codes needs an escape. The sender of the
// first slot stores the scales, and all receivers poll them. Like an escape, the word is zero until
// it comes, and the receiver of the first slot resets it together with that slot. So the word is
// free when the slot is free, and the proofs at the top of packets.cu hold for it.
//
// In a step the threads of a warp have a unit all or none, because they share the offset of their
// first block. So they take and leave together.
#pragma once

#include "packet_protocols.cuh"
#if defined(MPICOMM_WIRE)
#include "eight_bits.cuh"
#elif defined(MPICOMM_DTYPE)
#include "reduce_packets.cuh"
#endif

namespace mpicomm {

#if defined(MPICOMM_WIRE)

constexpr bool kWire = true;
constexpr u32 kSharers = kLanes;                                 // the threads with one offset
constexpr u32 kCarriedNbytes = kPartElements * sizeof(Element);  // the bytes of memory for each packet

using Unit = Coded;
using Reduced = Values;

// Whether a result is stored as it was reduced. Otherwise the rank codes it, sends the codes on if
// there is a fan-out, and stores the values of the codes, as all other ranks do.
#if defined(MPICOMM_CODES_RESULT)
constexpr bool kKeepsReduced = false;
#else
constexpr bool kKeepsReduced = true;
#endif

// The offset of a thread's packet of a line, in an array in which the blocks of the warp are at `at`.
MPICOMM_DEVICE u64 place_in_line(u64 at, u32 line) {
  return at + block_of_warp() * kBlockNbytes + line * kLineNbytes + threadIdx.x % kThreadsOfBlock * kPacketNbytes;
}

// A rank that sends the same elements to all ranks codes them once, also for itself.
#if defined(MPICOMM_ALIKE)
constexpr bool kAlike = true;
#else
constexpr bool kAlike = false;
#endif

// A load leaves elements in registers if a thread has enough registers. Then the thread waits for the
// load only when it needs the unit. Otherwise a load leaves a unit.
constexpr bool kHoldsElements = kAlike || (MPICOMM_RANKS - 1) * sizeof(Element) <= 6;
template <bool holds_elements>
struct Loading {
  using Loaded = Part;
  MPICOMM_DEVICE static Part of(const Part& part) { return part; }
};
template <>
struct Loading<false> {
  using Loaded = Unit;
  MPICOMM_DEVICE static Unit of(const Part& part) { return code(part); }
};
using Loaded = Loading<kHoldsElements>::Loaded;

// All threads of the warp call it together.
MPICOMM_DEVICE Unit unit_of(const Part& part) { return code(part); }
MPICOMM_DEVICE const Unit& unit_of(const Unit& unit) { return unit; }

// Loads the unit of the blocks at offset `at`. Elements beyond the end count as zero. All threads of
// the warp call it together.
MPICOMM_DEVICE Loaded load_at(const u8* array, u64 at, u64 nbytes) {
  const u32 width = width_of(array);
  Part part{};
#pragma unroll
  for (u32 line = 0; line < sizeof(Element); ++line) {
    const u64 place = place_in_line(at, line);
    if (place < nbytes) part.packets[line] = load_unit(array, width, place, nbytes);
  }
  return Loading<kHoldsElements>::of(part);
}

MPICOMM_DEVICE void store_at(u8* array, u64 at, u64 nbytes, const Values& values) {
  const u32 width = width_of(array);
  const Part part = part_of(values);
#pragma unroll
  for (u32 line = 0; line < sizeof(Element); ++line) {
    const u64 place = place_in_line(at, line);
    if (place < nbytes) store_unit(array, width, place, nbytes, part.packets[line]);
  }
}
MPICOMM_DEVICE void store_at(u8* array, u64 at, u64 nbytes, const Unit& unit) { store_at(array, at, nbytes, decode(unit)); }

MPICOMM_DEVICE const Packet& packet_in(const Unit& unit) { return unit.codes; }

template <class Op>
constexpr bool kAverages = false;
template <class T>
constexpr bool kAverages<op::avg<T>> = true;

// Returns the sum or the average of the units of all sources. It adds in rank order.
template <u32 ranks>
MPICOMM_DEVICE Reduced reduce(const Unit (&units)[ranks], u32 sources) {
  Values sum{};
  u32 count = 0;
#pragma unroll
  for (u32 rank = 0; rank < ranks; ++rank) {
    if (!(sources >> rank & 1)) continue;
    if (count == 0) sum = decode(units[rank]);
    else add(sum, units[rank]);
    ++count;
  }
  if constexpr (kAverages<Op>) {
#pragma unroll
    for (u32 e = 0; e < kPartElements; ++e) sum.of[e] = divide(sum.of[e], count);
  }
  return sum;
}

#else

constexpr bool kWire = false;
constexpr u32 kSharers = 1;
constexpr u32 kCarriedNbytes = kUnitNbytes;

constexpr bool kAlike = false;

using Unit = Packet;
using Loaded = Packet;
using Reduced = Packet;
constexpr bool kKeepsReduced = false;  // an epilogue may change it

MPICOMM_DEVICE const Unit& unit_of(const Loaded& packet) { return packet; }
MPICOMM_DEVICE Loaded load_at(const u8* array, u64 at, u64 nbytes) { return load_unit(array, width_of(array), at, nbytes); }
MPICOMM_DEVICE void store_at(u8* array, u64 at, u64 nbytes, const Unit& unit) {
  store_unit(array, width_of(array), at, nbytes, unit);
}
MPICOMM_DEVICE const Packet& packet_in(const Unit& unit) { return unit; }

// Returns the unit of the only source, unchanged.
template <u32 ranks>
MPICOMM_DEVICE Packet single(const Packet (&units)[ranks], u32 sources) {
#pragma unroll
  for (u32 rank = 0; rank < ranks; ++rank) {
    if (sources >> rank & 1) return units[rank];
  }
  return {};
}

// Returns the reduction of the units of all sources.
template <u32 ranks>
MPICOMM_DEVICE Packet reduce(const Packet (&units)[ranks], u32 sources) {
#if defined(MPICOMM_DTYPE)
  if ((sources & (sources - 1)) != 0) return reduce_packets<kUnitNbytes>(units, sources);
#endif
  return single(units, sources);
}

#endif

}  // namespace mpicomm
