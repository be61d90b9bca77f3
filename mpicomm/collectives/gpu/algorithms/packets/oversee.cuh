// How the overseers compare the calls of the ranks.
#pragma once

#include "packet_worker.cuh"

namespace mpicomm {

// The overseers of block 0 compare the calls of the ranks while the workers move data. That costs
// no time if the overseers do not end last and no worker waits for their fence. `ours` and `theirs`
// hold the previous launch.
MPICOMM_DEVICE void oversee(
    const Packets& x,
    const AllMessages& m,
    u32 launch,
    u32 peer,
    const Announcements& ours,
    const Announcements& theirs) {
  const Team& team = x.team;
  // A rank that took no packet in the previous launch could not notice then that a peer was in
  // another call.
  if (theirs.differ_from(ours, launch - 1)) report_mismatch(team, peer, launch - 1);
  const bool takes = kDeviceCounts || (x.sources >> peer & 1) != 0 || m.receive_nbytes[peer] > 0;
  if (takes || (kPaced && (m.paced >> peer & 1) != 0)) {
    // A packet does not say to which call it belongs. Its sender says that in an earlier
    // announcement. Pairs with the peer's store in `announce`.
    u32 announced = kAbsent;
    const auto absent = [&] {
      announced = check_announcement(team, peer, launch);
      return announced == kAbsent ? 1u << peer : 0u;
    };
    if (await_ranks(team, launch, absent) && announced == kDifferent) report_mismatch(team, peer, launch);
  }
}

}  // namespace mpicomm
