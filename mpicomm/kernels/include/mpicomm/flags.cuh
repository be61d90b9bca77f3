// signal and wait: a flag tells a group of threads that another group has come to a certain place.
//
// A flag is a word of a SymmetricArray of uint64, zero at first. It has one writer, and its number
// only grows. No rank resets a flag, because it could not know which kernels still look at it.
#pragma once

#include "groups.cuh"

namespace mpicomm {

// Between whom a flag orders memory.
enum class Scope {
  kDevice,  // blocks of one process on one GPU: PTX's scope "gpu"
  kSystem,  // ranks, also two that share a GPU, and the host
};

// Calls `reached` until it returns true, or until `timeout_ns` have passed: then it returns false.
// It reads the clock only after many calls, so that a short wait costs no more than its polls.
template <class Reached>
MPICOMM_DEVICE bool poll_until(Reached reached, u64 timeout_ns) {
  constexpr u32 kPollsBeforeClock = 1000;
  u64 start = 0;
  for (u32 polls = 0; !reached(); ++polls) {
    if (polls < kPollsBeforeClock) continue;
    const u64 now = clock_ns();
    if (start == 0) start = now;
    if (now - start > timeout_ns) return false;
  }
  return true;
}

// Whether a flag that holds `value` has reached `number`. The difference is signed, so that numbers
// may wrap.
MPICOMM_DEVICE bool has_reached(u64 value, u64 number) { return static_cast<long long>(value - number) >= 0; }

// Raises a flag to `number`.
//
// Orders: pairs with `wait` for the flag. It publishes all stores that threads of the group made
// before the call, on any rank, and the stores of others that they have seen. Who: all threads of
// the group. No other group raises the same flag. Timeout: it waits for no other rank.
template <Scope scope = Scope::kSystem, class Group>
MPICOMM_DEVICE void signal(Group group, u64* flag, u64 number) {
  // The first thread has seen the stores of the other threads at the barrier, and its release
  // publishes them. Without the barrier the flag could arrive before their data.
  group.sync();
  if (group.number() != 0) return;
  if constexpr (scope == Scope::kDevice) store_release_on_device(flag, number);
  else store_release(flag, number);
}

// Waits until a flag has reached `number`, and returns true.
//
// Orders: pairs with `signal` of the same scope. All threads of the group may then read what the
// signal published, and write what the signalling group has read before it. Who: all threads of the
// group. Any number of groups may wait for one flag. Timeout: it returns false after `timeout_ns`;
// what the signal would publish may not be read.
template <Scope scope = Scope::kSystem, class Group>
MPICOMM_DEVICE bool wait(Group group, const u64* flag, u64 number, u64 timeout_ns) {
  const auto reached = [=] {
    if constexpr (scope == Scope::kDevice) return has_reached(load_acquire_on_device(flag), number);
    else return has_reached(load_acquire(flag), number);
  };
  // One thread polls. The barrier passes on what it has acquired, and its answer: all threads leave
  // together.
  return group.all(group.number() != 0 || poll_until(reached, timeout_ns));
}

}  // namespace mpicomm
