// The LL protocol (packet_protocols.cuh): packets of 16 bytes with 8 bytes of data. A flag beside
// each 4 bytes of data shows whether they have come.
#pragma once

#include "ll_flags.cuh"

namespace mpicomm {

// The LL protocol. The 8 bytes of a unit are its words[0] and words[1].
struct FlagProtocol {
  static constexpr u32 kUnitNbytes = 8;
  static constexpr bool kResetsSlots = false;
  using Flag = u32;

  MPICOMM_DEVICE static Flag flag(u64 count) { return flag_of(static_cast<u32>(count)); }
  MPICOMM_DEVICE static Pair packet(const Packet& unit, Flag flag) {
    const u64 high = static_cast<u64>(flag) << 32;
    return {high | unit.words[0], high | unit.words[1]};
  }
  // Each half has its flag, because the two halves may come one after the other.
  MPICOMM_DEVICE static bool has_arrived(const Pair& packet, Flag flag) {
    return static_cast<u32>(packet.first >> 32) == flag && static_cast<u32>(packet.second >> 32) == flag;
  }
  MPICOMM_DEVICE static Packet unit(const Pair& packet) {
    return {{static_cast<u32>(packet.first), static_cast<u32>(packet.second), 0, 0}};
  }
  MPICOMM_DEVICE static bool has_escape(const Pair&) { return false; }
  MPICOMM_DEVICE static void reset_slot(Pair*) {}
};

}  // namespace mpicomm
