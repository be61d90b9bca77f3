// Packets of 16 bytes. Each packet shows by its content whether it has come. A sender stores a
// packet in a slot of the receiver, and the receiver loads the slot until the packet is there. A
// unit is the part of a message that one packet carries: one thread reads it, sends it, waits for
// it and stores it. There are two protocols.
//
// LL ("low latency") carries 8 bytes of data. Each half of the packet has 4 bytes of data and a
// flag, the number of the launch (ll_protocol.cuh). It is the fastest protocol for messages of up to
// some KiB.
//
// Sentinel carries 16 bytes of data and no flag: see sentinels.cuh.
#pragma once

#include "element.cuh"
#include "ll_protocol.cuh"
#include "sentinels.cuh"

namespace mpicomm {

#if defined(MPICOMM_DTYPE) && (defined(MPICOMM_RESULT) || !defined(MPICOMM_EPILOGUE))
using SentinelProtocol = Sentinels<!kMakesOneNan<Op>>;
#else
using SentinelProtocol = Sentinels<true>;
#endif

// Stores a packet that needs an escape. The two stores have no order and need none. A receiver that
// has seen the packet waits for the escape. The byte is zero until the escape comes, because the
// receiver reset it before the slot became free.
MPICOMM_DEVICE_CALL void store_escaped(Pair* slot, u8* escape, Pair packet) {
  using Protocol = SentinelProtocol;
  u32 code = Protocol::kArrived;
  if (Protocol::upper(packet.first) == Protocol::kAbsent) packet.first ^= Protocol::kSign, code |= Protocol::kFirst;
  if (Protocol::upper(packet.second) == Protocol::kAbsent) packet.second ^= Protocol::kSign, code |= Protocol::kSecond;
  store_volatile(slot, packet);
  store_volatile(escape, code);
}

// Returns the packet of the sender, from the packet that came and its escape.
MPICOMM_DEVICE Pair unescaped(const Pair& packet, u32 code) {
  using Protocol = SentinelProtocol;
  const u64 first = (code & Protocol::kFirst) != 0 ? Protocol::kSign : 0, second = (code & Protocol::kSecond) != 0 ? Protocol::kSign : 0;
  return {packet.first ^ first, packet.second ^ second};
}

#if defined(MPICOMM_SENTINEL)
using Protocol = SentinelProtocol;
#else
static_assert(sizeof(Element) <= LLProtocol::kUnitNbytes, "an element lies in one packet");
using Protocol = LLProtocol;
#endif
constexpr u32 kUnitNbytes = Protocol::kUnitNbytes;

// Loads and stores of units at the end of an array, and in arrays that are not aligned.
MPICOMM_DEVICE_CALL Packet load_narrow(const u8* from, u32 width, u32 nbytes) { return load_any(from, width, nbytes); }
MPICOMM_DEVICE_CALL void store_narrow(u8* to, Packet packet, u32 width, u32 nbytes) {
  store_any(to, packet, width, nbytes);
}

// Loads the unit at offset `at` of an array of `nbytes`; `at` < `nbytes`. Bytes beyond the end are
// zero.
MPICOMM_DEVICE Packet load_unit(const u8* array, u32 width, u64 at, u64 nbytes) {
  const u64 rest = nbytes - at;
  if (width >= kUnitNbytes && rest >= kUnitNbytes) {
    if constexpr (kUnitNbytes == kPacketNbytes) return load_aligned(array + at);
    const u64 half = *reinterpret_cast<const u64*>(array + at);
    return __builtin_bit_cast(Packet, Pair{half, 0});
  }
  return load_narrow(array + at, width, rest < kUnitNbytes ? rest : kUnitNbytes);
}

MPICOMM_DEVICE void store_unit(u8* array, u32 width, u64 at, u64 nbytes, const Packet& packet) {
  const u64 rest = nbytes - at;
  if (width >= kUnitNbytes && rest >= kUnitNbytes) {
    if constexpr (kUnitNbytes == kPacketNbytes) return store_aligned(array + at, packet);
    *reinterpret_cast<u64*>(array + at) = __builtin_bit_cast(Pair, packet).first;
    return;
  }
  store_narrow(array + at, packet, width, rest < kUnitNbytes ? rest : kUnitNbytes);
}

}  // namespace mpicomm
