// The LL protocol (packet_protocols.cuh): packets of 16 bytes with 8 bytes of data. A flag beside each
// 4 bytes of data shows whether they have come.
//
// A flag is the number of a launch. These numbers come again after 2^30 launches, and a flag from the
// last round may still lie in its slot. So at the start of each round of numbers every rank wipes the
// flags in its inboxes.
#pragma once

#include "bytes.cuh"

namespace mpicomm {

constexpr u32 kFlagBits = 30;
constexpr u32 kFlagMask = (1u << kFlagBits) - 1;

// The number of a launch as a flag. It is never 0, because inboxes hold zeros at first.
MPICOMM_DEVICE u32 flag_of(u32 launch) { return (launch & kFlagMask) + 1; }

// The 8 bytes of a unit are its words[0] and words[1].
struct LLProtocol {
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

// The host's copy is in team.py; a test compares them.
struct LLInboxes {
  u8* sets;    // this rank's two sets of inboxes, one after the other, by the parity of the launch
  u64 nbytes;  // of one set
};

MPICOMM_DEVICE_CALL void wipe_flags(const LLInboxes& inboxes, u32 launch) {
  u8* const set = inboxes.sets + (launch + 1) % 2 * inboxes.nbytes;
  for (u64 at = static_cast<u64>(threadIdx.x) * kPacketNbytes; at < inboxes.nbytes; at += blockDim.x * kPacketNbytes) {
    store_volatile(reinterpret_cast<Pair*>(set + at), {0, 0});
  }
  // Every thread fences its wipes and then comes to the barrier. After the barrier, threads of this
  // block announce the launch. The fence pairs with the peers' loads of that announcement: after
  // these loads, the peers store packets in this set. Without the fence a wipe could arrive after
  // the packet of a peer and wipe out the packet.
  fence_system();
  __syncthreads();
}

// All threads of every block call this before a thread announces the launch. Launches 0 and 1 of
// each round of numbers wipe the set that the next launch uses. No peer stores in this set before
// the announcement of this launch, and this rank has taken all packets that peers stored there
// before. Every kernel that counts launches calls this. If launches 0 and 1 belonged to a kernel
// that does not, old flags would outlast the round.
MPICOMM_DEVICE void begin_round_of_flags(const LLInboxes& inboxes, u32 launch) {
  if (blockIdx.x == 0 && (launch & kFlagMask) < 2) wipe_flags(inboxes, launch);
}

}  // namespace mpicomm
