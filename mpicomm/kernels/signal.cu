// Point-to-point signals: a counter that one rank raises in the memory of another, which waits for it.
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
