// Point-to-point signals, and counts of messages.
//
// Signals: one rank raises a counter in the memory of another rank, which waits for it. Each direction of each pair of
// ranks has three words: `sent` (the signaller's own count), `inbox` (in the waiter's memory, written by the signaller
// alone) and `expected` (the waiter's own count). The counts only grow and lie in device memory, so a captured graph
// with these kernels can be replayed for ever. Each kernel is one thread. `sent` and `expected` belong to one stream at
// a time, so they need no atomics.
//
// Counts of messages (mpicomm_publish, mpicomm_await): words in memory of the sender, see messages/outbox.py. The host
// chooses the counts, so these kernels are in no captured graph.

#include "faults.cuh"

using mpicomm::FaultRecord;
using mpicomm::u32;
using mpicomm::u64;

// Adds 1 to `sent` and publishes the sum at `inbox`, after all earlier work of the stream.
MPICOMM_KERNEL void mpicomm_signal(u64* sent, u64* inbox, const u32* failed) {
  const u64 count = *sent + 1;
  // After a failed wait this rank may have computed with data that never came, so it signals nothing more: its peers
  // then run out of time and raise, instead of reading wrong data. Pairs with the store in report_fault: a wait of this
  // stream was an earlier kernel, so its store is there.
  if (mpicomm::load_relaxed(failed) != mpicomm::kClear) return;
  *sent = count;
  // Pairs with the acquire in mpicomm_wait_signal. Earlier kernels and copies of this stream have finished, so this
  // thread has seen their stores, on this device and in peers' memory, and the release publishes these with the count.
  // A plain store could become visible before that data.
  mpicomm::store_release(inbox, count);
}

// Adds 1 to `expected` and returns once `inbox` has reached the sum, or `timeout_ns` later with a fault record.
MPICOMM_KERNEL void mpicomm_wait_signal(
    u64* expected, const u64* inbox, u32 peer, u64 timeout_ns, FaultRecord* record, const u32* failed) {
  const u64 target = *expected + 1;
  const mpicomm::Watch watch{{record, failed}, timeout_ns, mpicomm::kWaitSignal, target, 0, peer};
  // Pairs with the release in mpicomm_signal: all later work of this stream sees the work of the peer before its
  // signal. With a plain load later work could read what was there before. The difference is signed, as for every
  // flag: after several signals the count may be ahead, which ends the wait, too.
  const auto reached = [=] { return static_cast<long long>(mpicomm::load_acquire(inbox) - target) >= 0; };
  if (mpicomm::spin_until(reached, watch)) *expected = target;
}

// Publishes `count` at `word`, after all earlier work of the stream. The host chooses the count, because MPI has
// matched the message there: so no captured graph can hold this kernel. `word` lies in the sender's memory. It is
// `ready`, which the sender stores, or `done`, which the receiver stores across the link.
MPICOMM_KERNEL void mpicomm_publish(u64* word, u64 count, const u32* failed) {
  // As in mpicomm_signal. After a failed wait `ready` must not say that this rank's data is right. And `done` must not
  // say that a message was taken: the sender would use its memory again.
  if (mpicomm::load_relaxed(failed) != mpicomm::kClear) return;
  // `ready` pairs with the acquire in mpicomm_await and publishes the copies into the outbox, earlier work of this
  // stream. A plain store could arrive before them, and the receiver would copy what an earlier message has left there.
  // `done` pairs with the copy by which the sender's host reads these words (Outbox in messages/outbox.py). It says
  // that the receiver's copies out of the outbox are over: if it came earlier, the next message would overwrite data
  // that is still being read.
  mpicomm::store_release(word, count);
}

// Returns once `word` has reached `target`, or `timeout_ns` later with a fault record that names message `number`.
MPICOMM_KERNEL void mpicomm_await(const u64* word, u64 target, u64 number, u32 peer, u64 timeout_ns,
                                  FaultRecord* record, const u32* failed) {
  const mpicomm::Watch watch{{record, failed}, timeout_ns, mpicomm::kMessage, number, 0, peer};
  // Pairs with the release in mpicomm_publish: the copies that follow on this stream read what the sender's copies
  // wrote. With a plain load they could read what was there before. Signed, as for every flag: later pieces may have
  // come, too.
  const auto reached = [=] { return static_cast<long long>(mpicomm::load_acquire(word) - target) >= 0; };
  // A failure needs nothing here: the copies that follow bring wrong data, and `check` raises before the user reads it.
  (void)mpicomm::spin_until(reached, watch);
}
