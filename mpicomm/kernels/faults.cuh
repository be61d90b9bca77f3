// Bounded spins, and the record a spin leaves behind when its time is up.
#pragma once

#include "memory_order.cuh"

namespace mpicomm {

// What `FaultRecord::state` goes through, once and never back. What is not kClear makes every spin leave, so that one
// missing rank ends the work of the device in order instead of piling up one timeout after the other.
enum FaultState : u32 {
  kClear = 0,
  kWriting = 1,  // one thread has won the record and fills it in
  kWritten = 2,  // the record can be read
};

enum Operation : u32 {
  kWaitSignal = 1,
  kExchange = 2,
  kMismatch = 3,  // a rank did come, with data of another call than this rank's
  kMessage = 4,   // a piece of a message from one rank to another
};

// Lies in mapped host memory, so that the host can read it while kernels run. The host's copy of this layout is
// FaultRecord in devices/cuda/faults.py; a test compares the two.
struct FaultRecord {
  u32 state;
  u32 operation;   // an Operation
  u64 sequence;    // the count or epoch that was waited for
  u32 block;       // the block that waited
  u32 peer;        // the rank that did not come, or came with something else
  u64 elapsed_ns;  // how long it was waited for; 0 in a kExchange means that another rank waited and told this one
  u32* failed;     // where the device keeps whether there is a record
};

// What kernels are given of it. The record lies across PCIe, microseconds away; `failed` is a word of the device,
// kClear until a record is begun, and all that kernels look at.
struct Faults {
  FaultRecord* record;
  const u32* failed;
};

// What a spin waits for, for the record.
struct Watch {
  Faults faults;
  u64 timeout_ns;
  u32 operation;
  u64 sequence;
  u32 block;
  u32 peer;
};

// Out of line, as is all that comes after it: a kernel waits for code that it jumps over.
MPICOMM_DEVICE_CALL void report_fault(const Watch& watch, u64 elapsed_ns) {
  FaultRecord* fault = watch.faults.record;
  // The first writer wins: the rank that is missing first is the one to name; later timeouts follow from it. Without
  // the swap two threads of different streams could mix their fields.
  if (compare_and_swap(&fault->state, kClear, kWriting) != kClear) return;
  // Pairs with the loads of `failed` in spin_until, is_healthy, mpicomm_signal and mpicomm_publish: later kernels of
  // this device, and its other waits, then leave. Relaxed: the word alone says so. Without it they would go on with
  // what never came.
  store_relaxed(fault->failed, kWriting);
  store_relaxed(&fault->operation, watch.operation);
  store_relaxed(&fault->sequence, watch.sequence);
  store_relaxed(&fault->block, watch.block);
  store_relaxed(&fault->peer, watch.peer);
  store_relaxed(&fault->elapsed_ns, elapsed_ns);
  // Pairs with the host's read of `state` followed by its fence (FaultPage.check); publishes the fields above. A plain
  // store could reach host memory before them, and the host would raise with zeros.
  store_release(&fault->state, kWritten);
}

constexpr u32 kFirstPolls = 16;
constexpr u32 kPollsBeforeClock = 1000;
constexpr u64 kLookEvery_ns = 10 * 1000;

enum SpinEnd : u32 {
  kReached,
  kTimeUp,  // here; the record says so
  kLeft,    // because `leave` said so
};

// How long a spin has lasted, looked at only when it lasts long: after each poll from kPollsBeforeClock on.
struct Spell {
  u64 start = 0;
  u64 next_look = 0;

  // kReached if the spin is to go on. Otherwise the kernel must leave without touching what it waited for: time is up,
  // of which there is a record then, or `leave`, which is asked every now and then, has said so.
  template <class Leave>
  MPICOMM_DEVICE SpinEnd end(Leave leave, const Watch& watch) {
    const u64 now = clock_ns();
    if (start == 0) start = next_look = now;
    if (now - start > watch.timeout_ns) {
      report_fault(watch, now - start);
      return kTimeUp;
    }
    if (now >= next_look) {
      if (leave()) return kLeft;
      next_look = now + kLookEvery_ns;
    }
    return kReached;
  }
};

// Calls `reached` until it returns true, or `Spell::end` says that the kernel must leave.
template <class Reached, class Leave>
MPICOMM_DEVICE SpinEnd spin(Reached reached, Leave leave, const Watch& watch) {
  Spell spell;
  for (u32 poll = 0;; ++poll) {
    if (reached()) return kReached;
    if (poll < kPollsBeforeClock) continue;
    const SpinEnd end = spell.end(leave, watch);
    if (end != kReached) return end;
  }
}

// Returns whether `reached` came true; false means that time is up, here or elsewhere on this device.
template <class Reached>
MPICOMM_DEVICE bool spin_until(Reached reached, const Watch& watch) {
  // This load is on its way while the first polls run and is looked at only after them.
  const u32 failed_on_entry = load_relaxed(watch.faults.failed);
  for (u32 poll = 0; poll < kFirstPolls; ++poll) {
    if (reached()) return true;
  }
  if (failed_on_entry != kClear) return false;
  // Relaxed: the word alone says to leave, nobody reads the record here. Its writer is report_fault above.
  return spin(reached, [&] { return load_relaxed(watch.faults.failed) != kClear; }, watch) == kReached;
}

}  // namespace mpicomm
