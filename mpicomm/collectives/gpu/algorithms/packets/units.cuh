// Units of packets.cu: what a thread loads, sends at once, and stores. Usually a unit is the bytes of
// one packet. If elements travel quantized (MPICOMM_WIRE), a unit is one or two parts of blocks
// (wire_quantization.cuh). A packet has a quantized part, and a byte beside the slots has the scale of a
// block.
//
// The threads of a warp have neighbouring slots in every step: first one slot each for their first
// parts, then one slot each for their second parts. The scales lie where these packets would have
// their escapes. No quantized packet needs an escape. The first thread of a block stores its scales,
// and all threads of the block that receive them poll them. Like an escape, a scale is zero until it
// comes, and the first thread of the block resets it together with the slots. So the scale is free
// when the slots are free, and the proofs at the top of packets.cu hold for it.
//
// In a step the threads of a warp have a unit all or none, because they share the offset of their
// first block. So they take and leave together.
#pragma once

#include "packet_protocols.cuh"
#if defined(MPICOMM_WIRE)
#include "wire_quantization.cuh"
#elif defined(MPICOMM_DTYPE)
#include "reduce_packets.cuh"
#endif

namespace mpicomm {

#if defined(MPICOMM_WIRE)

constexpr bool kWire = true;
constexpr u32 kSharers = kLanes;  // the threads with one offset

// The parts of a unit. A thread with two parts works on both at once, and needs fewer instructions
// for each of them. In one step there is too little work for that. The host's copy is in
// arguments.py; a test compares them.
#if defined(MPICOMM_ONE_STEP) || MPICOMM_RANKS > 2
constexpr u32 kParts = 1;
#else
constexpr u32 kParts = 2;
#endif
constexpr u32 kPackets = kParts;
constexpr u32 kCarriedNbytes = kParts * kPartElements * sizeof(Element);  // the bytes of memory for each unit

struct Unit {
  Packet quantized[kParts];
  u32 scales[kParts];
};
struct Reduced {
  Values parts[kParts];
};

// The scales of a thread's blocks as they travel. The scales of the blocks of a warp are
// neighbours, so that its threads store them at once.
template <u32 parts>
struct ScaleWordOf;
template <>
struct ScaleWordOf<1> {
  using Word = u8;
};
template <>
struct ScaleWordOf<2> {
  using Word = u16;
};
using ScaleWord = ScaleWordOf<kParts>::Word;
MPICOMM_DEVICE u32 word_of(const u32 (&scales)[kParts]) {
  return kParts == 1 ? scales[0] : scales[0] | scales[kParts - 1] << 8;
}

// Whether a result is stored as it was reduced. Otherwise the rank quantizes it, sends it on if there is
// a fan-out, and stores the dequantized values, as all other ranks do.
#if defined(MPICOMM_QUANTIZES_RESULT)
constexpr bool kKeepsReduced = false;
#else
constexpr bool kKeepsReduced = true;
#endif

// Whether this thread is the first thread of its blocks.
MPICOMM_DEVICE bool is_first_of_block() { return threadIdx.x % kThreadsOfBlock == 0; }
// The number of this thread's first block among the blocks of its warp.
MPICOMM_DEVICE u32 block_of_warp() { return threadIdx.x % kLanes / kThreadsOfBlock; }
// The offset of this thread's first packet of elements, from the first block of the warp.
MPICOMM_DEVICE u32 place_of_thread() {
  return block_of_warp() * kBlockNbytes + threadIdx.x % kThreadsOfBlock * kPacketNbytes;
}
// The offset of a line of a part, from the first packet of elements.
constexpr u32 kWarpNbytes = kLanes / kThreadsOfBlock * kBlockNbytes;
MPICOMM_DEVICE constexpr u32 place_of_line(u32 part, u32 line) { return part * kWarpNbytes + line * kLineNbytes; }

// A rank that sends the same elements to all ranks quantizes them once, also for itself.
#if defined(MPICOMM_SAME_TO_ALL)
constexpr bool kSameToAll = true;
#else
constexpr bool kSameToAll = false;
#endif

// The elements of a unit.
struct UnitElements {
  Part parts[kParts];
};

// Quantizes a unit. All threads of the warp call it together.
template <class Given>
MPICOMM_DEVICE Unit unit_from(const Given& given) {
  Unit unit;
#pragma unroll
  for (u32 part = 0; part < kParts; ++part) unit.scales[part] = scale_for(given.parts[part]);
  reduce_scales(unit.scales);
#pragma unroll
  for (u32 part = 0; part < kParts; ++part) unit.quantized[part] = quantize(given.parts[part], unit.scales[part]);
  return unit;
}

// A load leaves elements in registers if a thread has enough registers. Then the thread waits for the
// load only when it needs the unit. Otherwise a load leaves a unit.
constexpr bool kHoldsElements = kSameToAll || (MPICOMM_RANKS - 1) * sizeof(Element) <= 6;
template <bool holds_elements>
struct Loading {
  using Loaded = UnitElements;
  MPICOMM_DEVICE static UnitElements of(const UnitElements& elements) { return elements; }
};
template <>
struct Loading<false> {
  using Loaded = Unit;
  MPICOMM_DEVICE static Unit of(const UnitElements& elements) { return unit_from(elements); }
};
using Loaded = Loading<kHoldsElements>::Loaded;

// All threads of the warp call it together.
MPICOMM_DEVICE Unit unit_of(const UnitElements& elements) { return unit_from(elements); }
MPICOMM_DEVICE const Unit& unit_of(const Unit& unit) { return unit; }

// Whether all elements of the warp's unit at offset `at` lie in an aligned array of `nbytes`. Nearly
// all units do, and need no other check.
MPICOMM_DEVICE bool is_whole(const u8* array, u64 at, u64 nbytes) {
  return width_of(array) >= kPacketNbytes && at + kSharers * kCarriedNbytes <= nbytes;
}

// Loads and stores of other parts: `at` is the offset of the first packet of the part. They are out of
// line, because a kernel also fetches code that it jumps over.
MPICOMM_DEVICE_CALL Part load_some(const u8* array, u64 at, u64 nbytes) {
  Part part{};
#pragma unroll
  for (u32 line = 0; line < sizeof(Element); ++line) {
    const u64 place = at + line * kLineNbytes;
    if (place < nbytes) part.packets[line] = load_unit(array, width_of(array), place, nbytes);
  }
  return part;
}
MPICOMM_DEVICE_CALL void store_some(u8* array, u64 at, u64 nbytes, Part part) {
#pragma unroll
  for (u32 line = 0; line < sizeof(Element); ++line) {
    const u64 place = at + line * kLineNbytes;
    if (place < nbytes) store_unit(array, width_of(array), place, nbytes, part.packets[line]);
  }
}

// Loads the unit of the blocks at offset `at`. Elements beyond the end count as zero. All threads of
// the warp call it together.
MPICOMM_DEVICE Loaded load_at(const u8* array, u64 at, u64 nbytes) {
  const u64 first = at + place_of_thread();
  UnitElements elements{};
  if (is_whole(array, at, nbytes)) {
    const u8* const from = array + first;
#pragma unroll
    for (u32 part = 0; part < kParts; ++part) {
#pragma unroll
      for (u32 line = 0; line < sizeof(Element); ++line) {
        elements.parts[part].packets[line] = load_aligned(from + place_of_line(part, line));
      }
    }
  } else {
#pragma unroll
    for (u32 part = 0; part < kParts; ++part) {
      elements.parts[part] = load_some(array, first + place_of_line(part, 0), nbytes);
    }
  }
  return Loading<kHoldsElements>::of(elements);
}

MPICOMM_DEVICE void store_at(u8* array, u64 at, u64 nbytes, const Reduced& values) {
  const u64 first = at + place_of_thread();
  Part made[kParts];
#pragma unroll
  for (u32 part = 0; part < kParts; ++part) made[part] = part_of(values.parts[part]);
  if (is_whole(array, at, nbytes)) {
    u8* const to = array + first;
#pragma unroll
    for (u32 part = 0; part < kParts; ++part) {
#pragma unroll
      for (u32 line = 0; line < sizeof(Element); ++line) {
        store_aligned(to + place_of_line(part, line), made[part].packets[line]);
      }
    }
  } else {
#pragma unroll
    for (u32 part = 0; part < kParts; ++part) {
      store_some(array, first + place_of_line(part, 0), nbytes, made[part]);
    }
  }
}
MPICOMM_DEVICE void store_at(u8* array, u64 at, u64 nbytes, const Unit& unit) {
  Reduced values;
#pragma unroll
  for (u32 part = 0; part < kParts; ++part) values.parts[part] = dequantize(unit.quantized[part], unit.scales[part]);
  store_at(array, at, nbytes, values);
}

MPICOMM_DEVICE const Packet& packet_in(const Unit& unit, u32 number) { return unit.quantized[number]; }

template <class Op>
constexpr bool kAverages = false;
template <class T>
constexpr bool kAverages<op::avg<T>> = true;

// Returns the sum or the average of the units of all ranks. It adds in rank order.
template <u32 ranks>
MPICOMM_DEVICE Reduced reduce(const Unit (&units)[ranks], u32) {
  Reduced sum;
#pragma unroll
  for (u32 part = 0; part < kParts; ++part) {
    Values& values = sum.parts[part];
    values = dequantize(units[0].quantized[part], units[0].scales[part]);
#pragma unroll
    for (u32 rank = 1; rank < ranks; ++rank) add(values, units[rank].quantized[part], units[rank].scales[part]);
    if constexpr (kAverages<Op>) {
#pragma unroll
      for (u32 e = 0; e < kPartElements; ++e) values.of[e] = divide(values.of[e], ranks);
    }
  }
  return sum;
}

#else

constexpr bool kWire = false;
constexpr u32 kSharers = 1;
constexpr u32 kPackets = 1;
constexpr u32 kCarriedNbytes = kUnitNbytes;

constexpr bool kSameToAll = false;

using Unit = Packet;
using Loaded = Packet;
using Reduced = Packet;
constexpr bool kKeepsReduced = false;  // an epilogue may change it

MPICOMM_DEVICE const Unit& unit_of(const Loaded& packet) { return packet; }
MPICOMM_DEVICE Loaded load_at(const u8* array, u64 at, u64 nbytes) {
  return load_unit(array, width_of(array), at, nbytes);
}
MPICOMM_DEVICE void store_at(u8* array, u64 at, u64 nbytes, const Unit& unit) {
  store_unit(array, width_of(array), at, nbytes, unit);
}
MPICOMM_DEVICE const Packet& packet_in(const Unit& unit, u32) { return unit; }

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
