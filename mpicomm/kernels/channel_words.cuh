// Channels: how a sender hands chunks of data to a receiver through slots, with flags and credit.
// In exchange.cu and sendrecv.cu two blocks of two ranks form a channel. In chain.cu two warps form
// a channel, and its slots hold packets: the top of that file describes the differences.
//
// Slots. A channel has N slots in the memory of the receiver. The sender stores a chunk in a slot,
// and the receiver takes it from the slot, first in first out.
//
// Epochs. The two sides count the chunks of a channel for ever: chunk e, of epoch e, lies in slot
// e % N. The sender and the receiver each keep the count in their memory, and the kernel advances
// it. So a captured graph can run again for ever, and the ranks reset nothing and agree on nothing
// between two launches. Epochs have 32 bits and wrap around, so comparisons use the sign of the
// difference.
//
// Flag. Each slot has a word in the memory of the receiver. The sender stores {e, tag} in this word
// after chunk e is in the slot. The tag names the call or the message of the chunk.
//
// Credit. Each channel has a word in the memory of the sender. The receiver stores {e} there after
// it is done with chunk e, and so with all chunks before. The sender waits for credit e - N before
// it stores chunk e. Otherwise it would overwrite a chunk that the receiver has not taken. The flag
// of chunk e follows the credit, too. So the receiver has seen the flag of chunk e - N before the
// flag of chunk e overwrites the same word.
//
//     sender                                             receiver
//     while (load_acquire(credit) < e - N) {}            while (load_acquire(flag) < e) {}
//     __syncthreads()                                    __syncthreads()
//     slot = chunk (all threads)                         ... = slot (all threads)
//     __syncthreads()                                    __syncthreads()
//     store_release(flag, e)                             store_release(credit, e)
//
// On each side one thread waits for the words of a channel and stores them. The barriers order the
// accesses of its whole block between the wait and the store. All accesses to the words have system
// scope, because the other side is another device.
// - The release of a flag pairs with the acquire of the receiver in await_epoch. It publishes the
//   chunk: at the barrier, the releasing thread has seen the stores of its whole block. A plain
//   store could arrive before the data. With a plain load the receiver could read the slot first.
//   In both cases the receiver would take the previous content of the slot.
// - The release of credit pairs with the acquire of the sender in await_epoch. It says that the
//   receiver has ended its loads of the slot, which come before the barrier. A plain store could
//   overtake these loads. With a plain load the stores of the sender to the slot could overtake the
//   load. In both cases the sender would overwrite data while the receiver still reads it.
#pragma once

#include "team.cuh"

namespace mpicomm {

MPICOMM_DEVICE u64 word_of(u32 epoch, u32 tag) { return static_cast<u64>(epoch) << 32 | tag; }
MPICOMM_DEVICE u32 epoch_of(u64 word) { return static_cast<u32>(word >> 32); }

// Whether another rank has given up, and has aborted this rank. Pairs with the store in raise_abort.
// The load is relaxed, because the word publishes no other data.
MPICOMM_DEVICE bool is_aborted(const Team& team) { return load_relaxed(abort_word(team, team.rank)) != 0; }

// Whether a wait ended because its word was reached. If time was up, this rank aborts the others. If
// another rank has aborted this rank, this rank records the reason.
MPICOMM_DEVICE bool end_wait(const Team& team, const Watch& watch, SpinEnd end) {
  if (end == kTimeUp) raise_abort(team, watch);
  if (end == kLeft) record_abort(team, watch.block, load_relaxed(abort_word(team, team.rank)));
  return end == kReached;
}

// Whether a flag or credit has come to `epoch`. Signed, because epochs wrap around. Credit may be ahead
// of the number that the sender waits for.
MPICOMM_DEVICE bool has_reached(u64 value, u32 epoch) { return static_cast<i32>(epoch_of(value) - epoch) >= 0; }

// Whether the tag of a flag agrees with `tag` in the bits of `mask`.
MPICOMM_DEVICE bool is_same(u64 value, u32 tag, u32 mask) { return ((static_cast<u32>(value) ^ tag) & mask) == 0; }

// Gives up because the tag of a flag belongs to another call. Returns false.
MPICOMM_DEVICE_CALL bool report_tag_mismatch(const Team& team, const Watch& watch) {
  const Watch mismatch{watch.faults, 0, kMismatch, watch.sequence, watch.block, watch.peer};
  report_fault(mismatch, 0);
  raise_abort(team, mismatch);
  return false;
}

// Waits until the epoch of `word`, a flag or credit, has come to the number in `watch`. Then the
// tag of the word must agree with `tag` in the bits of `mask`. If the result is false, the kernel
// must leave: time is up, the tag belongs to another call, or another rank has given up.
MPICOMM_DEVICE bool await_epoch(const Team& team, const u64* word, const Watch& watch, u32 tag, u32 mask) {
  u64 value = 0;
  const auto reached = [&] {
    // If `word` is a flag, the load pairs with the store_release of the sender, which publishes the
    // chunk. If it is credit, the load pairs with the store_release of the receiver after its loads
    // of the slot. The top of this file says why a plain load would be wrong. The barrier that
    // follows orders the other threads of the block after this load.
    value = load_acquire(word);
    return has_reached(value, static_cast<u32>(watch.sequence));
  };
  if (!end_wait(team, watch, spin(reached, [&] { return is_aborted(team); }, watch))) return false;
  return is_same(value, tag, mask) || report_tag_mismatch(team, watch);
}

// Waits until `reached` returns true on all lanes of the warp, which go on or leave together. If
// the result is false, the kernel must leave.
template <class Reached>
MPICOMM_DEVICE bool await_together(const Team& team, const Watch& watch, u32 lane, Reached reached) {
  SpinTimer timer;
  for (u32 poll = 0;; ++poll) {
    if (__all_sync(kWarp, reached())) return true;
    if (poll < kPollsBeforeClock) continue;
    // One lane decides for all lanes. Lanes read the clock at different times, so some would leave
    // while the others wait for them.
    const bool goes_on = lane != 0 || end_wait(team, watch, timer.check([&] { return is_aborted(team); }, watch));
    if (!__all_sync(kWarp, goes_on)) return false;
  }
}

}  // namespace mpicomm
