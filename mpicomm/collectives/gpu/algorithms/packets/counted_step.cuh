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
  const u32 own = worker.x.team.rank, peers = ((1u << kRanks) - 1) & ~(1u << own);
  // All numbers of bytes that this rank knows itself are made before the wait.
  const u64 room = x.receive.room * x.itemsize;
  u64 longest = 0, nbytes[kRanks], begins[kRanks];
#pragma unroll
  for (u32 rank = 0; rank < kRanks; ++rank) {
    nbytes[rank] = sent.counts[rank] * x.itemsize;
    longest = longest > nbytes[rank] ? longest : nbytes[rank];
  }
  const u64 kept_nbytes = chosen(nbytes, own);
  Loaded kept{};
  if (at < kept_nbytes) kept = load_at(x.send.buffer + sent.displ_of(own) * x.itemsize, at, kept_nbytes);

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

  // The loads of the slots are in flight while the thread finds the places of the messages.
  Held units[kOthers];
  worker.look(units, 0, peers, place);
  u64 end = 0;
  u32 senders = 0;
#pragma unroll
  for (u32 rank = 0; rank < kRanks; ++rank) {
    nbytes[rank] = rank == own ? kept_nbytes : numbers.number_in(packets[entry_of(rank)]);
    longest = longest > nbytes[rank] ? longest : nbytes[rank];
    begins[rank] = end;
    end += nbytes[rank];
    if (rank != own && at < nbytes[rank]) senders |= 1u << rank;
  }
  is_only = longest <= step_nbytes;
  if (!is_only) return true;
  bool fits = end <= room;
  if (x.receive.follows == 0) {
    fits = true;
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      const u64 displ = given_displ(x.receive, rank);
      begins[rank] = displ * x.itemsize;
      fits &= nbytes[rank] == 0 || (displ <= x.receive.room && nbytes[rank] <= room - begins[rank]);
    }
  }
  if (!fits) return false;
  if (senders != 0 && !worker.take(units, 0, senders, place)) return false;
#pragma unroll
  for (u32 entry = 0; entry < kOthers; ++entry) {
    if (!is_among(senders, entry)) continue;
    const u32 rank = worker.rank_of(entry);
    u8* const to = x.receive.buffer + chosen(begins, rank);
    store_at(to, at, chosen(nbytes, rank), Protocol::unit(units[entry].packets[0]));
  }
  if (at < kept_nbytes) store_at(x.receive.buffer + chosen(begins, own), at, kept_nbytes, kept);
  return true;
}

}  // namespace mpicomm
