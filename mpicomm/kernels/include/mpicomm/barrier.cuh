// A barrier among the ranks of a SymmetricArray.
#pragma once

#include "copies.cuh"
#include "flags.cuh"

namespace mpicomm {

// Waits until the group of every rank has come to this barrier, and returns true. `flags` are the
// pointers of a SymmetricArray of uint64, of shape (barriers, size) and zero at first; `index` says
// which of the barriers this is. Each block that meets its counterparts on the other ranks uses its
// own index, as in `index = blockIdx.x`.
//
// Word [index][r] of a part is written by rank r alone, and counts how often rank r has come. A
// rank reads its own count in its own part. So no number is an argument, and a captured graph can
// be replayed for ever.
//
// Orders: what threads of the group did before the barrier, on any rank, comes before all that the
// groups of the other ranks do after it. Who: all threads of the group, on all `size` ranks of the
// array, which are on one node. Timeout: it returns false after `timeout_ns`. This rank counts as
// having come, so the ranks may not agree on how often they came: none of them uses this barrier
// again.
template <class Group>
MPICOMM_DEVICE bool barrier(Group group, const u64* flags, u32 index, u32 rank, u32 size, u64 timeout_ns) {
  const u64 first = static_cast<u64>(index) * size;
  const u64* const counts = part<const u64>(flags, rank) + first;
  const u64 number = load_relaxed(counts + rank) + 1;  // relaxed: this group alone has written it, before its last sync
  // The releases below publish the stores of all threads of the group, which each thread has seen
  // here. It also lets all threads read the rank's own count before one of them advances it.
  group.sync();
  for (u32 peer = group.number(); peer < size; peer += group.size()) {
    store_release(part<u64>(flags, peer) + first + rank, number);  // pairs with the acquire below, on the peer
  }
  bool come = true;
  for (u32 peer = group.number(); peer < size; peer += group.size()) {
    const auto reached = [=] { return has_reached(load_acquire(counts + peer), number); };
    come = come && poll_until(reached, timeout_ns);
  }
  return group.all(come);  // each thread has acquired from some peers; all threads see what these published
}

}  // namespace mpicomm
