// Point-to-point signals: a counter that one rank raises in the memory of another, which waits for it; and counts of
// messages, which lie in memory of the sender. What a captured graph holds are the signals alone.
//
// Each direction of each pair has three words: `sent` (the signaller's own count), `inbox` (in the waiter's memory,
// written by the signaller alone) and `expected` (the waiter's own count). Counts only grow and live in device memory,
// so a captured graph that holds these kernels can be replayed for ever. One thread each: `sent` and `expected` belong
// to one stream at a time, which is why they need no atomics.

#include "faults.cuh"

using mpicomm::FaultRecord;
using mpicomm::u32;
using mpicomm::u64;

// Adds 1 to `sent` and publishes it at `inbox`, after all earlier work of the stream.
MPICOMM_KERNEL void mpicomm_signal(u64* sent, u64* inbox, const u32* failed) {
  const u64 count = *sent + 1;
  // After a wait that failed, what this rank computed is not what it should be. It says nothing more: its peers then
  // run out of time too and raise, instead of reading wrong data as if all were well. Pairs with report_fault:
  // a wait of this stream was an earlier kernel, whose store is there.
  if (mpicomm::load_relaxed(failed) != mpicomm::kClear) return;
  *sent = count;
  // Earlier kernels and copies of this stream have finished, so this thread has seen what they wrote, here and in
  // peers' memory, and the release publishes it with the count; a plain store could become visible before that data.
  // Pairs with the acquire in mpicomm_wait_signal.
  mpicomm::store_release(inbox, count);
}

// Adds 1 to `expected` and returns once `inbox` has reached it, or `timeout_ns` later with a fault record.
MPICOMM_KERNEL void mpicomm_wait_signal(
    u64* expected, const u64* inbox, u32 peer, u64 timeout_ns, FaultRecord* record, const u32* failed) {
  const u64 target = *expected + 1;
  const mpicomm::Watch watch{{record, failed}, timeout_ns, mpicomm::kWaitSignal, target, 0, peer};
  // The acquire pairs with the release in mpicomm_signal: what the peer put before its signal is there for all later
  // work of this stream. The difference is signed, as for every flag: a count that is ahead (several signals before
  // this wait) also lets it through.
  const auto reached = [=] { return static_cast<long long>(mpicomm::load_acquire(inbox) - target) >= 0; };
  if (mpicomm::spin_until(reached, watch)) *expected = target;
}

// Publishes at `word` that what `count` counts is done, after all earlier work of the stream. The host says which count,
// as it has matched the message: no graph can hold this kernel. `word` lies in the sender's memory; it is its `ready`,
// stored by itself, or its `done`, stored by the receiver across the link.
MPICOMM_KERNEL void mpicomm_publish(u64* word, u64 count, const u32* failed) {
  // As in mpicomm_signal: after a wait that failed neither `ready` may say that what this rank sends is right, nor `done`
  // that a message was taken, whose memory would be used again.
  if (mpicomm::load_relaxed(failed) != mpicomm::kClear) return;
  // Pairs with the acquire in mpicomm_await (`ready`): the copies into the outbox, earlier work of this stream, are
  // published with it; before them the receiver would copy what an earlier message has left there. And with the host's
  // copy of the words in Outbox._reclaim (`done`): the receiver's copies out of the outbox are over; else the next
  // message would be written over what is still being read.
  mpicomm::store_release(word, count);
}

// Returns once `word` has reached `target`, or `timeout_ns` later with a fault record of message `number`.
MPICOMM_KERNEL void mpicomm_await(const u64* word, u64 target, u64 number, u32 peer, u64 timeout_ns,
                                  FaultRecord* record, const u32* failed) {
  const mpicomm::Watch watch{{record, failed}, timeout_ns, mpicomm::kMessage, number, 0, peer};
  // Pairs with the release in mpicomm_publish: the copies that follow on this stream read what the sender's have
  // written. Signed, as for every flag: later pieces may have come too.
  const auto reached = [=] { return static_cast<long long>(mpicomm::load_acquire(word) - target) >= 0; };
  // Nothing to do where it fails: the copies that follow bring what nobody is to look at, as `check` raises.
  (void)mpicomm::spin_until(reached, watch);
}
