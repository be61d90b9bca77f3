// The words by which two blocks, a sender and a receiver, hand slots of memory to each other: {epoch, tag}.
#pragma once

#include "team.cuh"

namespace mpicomm {

MPICOMM_DEVICE u64 word_of(u32 epoch, u32 tag) { return static_cast<u64>(epoch) << 32 | tag; }

// Waits until the epoch of `word` has come to the number that `watch` names; the bits of `mask` of its tag must be those
// of `tag` then. False means that the kernel must leave: time is up, the tag is another call's, or another rank has
// given up.
MPICOMM_DEVICE bool await_epoch(const Team& team, const u64* word, const Watch& watch, u32 tag, u32 mask) {
  const u32 epoch = static_cast<u32>(watch.sequence);
  u64 value = 0;
  const auto reached = [&] {
    // For a flag: pairs with the sender's store_release of it; what that publishes is the chunk in the slot. Were it a
    // plain load, the block could read the slot first and take what the slot held before.
    // For a credit: pairs with the receiver's store_release of that; it says that its reads of the slot are over. Were
    // it a plain load, the block's stores to the slot could overtake them. System scope, the other side being another
    // device. The other threads of the block are ordered after this one by the barrier that follows.
    value = load_acquire(word);
    // Signed, as epochs wrap: a credit may be ahead of what is asked for.
    return static_cast<i32>(static_cast<u32>(value >> 32) - epoch) >= 0;
  };
  const auto leave = [&] { return load_relaxed(abort_word(team, team.rank)) != 0; };
  const SpinEnd end = spin(reached, leave, watch);
  if (end == kTimeUp) raise_abort(team, watch);
  if (end == kLeft) heed_abort(team, watch.block, load_relaxed(abort_word(team, team.rank)));
  if (end != kReached) return false;
  if (((static_cast<u32>(value) ^ tag) & mask) == 0) return true;
  const Watch mismatch{watch.faults, 0, kMismatch, watch.sequence, watch.block, watch.peer};
  report_fault(mismatch, 0);
  raise_abort(team, mismatch);
  return false;
}

}  // namespace mpicomm
