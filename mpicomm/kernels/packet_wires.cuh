// Packets of 16 bytes that say themselves whether they have come, on one of three wires, and how units of the message
// that they carry are read and written.
//
// LL ("low latency"): 8 bytes of data, each 4 with a flag that is the number of the launch. It carries
// anything, and is the fastest up to some KiB. Sentinel: 16 bytes of data, no flag; a slot that holds all ones, which is
// a NaN, has not been written, and whoever has taken a packet puts the ones back. It carries what is going to be reduced
// as floating-point numbers: a NaN of just those bits becomes another NaN on the way. LL128: the packets of eight
// threads are a line of 128 bytes, all data but for 8 bytes of flag at its end. It carries anything, and relies on the
// eight accesses of a line being one: see load_lines.
//
// A group is the threads that look for packets together, and a unit what one of them carries: units of a group lie
// together.
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

// What the wires have in common on which each thread looks for its packets alone, of `unit_nbytes` each.
template <u32 unit_nbytes>
struct SinglePackets {
  static constexpr u32 kUnitNbytes = unit_nbytes;
  static constexpr u32 kGroup = 1;
  static constexpr u32 kGroupNbytes = kUnitNbytes;

  MPICOMM_DEVICE static Pair load(const Pair* slot) { return load_volatile(slot); }
  MPICOMM_DEVICE static void store(Pair* slot, const Pair& packet) { store_volatile(slot, packet); }
  MPICOMM_DEVICE static void store_flag(Pair* slot, const Pair& packet) { store_volatile(slot, packet); }
  MPICOMM_DEVICE static bool agree(bool lasts) { return lasts; }
  MPICOMM_DEVICE static u32 begin() { return 0; }
  MPICOMM_DEVICE static u32 end() { return kUnitNbytes; }
};

// 8 bytes in words[0] and words[1] of a unit.
struct FlagWire : SinglePackets<8> {
  static constexpr bool kGivesBack = false;
  using Flag = u32;

  MPICOMM_DEVICE static Flag flag(u64 count, u32) { return flag_of(static_cast<u32>(count)); }
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
  MPICOMM_DEVICE static void give_back(Pair*) {}
};

struct SentinelWire : SinglePackets<kPacketNbytes> {
  static constexpr bool kGivesBack = true;
  struct Flag {};
  static constexpr u64 kOnes = ~0ull;
  static constexpr u32 kOtherNan = kNanNbytes<Element> == 1   ? 0x7F7F7F7Fu
                                   : kNanNbytes<Element> == 2 ? 0x7FFF7FFFu
                                                              : 0x7FFFFFFFu;

