// The synchronisation of windows: kernels of one block, which hold a stream and no host.
//
// Each rank has a board, memory that all ranks have mapped, all zero at first. A board has rows of
// kWindowRanks words. For each kind of count (fence, post, complete) there are three rows:
//
//     inbox      word p counts the signals of rank p to the owner; only rank p writes it
//     sent       word p counts the signals of the owner to rank p; only the owner uses it
//     expected   word p counts the waits of the owner for rank p; only the owner uses it
//
// The last row begins with the lock of the owner's memory, see window_lock.cuh.
//
// Counts only grow and lie in the memory of the device. So a captured graph with these kernels can
// run again for ever. `sent` and `expected` belong to one stream at a time, so they need no atomics.

#include "window_lock.cuh"

namespace mpicomm {

// The host's copies of these constants and structures are in window.py; a test compares them.
constexpr u32 kWindowThreads = 64;
constexpr u32 kRowWords = 64;  // a row is whole lines, so that rows which different ranks poll share no line
constexpr u32 kRowsOfCounts = 3;  // inbox, sent, expected
constexpr u32 kLockRow = 9;  // after the rows of three kinds of counts

struct Synchronisation {
  u64* const* boards;  // the address of every rank's board on this rank
  u64 signals;  // the ranks that the step signals, or whose lock it releases: bit r stands for rank r
  u64 waits;    // the ranks for which the step waits, or whose lock it acquires
  u64 timeout_ns;
  FaultRecord* record;
  const u32* failed;
  u32 rank;
  u32 kind;       // the kind of count: 0, 1 or 2
  u32 operation;  // an Operation, for the fault record
  u32 exclusive;  // whether a lock is for this rank alone
  u32 yields;     // whether a lock that is not waits for exclusive locks that other ranks wait for: see window_lock.cuh
};

MPICOMM_DEVICE bool has(u64 ranks, u32 rank) { return rank < kWindowRanks && (ranks >> rank & 1) != 0; }

MPICOMM_DEVICE u64* row(const Synchronisation& x, u32 owner, u32 number) {
  return x.boards[owner] + (x.kind * kRowsOfCounts + number) * kRowWords;
}

MPICOMM_DEVICE void synchronise_ranks(const Synchronisation& x) {
  const u32 peer = threadIdx.x;
  // After a failed wait this rank may have computed with data that never came, so it sends no more
  // signals. Then its peers run out of time and raise, instead of reading wrong data. Pairs with
  // the store in report_fault: a wait of this stream was an earlier kernel, so its store is there.
  if (load_relaxed(x.failed) != kClear) return;
  if (has(x.signals, peer)) {
    u64* const sent = row(x, x.rank, 1) + peer;
    const u64 count = *sent + 1;
    *sent = count;
    // Pairs with the acquire below, on the peer. Earlier kernels and copies of this stream have
    // finished, so this thread has seen their stores in the memory of all ranks. The release
    // publishes these stores with the count. With a plain store the peer could read its memory as
    // it was before a Put, or this rank could still read memory that the peer overwrites.
    store_release(row(x, peer, 0) + x.rank, count);
  }
  if (has(x.waits, peer)) {
    u64* const expected = row(x, x.rank, 2) + peer;
    const u64 target = *expected + 1;
    const u64* const inbox = row(x, x.rank, 0) + peer;
    const Watch watch{{x.record, x.failed}, x.timeout_ns, x.operation, target, 0, peer};
    // Pairs with the release above, on the peer. Later work of this stream sees the work of the
    // peer before its signal. With a plain load that work could read old content. The difference is
    // signed, as for every flag, because the peer may be ahead.
    const auto reached = [=] { return static_cast<long long>(load_acquire(inbox) - target) >= 0; };
    if (spin_until(reached, watch)) *expected = target;
  }
}

MPICOMM_DEVICE void release_and_acquire_locks(const Synchronisation& x) {
  const u32 owner = threadIdx.x;
  const bool releases = has(x.signals, owner), acquires = has(x.waits, owner);
  Lock* const lock = releases || acquires ? reinterpret_cast<Lock*>(x.boards[owner] + kLockRow * kRowWords) : nullptr;
  Watch watch{{x.record, x.failed}, x.timeout_ns, x.operation, 0, 0, owner};
  // As above: after a failed wait the memory behind the lock may be incomplete. So this rank neither
  // acquires nor releases a lock, and the next rank that waits for the lock raises.
  if (acquires && x.yields != 0 && load_relaxed(x.failed) == kClear) yield_to_waiting(lock, watch);
  // No thread acquires a lock before all threads have let other ranks pass. Otherwise this rank could
  // hold one lock while it lets a rank pass at another lock. That rank may wait for the first lock.
  __syncthreads();
  if (load_relaxed(x.failed) != kClear) return;
  if (releases) release_lock(lock, x.rank, x.exclusive != 0);
  if (acquires) acquire_lock(lock, x.rank, x.exclusive != 0, watch);
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kWindowThreads)
    mpicomm_window_synchronise(const __grid_constant__ mpicomm::Synchronisation);
extern "C" __global__ void __launch_bounds__(mpicomm::kWindowThreads)
    mpicomm_window_lock(const __grid_constant__ mpicomm::Synchronisation);

MPICOMM_KERNEL void mpicomm_window_synchronise(const __grid_constant__ mpicomm::Synchronisation x) {
  mpicomm::synchronise_ranks(x);
}
MPICOMM_KERNEL void mpicomm_window_lock(const __grid_constant__ mpicomm::Synchronisation x) {
  mpicomm::release_and_acquire_locks(x);
}
