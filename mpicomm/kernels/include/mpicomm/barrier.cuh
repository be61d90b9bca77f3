// A barrier among the ranks of a SymmetricArray.
#pragma once

#include "copies.cuh"
#include "flags.cuh"

namespace mpicomm {

// Waits until the group of every rank has come to this barrier, and returns true. `flags` are the
// pointers of a SymmetricArray of uint64, of shape (barriers, size) and zero at first. `index` is
// the number of this barrier. Each block meets its counterparts on the other ranks at a separate
// index, as in `index = blockIdx.x`.
//
// Only rank r writes word [index][r] of a part. The word counts how often rank r has come. A rank
// reads its count in its part of the array. So no number is an argument, and a captured graph can
// run again for ever.
//
// Orders: the accesses of each rank's group before the barrier come before the accesses of all
// other ranks' groups after it. Callers: all threads of the group, on all `size` ranks of the
// array, which are on one node. Timeout: it returns false after `timeout_ns`. This rank has then
// come, so the ranks may not agree on how often they came. No rank may use this barrier again.
template <class Group>
MPICOMM_DEVICE bool barrier(Group group, const u64* flags, u32 index, u32 rank, u32 size, u64 timeout_ns) {
  const u64 first = static_cast<u64>(index) * size;
  const u64* const counts = part<const u64>(flags, rank) + first;
  const u64 number = load_relaxed(counts + rank) + 1;  // relaxed: only this group writes it, before its last sync
  // The releases below publish the stores of all threads of the group, because each thread has seen
  // them at this sync. The sync also lets all threads read the rank's count before a thread
  // advances it.
  group.sync();
  for (u32 peer = group.number(); peer < size; peer += group.size()) {
    store_release(part<u64>(flags, peer) + first + rank, number);  // pairs with the acquire below, on the peer
  }
  bool come = true;
  for (u32 peer = group.number(); peer < size; peer += group.size()) {
    const auto reached = [=] { return has_reached(load_acquire(counts + peer), number); };
    come = come && poll_until(reached, timeout_ns);
  }
  return group.all(come);  // each thread has acquired from some peers; now all threads see what these peers published
}

}  // namespace mpicomm
