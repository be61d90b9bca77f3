// Bounded spins, and the record that a spin writes when its time is up.
#pragma once

#include "memory_order.cuh"

namespace mpicomm {

// The states of a FaultRecord, which it goes through once and never back. Once a record is not
// kClear the other waits of the device (spin_until) leave, and so do its later kernels. So one
// missing rank ends the work of the device in order, instead of one timeout after the other.
enum FaultState : u32 {
  kClear = 0,
  kWriting = 1,  // one thread has won the record and writes its fields
  kWritten = 2,  // the host can read the record
};

enum Operation : u32 {
  kWaitSignal = 1,
  kExchange = 2,
  kMismatch = 3,  // a rank came with data of another call than this rank's
  kMessage = 4,   // a piece of a message from one rank to another did not come
};

// A fault record lies in mapped host memory, so that the host can read it while kernels run. The
// host's copy of this layout is FaultRecord in devices/cuda/faults.py; a test compares the two.
struct FaultRecord {
  u32 state;
  u32 operation;   // an Operation
  u64 sequence;    // the count or epoch that the block waited for
  u32 block;       // the block that waited
  u32 peer;        // the rank that did not come, or came with data of another call
  u64 elapsed_ns;  // how long the block waited; 0 in a kExchange means that another rank waited and told this one
  u32* failed;     // the word of the device that says whether there is a record
};

// The record as kernels know it. The record lies across PCIe, microseconds away. So kernels never
// read it: they read `failed`, a word in memory of the device that is kClear until a thread begins
// the record.
struct Faults {
  FaultRecord* record;
  const u32* failed;
};

// What a spin waits for: the fields of the record that it writes when its time is up.
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
  // The first writer wins: it names the rank that was missing first, and later timeouts follow from
  // that. Without the swap two threads of different streams could mix their fields.
  if (compare_and_swap(&fault->state, kClear, kWriting) != kClear) return;
  // Pairs with the loads of `failed` in spin_until, load_health, mpicomm_signal and
  // mpicomm_message: the other waits of this device and its later kernels then leave. Without it
  // they would go on with data that never came. Relaxed, because the readers need the word alone.
  store_relaxed(fault->failed, kWriting);
  store_relaxed(&fault->operation, watch.operation);
  store_relaxed(&fault->sequence, watch.sequence);
  store_relaxed(&fault->block, watch.block);
  store_relaxed(&fault->peer, watch.peer);
  store_relaxed(&fault->elapsed_ns, elapsed_ns);
  // Pairs with the host's read of `state` and the fence after it (FaultPage.check), and publishes
  // the fields above. A plain store could reach host memory before them, and the host would raise
  // an error with zeros in it.
  store_release(&fault->state, kWritten);
}

constexpr u32 kFirstPolls = 16;
constexpr u32 kPollsBeforeClock = 1000;
constexpr u64 kLookEvery_ns = 10 * 1000;

enum SpinEnd : u32 {
  kReached,
  kTimeUp,  // the time of this spin is up; the record says so
  kLeft,    // `leave` returned true
};

// How long a spin has lasted. The spinning thread reads the clock only when the spin lasts long:
// after each poll from kPollsBeforeClock on.
struct Spell {
  u64 start = 0;
  u64 next_look = 0;

  // Returns kReached if the spin is to go on. Otherwise the kernel must leave without touching the
  // data that it waited for: time is up, which the record then says, or `leave` returned true.
  // `leave` is called every kLookEvery_ns.
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

// Calls `reached` until it returns true, or until `Spell::end` says that the kernel must leave.
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

// Returns whether `reached` came true. False means that time is up, for this spin or for another
// one of this device.
template <class Reached>
MPICOMM_DEVICE bool spin_until(Reached reached, const Watch& watch) {
  // The load is in flight during the first polls; the thread looks at its result only after them.
  const u32 failed_on_entry = load_relaxed(watch.faults.failed);
  for (u32 poll = 0; poll < kFirstPolls; ++poll) {
    if (reached()) return true;
  }
  if (failed_on_entry != kClear) return false;
  // Pairs with the store of `failed` in report_fault. Relaxed: the word alone says to leave, and no
  // kernel reads the record.
  return spin(reached, [&] { return load_relaxed(watch.faults.failed) != kClear; }, watch) == kReached;
}

}  // namespace mpicomm
