// signal and wait: a flag tells a group of threads that another group has come to a certain point.
//
// A flag is a word of a SymmetricArray of uint64, zero at first. It has one writer, and its number
// only grows. No rank resets a flag, because it could not know which kernels still look at it.
#pragma once

#include "groups.cuh"

namespace mpicomm {

// The threads between which a flag orders memory.
enum class Scope {
  kDevice,  // blocks of one process on one GPU: PTX's scope "gpu"
  kSystem,  // ranks, also ranks that share a GPU, and the host
};

// Calls `reached` until it returns true, and returns true. After `timeout_ns` it returns false. It
// reads the clock only after many calls, so a short wait costs only its polls.
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

// Whether a flag with `value` has reached `number`. The difference is signed, so that numbers may
// wrap.
MPICOMM_DEVICE bool has_reached(u64 value, u64 number) { return static_cast<long long>(value - number) >= 0; }

// Raises a flag to `number`.
//
// Orders: pairs with `wait` for the flag. It publishes all stores that threads of the group made
// before the call, to any rank. It also publishes the stores of other threads that these threads
// have seen. Callers: all threads of the group. No other group raises the same flag. Timeout: it
// waits for no other rank.
template <Scope scope = Scope::kSystem, class Group>
MPICOMM_DEVICE void signal(Group group, u64* flag, u64 number) {
  // At the barrier the first thread sees the stores of the other threads, and its release publishes
  // them. Without the barrier the flag could arrive before their data.
  group.sync();
  if (group.number() != 0) return;
  if constexpr (scope == Scope::kDevice) store_release_on_device(flag, number);
  else store_release(flag, number);
}

// Waits until a flag has reached `number`, and returns true.
//
// Orders: pairs with `signal` of the same scope. Afterwards all threads of the group may read the
// data that the signal published. They may also write memory that the signalling group has read
// before the signal. Callers: all threads of the group. Any number of groups may wait for one flag.
// Timeout: it returns false after `timeout_ns`. Then the group may not read the data.
template <Scope scope = Scope::kSystem, class Group>
MPICOMM_DEVICE bool wait(Group group, const u64* flag, u64 number, u64 timeout_ns) {
  const auto reached = [=] {
    if constexpr (scope == Scope::kDevice) return has_reached(load_acquire_on_device(flag), number);
    else return has_reached(load_acquire(flag), number);
  };
  // One thread polls. The barrier passes on its acquire and its answer, so all threads leave
  // together.
  return group.all(group.number() != 0 || poll_until(reached, timeout_ns));
}

}  // namespace mpicomm
