// Point-to-point signals: one rank raises a counter in the memory of another rank, which waits for
// the counter. Each direction of each pair of ranks has three words. `sent` is the count of the
// signaller. `inbox` lies in the memory of the waiter, and only the signaller writes it. `expected`
// is the count of the waiter. The counts only grow and lie in device memory, so a captured graph
// with these kernels can run again for ever. Each kernel is one thread. `sent` and `expected`
// belong to one stream at a time, so they need no atomics.

#include "faults.cuh"

using mpicomm::FaultRecord;
using mpicomm::u32;
using mpicomm::u64;

// Adds 1 to `sent` and publishes the sum at `inbox`, after all earlier work of the stream.
MPICOMM_KERNEL void mpicomm_signal(u64* sent, u64* inbox, const u32* failed) {
  const u64 count = *sent + 1;
  // After a failed wait this rank may have computed with data that never came, so it sends no more
  // signals. Then its peers run out of time and raise, instead of reading wrong data. Pairs with
  // the store in report_fault: a wait of this stream was an earlier kernel, so its store is there.
  if (mpicomm::load_relaxed(failed) != mpicomm::kClear) return;
  *sent = count;
  // Pairs with the acquire in mpicomm_wait_signal. Earlier kernels and copies of this stream have
  // finished. So this thread has seen their stores, on this device and in the memory of peers, and
  // the release publishes these stores with the count. A plain store could become visible before
  // that data.
  mpicomm::store_release(inbox, count);
}

// Adds 1 to `expected`, and returns after `inbox` has reached the sum, or `timeout_ns` later with a
// fault record.
MPICOMM_KERNEL void mpicomm_wait_signal(
    u64* expected, const u64* inbox, u32 peer, u64 timeout_ns, FaultRecord* record, const u32* failed) {
  const u64 target = *expected + 1;
  const mpicomm::Watch watch{{record, failed}, timeout_ns, mpicomm::kWaitSignal, target, 0, peer};
  // Pairs with the release in mpicomm_signal: all later work of this stream sees the work of the
  // peer before its signal. With a plain load, later work could read the previous content of the
  // memory. The difference is signed, as for every flag. After several signals the count may be
  // ahead, which ends the wait, too.
  const auto reached = [=] { return static_cast<long long>(mpicomm::load_acquire(inbox) - target) >= 0; };
  if (mpicomm::spin_until(reached, watch)) *expected = target;
}
