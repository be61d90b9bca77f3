// Point-to-point signals: one rank raises a counter in the memory of another rank, which waits for
// the counter. Each direction of each pair of ranks has three words. `sent` is the count of the
// signaller. `inbox` lies in the memory of the waiter, and only the signaller writes it. `expected`
// is the count of the waiter. The counts only grow and lie in device memory, so a captured graph
// with this kernel can run again for ever. The kernel is one thread. `sent` and `expected` belong to
// one stream at a time, so they need no atomics.

#include "faults.cuh"

namespace mpicomm {

// The host's copy of this structure is in message.py; a test compares the two.
struct Signal {
  u64* count;  // `sent`, or `expected` of a wait
  u64* inbox;
  u64 timeout_ns;
  FaultRecord* record;
  const u32* failed;
  u32 peer;
  u32 waits;  // whether the kernel waits for a signal, and sends none
};

// Adds 1 to `sent` and publishes the sum at `inbox`, after all earlier work of the stream.
MPICOMM_DEVICE void send_signal(const Signal& x) {
  const u64 count = *x.count + 1;
  // After a failed wait this rank may have computed with data that never came, so it sends no more
  // signals. Then its peers run out of time and raise, instead of reading wrong data. Pairs with
  // the store in report_fault: a wait of this stream was an earlier kernel, so its store is there.
  if (load_relaxed(x.failed) != kClear) return;
  *x.count = count;
  // Pairs with the acquire in await_signal. Earlier kernels and copies of this stream have
  // finished. So this thread has seen their stores, on this device and in the memory of peers, and
  // the release publishes these stores with the count. A plain store could become visible before
  // that data.
  store_release(x.inbox, count);
}

// Adds 1 to `expected`, and returns after `inbox` has reached the sum, or `timeout_ns` later with a
// fault record.
MPICOMM_DEVICE void await_signal(const Signal& x) {
  const u64 target = *x.count + 1;
  const Watch watch{{x.record, x.failed}, x.timeout_ns, kWaitSignal, target, 0, x.peer};
  // Pairs with the release in send_signal: all later work of this stream sees the work of the peer
  // before its signal. With a plain load, later work could read the previous content of the memory.
  // The difference is signed, as for every flag. After several signals the count may be ahead,
  // which ends the wait, too.
  const u64* const inbox = x.inbox;
  const auto reached = [=] { return static_cast<long long>(load_acquire(inbox) - target) >= 0; };
  if (spin_until(reached, watch)) *x.count = target;
}

}  // namespace mpicomm

// One kernel sends signals and waits for them, so that none has to be loaded while another spins.
MPICOMM_KERNEL void mpicomm_signal(const __grid_constant__ mpicomm::Signal x) {
  x.waits != 0 ? mpicomm::await_signal(x) : mpicomm::send_signal(x);
}
