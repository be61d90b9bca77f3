// Packets of 16 bytes that say themselves whether they have come, on one of two wires, and how units of the message that
// they carry are read and written: a unit is what one thread looks for and carries.
//
// LL ("low latency"): 8 bytes of data, each 4 with a flag that is the number of the launch. It is the fastest up to some
// KiB.
//
// Sentinel: 16 bytes of data, no flag. A slot that has not been written holds the word kAbsent in the upper half of each
// of its two halves, each of which is stored as a whole; whoever has taken a packet puts that back. Data that has the word
// there itself is sent with kEscaped in its place. As a number that is another NaN, which will do where a reduction makes
// one NaN of all (and where it has a single contribution, which goes to one rank alone). All else has to arrive as it was: a
// packet with either of the words has an escape, a byte beside the slots of which zero says that it has not come, and which
// says else what the words stand for. The byte is put back with the slot. What needs that is rare.
#pragma once

#include "bytes.cuh"
#include "element.cuh"
#include "ll_flags.cuh"

namespace mpicomm {

// 8 bytes in words[0] and words[1] of a unit.
struct FlagWire {
  static constexpr u32 kUnitNbytes = 8;
  static constexpr bool kGivesBack = false;
  using Flag = u32;

  MPICOMM_DEVICE static Flag flag(u64 count) { return flag_of(static_cast<u32>(count)); }
  MPICOMM_DEVICE static Pair packet(const Packet& unit, Flag flag) {
    const u64 high = static_cast<u64>(flag) << 32;
    return {high | unit.words[0], high | unit.words[1]};
  }
  // Each half has a flag of its own, as the two may come one after the other.
  MPICOMM_DEVICE static bool has_come(const Pair& packet, Flag flag) {
    return static_cast<u32>(packet.first >> 32) == flag && static_cast<u32>(packet.second >> 32) == flag;
  }
  MPICOMM_DEVICE static Packet unit(const Pair& packet) {
    return {{static_cast<u32>(packet.first), static_cast<u32>(packet.second), 0, 0}};
  }
  MPICOMM_DEVICE static bool has_escape(const Pair&) { return false; }
  MPICOMM_DEVICE static void give_back(Pair*) {}
};

struct SentinelWire {
  static constexpr u32 kUnitNbytes = kPacketNbytes;
  static constexpr bool kGivesBack = true;
#if defined(MPICOMM_DTYPE)
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
  // Of a packet that is to be sent or has come.
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
  static constexpr u64 kSign = 1ull << 63;  // of a half: what its upper word differs in from the other of the two
  // An escape that has come: which of the halves have kEscaped for kAbsent.
  static constexpr u32 kFirst = 1, kSecond = 2, kCome = 4;

  MPICOMM_DEVICE static u32 upper(u64 half) { return static_cast<u32>(half >> 32); }
  MPICOMM_DEVICE static bool is_special(u64 half) { return (upper(half) | 1u << 31) == kAbsent; }
};
static_assert((SentinelWire::kEscaped | 1u << 31) == SentinelWire::kAbsent, "they differ in the sign");

// Stores a packet that needs an escape, in no order: who has seen the packet waits for the escape, whose byte is zero
// until then, as it was put back before the slot was free. Out of line, as is all that comes after it: a kernel waits for
// code that it jumps over.
MPICOMM_DEVICE_CALL void store_escaped(Pair* slot, u8* escape, Pair packet) {
  using Wire = SentinelWire;
  u32 code = Wire::kCome;
  if (Wire::upper(packet.first) == Wire::kAbsent) packet.first ^= Wire::kSign, code |= Wire::kFirst;
  if (Wire::upper(packet.second) == Wire::kAbsent) packet.second ^= Wire::kSign, code |= Wire::kSecond;
  store_volatile(slot, packet);
  store_volatile(escape, code);
}

// What was to be sent, by the escape of a packet.
MPICOMM_DEVICE Pair unescaped(const Pair& packet, u32 code) {
  using Wire = SentinelWire;
  const u64 first = (code & Wire::kFirst) != 0 ? Wire::kSign : 0, second = (code & Wire::kSecond) != 0 ? Wire::kSign : 0;
  return {packet.first ^ first, packet.second ^ second};
}

#if defined(MPICOMM_SENTINEL)
using Wire = SentinelWire;
#else
static_assert(sizeof(Element) <= FlagWire::kUnitNbytes, "an element lies in one packet");
using Wire = FlagWire;
#endif
constexpr u32 kUnitNbytes = Wire::kUnitNbytes;

// What is not as wide as it could be: at the end of an array, and in arrays that lie anywhere. Out of line, as above.
MPICOMM_DEVICE_CALL Packet load_narrow(const u8* from, u32 width, u32 nbytes) { return load_any(from, width, nbytes); }
MPICOMM_DEVICE_CALL void store_narrow(u8* to, Packet packet, u32 width, u32 nbytes) {
  store_any(to, packet, width, nbytes);
}

// The unit that begins at `at` of an array, which is before `nbytes`; what lies behind that is zero.
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
