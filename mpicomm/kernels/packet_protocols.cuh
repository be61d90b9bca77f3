// Packets of 16 bytes. Each packet shows by its content whether it has come. A sender stores a
// packet in a slot of the receiver, and the receiver loads the slot until the packet is there. A
// unit is the part of a message that one packet carries: one thread reads it, sends it, waits for
// it and stores it. There are two protocols.
//
// LL ("low latency") carries 8 bytes of data. Each half of the packet has 4 bytes of data and a
// flag, the number of the launch (ll_flags.cuh). It is the fastest protocol for messages of up to
// some KiB.
//
// Sentinel carries 16 bytes of data and no flag. In a slot without a packet, the upper word of each
// half is kAbsent. The sender stores each half as a whole. So a half has come after its upper word
// differs from kAbsent. A receiver that has taken a packet resets the slot: it stores kAbsent there
// again.
//
// The data itself may have the word kAbsent in one of these two words. Then the sender stores
// kEscaped, which differs in the sign. The rest depends on the kernel (kEscapes):
// - As a number, kEscaped is another NaN. A reduction that makes one NaN of all NaNs (kMakesOneNan)
//   needs no more. If it has a single contribution, the changed NaN stays, but only one rank
//   receives this contribution. An epilogue may make any NaN. Packets carry the results of an
//   epilogue if they have the type of the elements.
// - All other data has to arrive unchanged. A packet with kAbsent or kEscaped in one of the two
//   words has an escape: a byte beside the slots. The byte is zero until the sender stores in it
//   which of the two words were kAbsent. The receiver resets the byte with the slot. Such data is
//   rare.
#pragma once

#include "element.cuh"
#include "flag_protocol.cuh"

namespace mpicomm {

struct SentinelProtocol {
  static constexpr u32 kUnitNbytes = kPacketNbytes;
  static constexpr bool kGivesBack = true;
#if defined(MPICOMM_DTYPE) && (defined(MPICOMM_RESULT) || !defined(MPICOMM_EPILOGUE))
  static constexpr bool kEscapes = !kMakesOneNan<Op>;
#else
  static constexpr bool kEscapes = true;
#endif
  struct Flag {};

  MPICOMM_DEVICE static Flag flag(u64) { return {}; }
  MPICOMM_DEVICE static Pair packet(const Packet& unit, Flag) {
    Pair packet = __builtin_bit_cast(Pair, unit);
    if (!kEscapes && upper(packet.first) == kAbsent) packet.first ^= kSign;
    if (!kEscapes && upper(packet.second) == kAbsent) packet.second ^= kSign;
    return packet;
  }
  MPICOMM_DEVICE static bool has_come(const Pair& packet, Flag) {
    return upper(packet.first) != kAbsent && upper(packet.second) != kAbsent;
  }
  MPICOMM_DEVICE static Packet unit(const Pair& packet) { return __builtin_bit_cast(Packet, packet); }
  // Whether a packet needs an escape: a packet to send, or a packet that has come.
  MPICOMM_DEVICE static bool has_escape(const Pair& packet) {
    return kEscapes && (is_special(packet.first) || is_special(packet.second));
  }
  MPICOMM_DEVICE static void give_back(Pair* slot) {
    constexpr u64 absent = static_cast<u64>(kAbsent) << 32 | kAbsent;
    store_volatile(slot, {absent, absent});
  }

  // The host's copy is in arguments.py of packets; a test compares them.
  static constexpr u32 kAbsent = 0xFFF5A3C6;
  static constexpr u32 kEscaped = kAbsent ^ 1u << 31;
  static constexpr u64 kSign = 1ull << 63;  // the bit of a half in which kAbsent and kEscaped differ
  // The bits of an escape: the first half has kEscaped for kAbsent, the second half has it, and the
  // escape has come.
  static constexpr u32 kFirst = 1, kSecond = 2, kCome = 4;

  MPICOMM_DEVICE static u32 upper(u64 half) { return static_cast<u32>(half >> 32); }
  MPICOMM_DEVICE static bool is_special(u64 half) { return (upper(half) | 1u << 31) == kAbsent; }
};
static_assert((SentinelProtocol::kEscaped | 1u << 31) == SentinelProtocol::kAbsent, "they differ in the sign");

// Stores a packet that needs an escape. The two stores have no order and need none. A receiver that
// has seen the packet waits for the escape. The byte is zero until the escape comes, because the
// receiver reset it before the slot became free.
MPICOMM_DEVICE_CALL void store_escaped(Pair* slot, u8* escape, Pair packet) {
  using Protocol = SentinelProtocol;
  u32 code = Protocol::kCome;
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
static_assert(sizeof(Element) <= FlagProtocol::kUnitNbytes, "an element lies in one packet");
using Protocol = FlagProtocol;
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
