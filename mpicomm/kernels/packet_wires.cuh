// Packets of 16 bytes that say themselves whether they have come, on one of two wires, and how units of the message that
// they carry are read and written.
//
// Two wires. LL ("low latency"): 8 bytes of data, each 4 with a flag that is the number of the launch. It carries
// anything, and is the faster one up to some KiB. Sentinel: 16 bytes of data, no flag; a slot that holds all ones,
// which is a NaN, has not been written, and whoever has taken a packet puts the ones back. It carries what is going to
// be reduced as floating-point numbers: a NaN of just those bits becomes another NaN on the way.
#pragma once

#include "bytes.cuh"
#include "element.cuh"

namespace mpicomm {

constexpr u32 kFlagBits = 30;

template <class T>
constexpr u32 kNanNbytes = 0;  // of the floating-point numbers in a T, 0 if there are none
template <>
constexpr u32 kNanNbytes<float> = 4;
template <>
constexpr u32 kNanNbytes<double> = 8;
template <class F>
constexpr u32 kNanNbytes<Complex<F>> = sizeof(F);
template <class Bits, u32... format>
constexpr u32 kNanNbytes<Small<Bits, format...>> = sizeof(Bits);

// The number of a launch as the LL wire's flag: never 0, which is what inboxes hold at first.
MPICOMM_DEVICE u32 flag_of(u32 launch) { return (launch & ((1u << kFlagBits) - 1)) + 1; }

// 8 bytes in words[0] and words[1] of a unit.
struct FlagWire {
  static constexpr u32 kUnitNbytes = 8;

  MPICOMM_DEVICE static Pair packet(const Packet& unit, u32 flag) {
    const u64 high = static_cast<u64>(flag) << 32;
    return {high | unit.words[0], high | unit.words[1]};
  }
  // Each half has a flag of its own, as the two may come one after the other.
  MPICOMM_DEVICE static bool has_come(const Pair& packet, u32 flag) {
    return static_cast<u32>(packet.first >> 32) == flag && static_cast<u32>(packet.second >> 32) == flag;
  }
  MPICOMM_DEVICE static Packet unit(const Pair& packet) {
    return {{static_cast<u32>(packet.first), static_cast<u32>(packet.second), 0, 0}};
  }
  MPICOMM_DEVICE static void give_back(Pair*) {}
};

struct SentinelWire {
  static constexpr u32 kUnitNbytes = kPacketNbytes;
  static constexpr u64 kOnes = ~0ull;
  static constexpr u32 kOtherNan = kNanNbytes<Element> == 1   ? 0x7F7F7F7Fu
                                   : kNanNbytes<Element> == 2 ? 0x7FFF7FFFu
                                                              : 0x7FFFFFFFu;

  MPICOMM_DEVICE static Pair packet(Packet unit, u32) {
    if constexpr (kNanNbytes<Element> == 8) {
      Pair pair = __builtin_bit_cast(Pair, unit);
      if (pair.first == kOnes) pair.first = kOnes >> 1;
      if (pair.second == kOnes) pair.second = kOnes >> 1;
      return pair;
    } else {
#pragma unroll
      for (u32 word = 0; word < 4; ++word) {
        if (unit.words[word] == ~0u) unit.words[word] = kOtherNan;
      }
      return __builtin_bit_cast(Pair, unit);
    }
  }
  // Each piece that is stored as a whole is looked at by itself: 8 bytes of doubles, which may have a word of ones, and
  // words of everything else.
  MPICOMM_DEVICE static bool has_come(const Pair& packet, u32) {
    if constexpr (kNanNbytes<Element> == 8) {
      return packet.first != kOnes && packet.second != kOnes;
    } else {
      const Packet words = __builtin_bit_cast(Packet, packet);
      return words.words[0] != ~0u && words.words[1] != ~0u && words.words[2] != ~0u && words.words[3] != ~0u;
    }
  }
  MPICOMM_DEVICE static Packet unit(const Pair& packet) { return __builtin_bit_cast(Packet, packet); }
  MPICOMM_DEVICE static void give_back(Pair* slot) { store_volatile(slot, {kOnes, kOnes}); }
};

#if defined(MPICOMM_SENTINEL)
static_assert(kNanNbytes<Element> != 0, "only numbers that can be NaN leave a pattern free");
using Wire = SentinelWire;
#else
static_assert(sizeof(Element) <= FlagWire::kUnitNbytes, "an element lies in one packet");
using Wire = FlagWire;
#endif
constexpr u32 kUnitNbytes = Wire::kUnitNbytes;

MPICOMM_DEVICE Packet load_unit(const u8* array, u32 width, u64 at, u64 nbytes) {
  const u64 left = nbytes - at;
  if (width >= kUnitNbytes && left >= kUnitNbytes) {
    if constexpr (kUnitNbytes == 16) return load_aligned(array + at);
    const u64 both = *reinterpret_cast<const u64*>(array + at);
    return {{static_cast<u32>(both), static_cast<u32>(both >> 32), 0, 0}};
  }
  return load_any(array + at, width, left < kUnitNbytes ? left : kUnitNbytes);
}

MPICOMM_DEVICE void store_unit(u8* array, u32 width, u64 at, u64 nbytes, const Packet& unit) {
  const u64 left = nbytes - at;
  if (width >= kUnitNbytes && left >= kUnitNbytes) {
    if constexpr (kUnitNbytes == 16) return store_aligned(array + at, unit);
    *reinterpret_cast<u64*>(array + at) = static_cast<u64>(unit.words[1]) << 32 | unit.words[0];
    return;
  }
  store_any(array + at, unit, width, left < kUnitNbytes ? left : kUnitNbytes);
}

}  // namespace mpicomm
