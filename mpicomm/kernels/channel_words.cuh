// The words by which two blocks, a sender and a receiver, hand slots of memory to each other: {epoch, tag}.
#pragma once

#include "team.cuh"

namespace mpicomm {

MPICOMM_DEVICE u64 word_of(u32 epoch, u32 tag) { return static_cast<u64>(epoch) << 32 | tag; }
MPICOMM_DEVICE u32 epoch_of(u64 word) { return static_cast<u32>(word >> 32); }

// Whether another rank has told this one that it has given up. Pairs with its store in raise_abort; relaxed, as the word
// says everything.
MPICOMM_DEVICE bool is_told(const Team& team) { return load_relaxed(abort_word(team, team.rank)) != 0; }

// Whether a wait has not ended in vain. If it has, the other ranks are told, or it is recorded that this one was.
MPICOMM_DEVICE bool lasts(const Team& team, const Watch& watch, SpinEnd end) {
  if (end == kTimeUp) raise_abort(team, watch);
  if (end == kLeft) heed_abort(team, watch.block, load_relaxed(abort_word(team, team.rank)));
  return end == kReached;
}

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
    return static_cast<i32>(epoch_of(value) - epoch) >= 0;
  };
  if (!lasts(team, watch, spin(reached, [&] { return is_told(team); }, watch))) return false;
  if (((static_cast<u32>(value) ^ tag) & mask) == 0) return true;
  const Watch mismatch{watch.faults, 0, kMismatch, watch.sequence, watch.block, watch.peer};
  report_fault(mismatch, 0);
  raise_abort(team, mismatch);
  return false;
}

// Waits, as a warp, until `reached` is true of all its lanes, which go on or leave together. False means that the kernel
// must leave.
template <class Reached>
MPICOMM_DEVICE bool await_together(const Team& team, const Watch& watch, u32 lane, Reached reached) {
  Spell spell;
  for (u32 poll = 0;; ++poll) {
    if (__all_sync(kWarp, reached())) return true;
    if (poll < kPollsBeforeClock) continue;
    // One lane decides: clocks of several would differ, and some leave while the others wait for them.
    const bool goes_on = lane != 0 || lasts(team, watch, spell.end([&] { return is_told(team); }, watch));
    if (!__all_sync(kWarp, goes_on)) return false;
  }
}

}  // namespace mpicomm
