// The first step of messages with counts on the device. If it is the only step, a worker needs no barrier between the
// lengths of messages and its packets.
#pragma once

#include "packet_worker.cuh"

namespace mpicomm {

// The work of this thread in the first step, after its packets have left. Each thread hears the lengths of all messages,
// so no thread waits for another thread of its block. Then it takes its units and stores them at their places, if no
// message needs another step (`is_only`). Returns false without a store if there is too little room, and if the kernel
// must leave. `at` is the offset of this thread's unit, and `place` is the place of its slots.
MPICOMM_DEVICE bool do_first_step(
    const Worker& worker,
    const Counted& x,
    const SentCounts<kRanks>& sent,
    const Numbers<kRanks>& numbers,
    u64 at,
    u64 place,
    u64 step_nbytes,
    bool& is_only) {
  const u32 own = worker.x.team.rank;
  Displacement displs[kRanks];
  if (x.receive.follows == 0) {
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) displs[rank].load(x.receive, x.send.counts, rank);
  }
  // Pairs with the stores in `Numbers::tell`.
  Pair packets[kOthers]{};
  const auto absent = [&] {
    u32 missing = 0;
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      const u32 rank = worker.rank_of(entry);
      if (rank == own) continue;
      packets[entry] = load_volatile(numbers.slot_of_length(own, rank));
      if (!numbers.has_come(packets[entry])) missing |= 1u << rank;
    }
    return missing;
  };
  if (kRanks > 1 && !await_ranks(worker.x.team, worker.launch, absent)) return false;

  u64 counts[kRanks], begins[kRanks], end = 0, longest = 0;
  u32 senders = 0;
  bool fits = true;
#pragma unroll
  for (u32 rank = 0; rank < kRanks; ++rank) {
    const u64 given = sent.counts[rank];
    const u64 count = rank == own ? given : numbers.number_in(packets[entry_of(rank)]);
    longest = longest > given ? longest : given;
    longest = longest > count ? longest : count;
    counts[rank] = count;
    begins[rank] = end;
    end += count;
    if (rank != own && at < count * x.itemsize) senders |= 1u << rank;
  }
  is_only = longest * x.itemsize <= step_nbytes;
  if (!is_only) return true;
  if (x.receive.follows != 0) {
    fits = end <= x.receive.room;
  } else {
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      const u64 begin = displs[rank].value(x.receive, rank);
      fits &= counts[rank] == 0 || (begin <= x.receive.room && counts[rank] <= x.receive.room - begin);
      begins[rank] = begin;
    }
  }
  if (!fits) return false;
  Held units[kOthers];
  worker.look(units, 0, senders, place);
  // The unit to this rank itself comes while the units of the peers are on their way.
  const u64 nbytes = chosen(counts, own) * x.itemsize;
  Loaded kept{};
  if (at < nbytes) kept = load_at(x.send.buffer + sent.displ_of(own) * x.itemsize, at, nbytes);
  if (senders != 0 && !worker.take(units, 0, senders, place)) return false;
#pragma unroll
  for (u32 entry = 0; entry < kOthers; ++entry) {
    if (!is_among(senders, entry)) continue;
    const u32 rank = worker.rank_of(entry);
    u8* const to = x.receive.buffer + chosen(begins, rank) * x.itemsize;
    store_at(to, at, chosen(counts, rank) * x.itemsize, Protocol::unit(units[entry].packets[0]));
  }
  if (at < nbytes) store_at(x.receive.buffer + chosen(begins, own) * x.itemsize, at, nbytes, kept);
  return true;
}

}  // namespace mpicomm
