// The lock of a window's memory, which any rank acquires and releases without its owner.
//
// A rank acquires the lock alone (exclusive), or with other ranks (shared). No rank starves:
//
// - A rank that waits for the exclusive lock sets its bit in `waiting`. If several ranks wait, the first
//   rank after the last holder acquires the lock, in the circle of ranks. So a rank that releases the
//   lock and acquires it again lets the others go first.
// - A rank that waits for the shared lock sets its bit in `holders`. While the bit is set, no other
//   rank acquires the exclusive lock. So the rank waits for one exclusive holder at most.
// - Before that, the rank lets those exclusive locks pass for which ranks wait already. So ranks that
//   share the lock by turns keep no exclusive lock out for ever. A rank that holds other locks does
//   not let them pass (`yields`): the rank that it let pass may wait for one of these.
//
// The lock names its holders. So a rank that waits in vain names the rank that holds the lock.
#pragma once

#include "atomic_updates.cuh"
#include "faults.cuh"

namespace mpicomm {

// The host's copies of these constants and this structure are in window.py; a test compares them.
constexpr u32 kWindowRanks = 56;
constexpr u32 kExclusiveShift = 56;

// Sets of ranks have bit r for rank r. All words are 0 at first.
struct Lock {
  u64 holders;  // the ranks that hold the lock together; the top byte is 1 + the rank that holds it alone, or 0
  u64 waiting;  // the ranks that wait for the exclusive lock
  u64 turns;    // counts the exclusive locks that ranks have acquired
  u64 last;     // the rank that acquired the last of them; only a holder of the exclusive lock stores it
};

MPICOMM_DEVICE u32 first_of(u64 ranks) {
  u32 rank = 0;
  while (rank + 1 < kWindowRanks && (ranks >> rank & 1) == 0) ++rank;
  return rank;
}

// Returns the rank of a set that has the first turn after rank `last`.
MPICOMM_DEVICE u32 first_after(u64 ranks, u64 last) {
  const u64 later = ranks & ~((2ull << last) - 1);
  return first_of(later != 0 ? later : ranks);
}

// Returns the rank that holds a lock; the first one, if several ranks hold it.
MPICOMM_DEVICE u32 holder_of(u64 holders) {
  const u32 alone = static_cast<u32>(holders >> kExclusiveShift);
  return alone != 0 ? alone - 1 : first_of(holders);
}

// The sequence number of a fault says why the peer is named.
constexpr u64 kHolds = 0;      // the peer holds the lock
constexpr u64 kComesFirst = 1;  // the peer waits for the lock, and its turn is before this rank's turn

MPICOMM_DEVICE void record_blocker(Watch& watch, u64 holders, u32 first) {
  watch.sequence = holders != 0 ? kHolds : kComesFirst;
  watch.peer = holders != 0 ? holder_of(holders) : first;
}

// Waits until the ranks that wait for the exclusive lock now have acquired it or given up.
MPICOMM_DEVICE void yield_to_waiting(Lock* lock, Watch& watch) {
  u64 ahead = load_relaxed(&lock->waiting);
  const u64 turns = load_relaxed(&lock->turns);
  u64 count = 0;
  for (u64 each = ahead; each != 0; each &= each - 1) ++count;
  const auto passed = [&] {
    if (ahead == 0) return true;
    const u64 holders = load_relaxed(&lock->holders);
    ahead &= load_relaxed(&lock->waiting);
    record_blocker(watch, holders, first_of(ahead));
    // A rank may wait again as soon as it has had its turn. So the turns are counted, too.
    return ahead == 0 || load_relaxed(&lock->turns) - turns >= count;
  };
  spin_until(passed, watch);
}

MPICOMM_DEVICE void acquire_exclusive(Lock* lock, u32 rank, Watch& watch) {
  const u64 me = 1ull << rank;
  fetch_or(&lock->waiting, me);
  const auto acquired = [&] {
    const u64 holders = load_relaxed(&lock->holders);
    const u32 first = first_after(load_relaxed(&lock->waiting) | me, load_relaxed(&lock->last));
    if (holders != 0 || first != rank) {
      record_blocker(watch, holders, first);
      return false;
    }
    // The acquire pairs with the release in release_lock, on the rank that held the lock before. With
    // a relaxed swap, loads of this rank could move before it and see old content. The swap also
    // fails for a rank that shares the lock and has set its bit since the load.
    return compare_and_swap_acquire(&lock->holders, 0, static_cast<u64>(rank + 1) << kExclusiveShift) == 0;
  };
  if (spin_until(acquired, watch)) {
    store_relaxed(&lock->last, rank);
    add_to(&lock->turns, 1ull);
  }
  // This rank clears its bit, also after a failed wait. Otherwise the turn would stay with this rank, and
  // the other ranks would wait for ever.
  fetch_and(&lock->waiting, ~me);
}

MPICOMM_DEVICE void acquire_shared(Lock* lock, u32 rank, Watch& watch) {
  const u64 me = 1ull << rank;
  // The acquires pair with the release in release_lock, on the rank that held the exclusive lock. With
  // relaxed accesses, loads of this rank could move before them and see old content.
  u64 holders = fetch_or_acquire(&lock->holders, me);
  const auto acquired = [&] {
    if (holders >> kExclusiveShift == 0) return true;
    record_blocker(watch, holders, 0);
    holders = load_acquire(&lock->holders);
    return holders >> kExclusiveShift == 0;
  };
  // After a failed wait the bit must go, because no call of this rank will release the lock.
  if (!spin_until(acquired, watch)) fetch_and(&lock->holders, ~me);
}

MPICOMM_DEVICE void acquire_lock(Lock* lock, u32 rank, bool exclusive, Watch& watch) {
  if (exclusive) {
    acquire_exclusive(lock, rank, watch);
  } else {
    acquire_shared(lock, rank, watch);
  }
}

MPICOMM_DEVICE void release_lock(Lock* lock, u32 rank, bool exclusive) {
  const u64 mine = exclusive ? ~0ull << kExclusiveShift : 1ull << rank;
  // The release pairs with the acquires above, on the next rank that acquires the lock. It publishes
  // all accesses of this stream under the lock. A relaxed update could overtake them, and the next
  // holder would read old content, or its stores would be overwritten. Ranks that share the lock
  // may change their bits meanwhile, so it is one atomic update.
  fetch_and_release(&lock->holders, ~mine);
}

}  // namespace mpicomm