  MPICOMM_DEVICE static Flag flag(u64, u32) { return {}; }
  MPICOMM_DEVICE static Pair packet(Packet unit, Flag) {
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
  MPICOMM_DEVICE static bool has_come(const Pair& packet, Flag) {
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

// 16 bytes in a unit, 8 in that of the last thread of each eight, whose other 8 are the line's flag. Lines of all
// launches lie alike, so that where a flag is looked for there never was anything else. A flag comes again after 2^44
// launches. A warp is one group, though it has four lines: its threads do everything together, which makes one access of
// what they access.
struct LineWire {
  static constexpr u32 kUnitNbytes = kPacketNbytes;
  static constexpr u32 kGroup = 32;
  static constexpr u32 kGroupNbytes = kGroup * kUnitNbytes - kGroup / kLineThreads * sizeof(u64);
  static constexpr bool kGivesBack = false;
  using Flag = u64;

  MPICOMM_DEVICE static Flag flag(u64 count, u32 step) { return count << 20 | step; }
  MPICOMM_DEVICE static Pair load(const Pair* slot) { return load_lines(slot, ends_line()); }
  MPICOMM_DEVICE static void store(Pair* slot, const Pair& packet) { store_lines(slot, packet, ends_line()); }
  // For who needs no data.
  MPICOMM_DEVICE static void store_flag(Pair* slot, const Pair& packet) {
    if (ends_line()) store_volatile(slot, packet);
  }
  MPICOMM_DEVICE static Pair packet(const Packet& unit, Flag flag) {
    const Pair pair = __builtin_bit_cast(Pair, unit);
    return {pair.first, ends_line() ? flag : pair.second};
  }
  MPICOMM_DEVICE static bool has_come(const Pair& packet, Flag flag) {
    return __all_sync(kWarp, !ends_line() || packet.second == flag) != 0;
  }
  MPICOMM_DEVICE static Packet unit(const Pair& packet) {
    return __builtin_bit_cast(Packet, Pair{packet.first, ends_line() ? 0 : packet.second});
  }
  MPICOMM_DEVICE static void give_back(Pair*) {}
  MPICOMM_DEVICE static bool agree(bool lasts) { return __all_sync(kWarp, lasts) != 0; }

  MPICOMM_DEVICE static bool ends_line() { return threadIdx.x % kLineThreads == kLineThreads - 1; }
  // What this thread carries of its group's bytes.
  MPICOMM_DEVICE static u32 begin() {
    const u32 lane = threadIdx.x % kGroup;
    return lane * kUnitNbytes - lane / kLineThreads * sizeof(u64);
  }
  MPICOMM_DEVICE static u32 end() { return begin() + (ends_line() ? sizeof(u64) : kUnitNbytes); }
};

#if defined(MPICOMM_SENTINEL)
static_assert(kNanNbytes<Element> != 0, "only numbers that can be NaN leave a pattern free");
using Wire = SentinelWire;
#elif defined(MPICOMM_LINES)
static_assert(sizeof(Element) <= sizeof(u64), "an element lies in one packet");
using Wire = LineWire;
#else
static_assert(sizeof(Element) <= FlagWire::kUnitNbytes, "an element lies in one packet");
using Wire = FlagWire;
#endif
constexpr u32 kUnitNbytes = Wire::kUnitNbytes;

// What is not as wide as it could be: at the end of an array, and in arrays that lie anywhere. Out of line, as a kernel
// waits for code that it jumps over.
MPICOMM_DEVICE_CALL Packet load_narrow(const u8* from, u32 width, u32 nbytes) { return load_any(from, width, nbytes); }
MPICOMM_DEVICE_CALL void store_narrow(u8* to, Packet packet, u32 width, u32 nbytes) {
  store_any(to, packet, width, nbytes);
}

// Eight bytes of an array, or those of them that lie before `end`; the rest is zero.
MPICOMM_DEVICE u64 load_half(const u8* array, u32 width, u64 at, u64 end) {
  if (at >= end) return 0;
  if (width >= 8 && end - at >= 8) return *reinterpret_cast<const u64*>(array + at);
  const Packet packet = load_narrow(array + at, width, end - at < 8 ? end - at : 8);
  return static_cast<u64>(packet.words[1]) << 32 | packet.words[0];
}
MPICOMM_DEVICE void store_half(u8* array, u32 width, u64 at, u64 end, u32 low, u32 high) {
  if (at >= end) return;
  if (width >= 8 && end - at >= 8) {
    *reinterpret_cast<u64*>(array + at) = static_cast<u64>(high) << 32 | low;
  } else {
    store_narrow(array + at, {{low, high, 0, 0}}, width, end - at < 8 ? end - at : 8);
  }
}

// Where the unit of this thread begins and ends, in the group that begins at `at`.
struct Within {
  u64 begin, end;

  MPICOMM_DEVICE Within(u64 at, u64 nbytes) : begin(at + Wire::begin()), end(at + Wire::end()) {
    if (nbytes < end) end = nbytes;
  }
};

// This thread's unit of the group that begins at `at`, which is before `nbytes`.
MPICOMM_DEVICE Packet load_unit(const u8* array, u32 width, u64 at, u64 nbytes) {
  const Within unit(at, nbytes);
  if constexpr (kUnitNbytes == kPacketNbytes && Wire::kGroup == 1) {
    if (width >= kUnitNbytes && nbytes - at >= kUnitNbytes) return load_aligned(array + at);
    return load_narrow(array + at, width, unit.end - at);
  }
  const u64 low = load_half(array, width, unit.begin, unit.end);
  const u64 high = kUnitNbytes == 8 ? 0 : load_half(array, width, unit.begin + 8, unit.end);
  return __builtin_bit_cast(Packet, Pair{low, high});
}

MPICOMM_DEVICE void store_unit(u8* array, u32 width, u64 at, u64 nbytes, const Packet& packet) {
  const Within unit(at, nbytes);
  if constexpr (kUnitNbytes == kPacketNbytes && Wire::kGroup == 1) {
    if (width >= kUnitNbytes && nbytes - at >= kUnitNbytes) return store_aligned(array + at, packet);
    return store_narrow(array + at, packet, width, unit.end - at);
  }
  store_half(array, width, unit.begin, unit.end, packet.words[0], packet.words[1]);
  if constexpr (kUnitNbytes > 8) {
    store_half(array, width, unit.begin + 8, unit.end, packet.words[2], packet.words[3]);
  }
}

}  // namespace mpicomm
