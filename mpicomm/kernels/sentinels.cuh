// The sentinel protocol (packet_protocols.cuh): packets of 16 bytes of data without a flag.
//
// In a slot without a packet, the upper word of each half is kAbsent. The sender stores each half as
// a whole. So a half has come after its upper word differs from kAbsent. A receiver that has taken a
// packet resets the slot: it stores kAbsent there again.
//
// The data itself may have the word kAbsent in one of these two words. Then the sender stores
// kEscaped, which differs in the sign. The rest depends on the data (kEscapes):
// - As a number, kEscaped is another NaN. A reduction that makes one NaN of all NaNs (kMakesOneNan)
//   needs no more. If it has a single contribution, the changed NaN stays, but only one rank
//   receives this contribution. An epilogue may make any NaN. Packets carry the results of an
//   epilogue if they have the type of the elements. Rows of experts are numbers, too. In each of
//   their types, also with 8 bits, the last element of kAbsent is a NaN, and kEscaped differs in its
//   sign.
// - All other data has to arrive unchanged. A packet with kAbsent or kEscaped in one of the two
//   words has an escape: a byte beside the slots. The byte is zero until the sender stores in it
//   which of the two words were kAbsent. The receiver resets the byte with the slot. Such data is
//   rare.
#pragma once

#include "bytes.cuh"

namespace mpicomm {

template <bool escapes>
struct Sentinels {
  static constexpr u32 kUnitNbytes = kPacketNbytes;
  static constexpr bool kResetsSlots = true;
  static constexpr bool kEscapes = escapes;
  struct Flag {};

  MPICOMM_DEVICE static Flag flag(u64) { return {}; }
  MPICOMM_DEVICE static Pair packet(const Packet& unit, Flag) {
    Pair packet = __builtin_bit_cast(Pair, unit);
    if (!kEscapes && upper(packet.first) == kAbsent) packet.first ^= kSign;
    if (!kEscapes && upper(packet.second) == kAbsent) packet.second ^= kSign;
    return packet;
  }
  MPICOMM_DEVICE static bool has_arrived(const Pair& packet, Flag) {
    return upper(packet.first) != kAbsent && upper(packet.second) != kAbsent;
  }
  MPICOMM_DEVICE static Packet unit(const Pair& packet) { return __builtin_bit_cast(Packet, packet); }
  // Whether a packet needs an escape: a packet to send, or a packet that has come.
  MPICOMM_DEVICE static bool has_escape(const Pair& packet) {
    return kEscapes && (is_special(packet.first) || is_special(packet.second));
  }
  MPICOMM_DEVICE static void reset_slot(Pair* slot) {
    constexpr u64 absent = static_cast<u64>(kAbsent) << 32 | kAbsent;
    store_volatile(slot, {absent, absent});
  }

  // The host's copy is in team.py; a test compares them.
  static constexpr u32 kAbsent = 0xFFF5A3C6;
  static constexpr u32 kEscaped = kAbsent ^ 1u << 31;
  static constexpr u64 kSign = 1ull << 63;  // the bit of a half in which kAbsent and kEscaped differ
  static_assert((kEscaped | 1u << 31) == kAbsent, "they differ in the sign");
  // The bits of an escape: the first half has kEscaped for kAbsent, the second half has it, and the
  // escape has come.
  static constexpr u32 kFirst = 1, kSecond = 2, kArrived = 4;

  MPICOMM_DEVICE static u32 upper(u64 half) { return static_cast<u32>(half >> 32); }
  MPICOMM_DEVICE static bool is_special(u64 half) { return (upper(half) | 1u << 31) == kAbsent; }
};

}  // namespace mpicomm
