// Rows of few tokens travel as packets of the sentinel protocol, without flags: a release would take longer than the row.
// Each packet shows by itself that it has come. The receiver takes the packets of a part, and resets their slots, which
// lie in the row of a receive slot. When the receive slot is free (experts.cuh), the launch that took its packets has
// ended. So the slots are empty again.
#pragma once

#include "experts.cuh"
#include "sentinels.cuh"

namespace mpicomm {

// A row may come with another sign of a NaN: see sentinels.cuh.
using Pushed = Sentinels<false>;

// Stores a part into the slots of a row of a peer. Nothing needs to follow. Pairs with the loads in `take_part`.
MPICOMM_DEVICE void push_part(const Packets& packets, u8* row, const Part& part) {
#pragma unroll
  for (u32 i = 0; i < kPartPackets; ++i) {
    if (part.has(i)) store_volatile(reinterpret_cast<Pair*>(row + part.at(i)), Pushed::packet(packets.of[i], {}));
  }
}

// Waits for the packets of a part from `peer`, and resets their slots in `row`. If the result is false, the kernel must
// leave. All lanes of the warp call it.
MPICOMM_DEVICE bool take_part(
    const Experts& x, u32 operation, const Launch& launch, u32 peer, u8* row, const Part& part, Packets& packets) {
  const auto have_arrived = [&] {
    bool all = true;
#pragma unroll
    for (u32 i = 0; i < kPartPackets; ++i) {
      if (!part.has(i)) continue;
      const Pair packet = load_volatile(reinterpret_cast<const Pair*>(row + part.at(i)));
      all &= Pushed::has_arrived(packet, {});
      packets.of[i] = Pushed::unit(packet);
    }
    return all;
  };
  // Most often the packets have come. Then the lane need not make a watch, which takes registers.
  const bool ok = have_arrived() || await_peer(x, operation, launch.number, peer, have_arrived);
  if (!__all_sync(kWarp, ok)) return false;
#pragma unroll
  for (u32 i = 0; i < kPartPackets; ++i) {
    if (part.has(i)) Pushed::reset_slot(reinterpret_cast<Pair*>(row + part.at(i)));
  }
  return true;
}

}  // namespace mpicomm
