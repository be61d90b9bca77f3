// Bounded spins, and the record that a spin writes when its time is up.
#pragma once

#include "memory_order.cuh"

namespace mpicomm {

// The states of a FaultRecord. A record goes through them once and never back. After a record has
// left kClear, the other waits of the device (spin_until) leave, and so do its later kernels. So
// one missing rank ends the work of the device in order, instead of by one timeout after the other.
enum FaultState : u32 {
  kClear = 0,
  kWriting = 1,  // one thread has won the record, and writes its fields
  kWritten = 2,  // the host can read the record
};

enum Operation : u32 {
  kWaitSignal = 1,
  kExchange = 2,
  kMismatch = 3,  // a rank came with data of another call than the call of this rank
  kMessage = 4,   // a piece of a message from one rank to another did not come
  kFence = 5,     // the operations of windows, see window.cu
  kStart = 6,
  kWait = 7,
  kLock = 8,      // another rank holds the lock
  kDispatch = 9,  // the operations of experts, see experts.cuh
  kCombine = 10,
  kRoutes = 11,   // a rank passed an id that is no expert
  kRoom = 12,     // a rank gets more rows than its result has
  kCounts = 13,   // a rank passed counts or displacements on the device that do not fit its buffer
  kReceiveOverflow = 14,  // a rank gets more elements than its buffer holds, by counts on the device
};

// A fault record lies in mapped host memory, so that the host can read it while kernels run. The
// host's copy of this layout is FaultRecord in devices/cuda/faults.py; a test compares the two.
struct FaultRecord {
  u32 state;
  u32 operation;   // an Operation
  u64 sequence;    // the count or epoch that the block waited for
  u32 block;       // the block that waited
  u32 peer;        // the rank that did not come, or came with data of another call
  u64 elapsed_ns;  // the time that the block waited; 0 in a kExchange if another rank waited and aborted this rank
  u32* failed;     // the word of the device that says whether there is a record
};

// The record in the view of kernels. The record lies across PCIe, microseconds away. So kernels
// never read it: they read `failed`, a word in device memory that is kClear until a thread begins
// the record.
struct Faults {
  FaultRecord* record;
  const u32* failed;
};

// The fields of the record that a spin writes when its time is up.
struct Watch {
  Faults faults;
  u64 timeout_ns;
  u32 operation;
  u64 sequence;
  u32 block;
  u32 peer;
};

MPICOMM_DEVICE_CALL void report_fault(const Watch& watch, u64 elapsed_ns) {
  FaultRecord* fault = watch.faults.record;
  // The first writer wins, because it names the first missing rank, and later timeouts follow from
  // that one. Without the swap, two threads of different streams could mix their fields.
  if (compare_and_swap(&fault->state, kClear, kWriting) != kClear) return;
  // Pairs with the loads of `failed` in spin_until, load_health, mpicomm_signal, mpicomm_message,
  // window.cu and experts.cuh: the other waits of this device and its later kernels then leave. Without the
  // store they would go on with data that never came. It is relaxed, because the readers need only
  // the word.
  store_relaxed(fault->failed, kWriting);
  store_relaxed(&fault->operation, watch.operation);
  store_relaxed(&fault->sequence, watch.sequence);
  store_relaxed(&fault->block, watch.block);
  store_relaxed(&fault->peer, watch.peer);
  store_relaxed(&fault->elapsed_ns, elapsed_ns);
  // Pairs with the host's read of `state` and the fence after it (FaultPage.check), and publishes
  // the fields above. A plain store could reach host memory before the fields, and the host would
  // raise an error with zeros in it.
  store_release(&fault->state, kWritten);
}

constexpr u32 kFirstPolls = 16;
constexpr u32 kPollsBeforeClock = 1000;
constexpr u64 kCheckEvery_ns = 10 * 1000;

enum SpinEnd : u32 {
  kReached,
  kTimeUp,  // the time of this spin is up; the record says so
  kLeft,    // `leave` returned true
};

// The time that a spin has lasted. The spinning thread reads the clock only if the spin lasts long:
// after each poll from kPollsBeforeClock on.
struct SpinTimer {
  u64 start = 0;
  u64 next_check = 0;

  // Returns kReached if the spin shall go on. Otherwise the kernel must leave without touching the
  // data that it waited for: time is up, and the record says so, or `leave` returned true. `check`
  // calls `leave` every kCheckEvery_ns.
  template <class Leave>
  MPICOMM_DEVICE SpinEnd check(Leave leave, const Watch& watch) {
    const u64 now = clock_ns();
    if (start == 0) start = next_check = now;
    if (now - start > watch.timeout_ns) {
      report_fault(watch, now - start);
      return kTimeUp;
    }
    if (now >= next_check) {
      if (leave()) return kLeft;
      next_check = now + kCheckEvery_ns;
    }
    return kReached;
  }
};

// Calls `reached` until it returns true, or until `SpinTimer::check` says that the kernel must leave.
template <class Reached, class Leave>
MPICOMM_DEVICE SpinEnd spin(Reached reached, Leave leave, const Watch& watch) {
  SpinTimer timer;
  for (u32 poll = 0;; ++poll) {
    if (reached()) return kReached;
    if (poll < kPollsBeforeClock) continue;
    const SpinEnd end = timer.check(leave, watch);
    if (end != kReached) return end;
  }
}

// Returns whether `reached` came true. False means that time is up, for this spin or for another
// spin of this device.
template <class Reached>
MPICOMM_DEVICE bool spin_until(Reached reached, const Watch& watch) {
  // The load is in flight during the first polls. The thread uses its result only after them.
  const u32 failed_on_entry = load_relaxed(watch.faults.failed);
  for (u32 poll = 0; poll < kFirstPolls; ++poll) {
    if (reached()) return true;
  }
  if (failed_on_entry != kClear) return false;
  // Pairs with the store of `failed` in report_fault. It is relaxed, because the word publishes no
  // other data, and no kernel reads the record.
  return spin(reached, [&] { return load_relaxed(watch.faults.failed) != kClear; }, watch) == kReached;
}

}  // namespace mpicomm
