// The flags of the LL wire, and what keeps old ones from being taken for new: they are numbers of launches, which come
// again after 2^30, and one that was stored then may still lie in its slot.
#pragma once

#include "bytes.cuh"

namespace mpicomm {

constexpr u32 kFlagBits = 30;
constexpr u32 kFlagMask = (1u << kFlagBits) - 1;

// The number of a launch as a flag: never 0, which is what inboxes hold at first.
MPICOMM_DEVICE u32 flag_of(u32 launch) { return (launch & kFlagMask) + 1; }

// The host's copy is in ll_flags.py; a test compares them.
struct FlaggedInboxes {
  u8* sets;    // this rank's two, one after the other, by the parity of the launch
  u64 nbytes;  // of a set
};

MPICOMM_DEVICE_CALL void wipe_flags(const FlaggedInboxes& inboxes, u32 launch) {
  u8* const set = inboxes.sets + (launch + 1) % 2 * inboxes.nbytes;
  for (u64 at = static_cast<u64>(threadIdx.x) * kPacketNbytes; at < inboxes.nbytes; at += blockDim.x * kPacketNbytes) {
    store_volatile(reinterpret_cast<Pair*>(set + at), {0, 0});
  }
  // Of every thread, before the barrier, behind which threads of this block announce the launch. Pairs with the peers'
  // look at that, after which they store here: what they have stored would else be wiped by a store that comes late.
  fence_system();
  __syncthreads();
}

// By all threads of every block, before the launch is announced. Launches 0 and 1 of each round of numbers wipe the set
// that the next one uses: nobody writes there before this one is announced, and all that was written there has been
// taken. Every kernel that counts launches does: were these two of another kind, old flags would outlast the round.
MPICOMM_DEVICE void begin_round_of_flags(const FlaggedInboxes& inboxes, u32 launch) {
  if (blockIdx.x == 0 && (launch & kFlagMask) < 2) wipe_flags(inboxes, launch);
}

}  // namespace mpicomm
