// The first step of messages with counts on the device. If it is the only step, a worker needs no barrier between the
// lengths of messages and its packets.
#pragma once

#include "packet_worker.cuh"

namespace mpicomm {

// Out of line, because a thread usually has its unit in the buffer.
MPICOMM_DEVICE_CALL Packet load_out_of_line(const u8* message, u64 at, u64 nbytes) { return load_at(message, at, nbytes); }

// Takes the unit at offset `at` of a message of the send buffer that begins at `begin`. Returns whether there is one.
// `in_buffer` is the unit of the buffer at that offset.
MPICOMM_DEVICE bool first_unit(
    const Counted& x, u64 begin, const Length& length, u32 at, u64 step_nbytes, const Loaded& in_buffer, Loaded& unit) {
  unit = in_buffer;
  if (!length.in_units(step_nbytes).has(at)) return false;
  if (!length.is_in_buffer()) unit = load_out_of_line(x.send.buffer + begin, at, length.number);
  return true;
}

// What a thread sends in the first step: its units to other ranks, by the distance from this rank. Thread d of each block
// also tells the rank at distance d the length of the message to it.
struct FirstPackets {
  Loaded units[kRanks];
  u32 sent = 0;      // the distances, as bits, at which there is a unit
  u32 misfits = 0;   // the distances at which the message does not lie in the buffer
  Length length{};   // that this thread tells

  MPICOMM_DEVICE void load(
      const Counted& x, const SentCounts<kRanks>& counts, u32 rank, u32 at, u64 step_nbytes, const Loaded& in_buffer) {
#pragma unroll
    for (u32 distance = 0; distance < kRanks; ++distance) {
      const u32 to = (rank + distance) % kRanks;
      const i64 count = counts.count_of(to), displ = counts.displ_of(to);
      if (!counts.fits(count, displ)) {
        if (count != 0) misfits |= 1u << distance;
        continue;
      }
      if (distance == 0) continue;
      const u64 begin = displ * x.itemsize;
      const Length given = Length::of(begin, count * x.itemsize, step_nbytes);
      if (threadIdx.x == distance) length = given;
      const bool has = first_unit(x, begin, given, at, step_nbytes, in_buffer, units[distance]);
      sent |= static_cast<u32>(has) << distance;
    }
  }

  // Gives up if a message does not lie in the buffer. Returns false.
  MPICOMM_DEVICE bool refuse(const Team& team) const {
    const u32 to = (team.rank + threadIdx.x) % kRanks;
    if (threadIdx.x < kRanks && (misfits >> threadIdx.x & 1) != 0) refuse_counts(team, kCounts, team.names[to], team.rank);
    return false;
  }

  // A thread calls it after a barrier: the peers have begun the last launch, so the slots are free, and no rank has given
  // up.
  MPICOMM_DEVICE void push(const Worker& worker, const Numbers<kRanks>& numbers, u64 place) const {
    const u32 rank = worker.x.team.rank, distance = threadIdx.x;
    if (distance != 0 && distance < kRanks) numbers.tell(numbers.slot_of_length((rank + distance) % kRanks, rank), length.number);
#pragma unroll
    for (u32 distance = 1; distance < kRanks; ++distance) {
      if ((sent >> distance & 1) == 0) continue;
      worker.send((rank + distance) % kRanks, 0, place, unit_of(units[distance]), Protocol::flag(worker.count));
    }
  }
};

// Stores the bytes of a message that a unit has from `first` to `end`. `to` is the place of the unit.
MPICOMM_DEVICE_CALL void store_part(u8* to, Packet packet, u32 first, u32 end) {
  const bool has_words = width_of(to) >= 4 && first % 4 == 0 && end % 4 == 0;
#pragma unroll
  for (u32 word = 0; word < 4; ++word) {
    if (has_words) {
      if (word * 4 >= first && word * 4 < end) reinterpret_cast<u32*>(to)[word] = packet.words[word];
      continue;
    }
#pragma unroll
    for (u32 byte = word * 4; byte < word * 4 + 4; ++byte) {
      if (byte >= first && byte < end) to[byte] = static_cast<u8>(packet.words[word] >> (byte % 4 * 8));
    }
  }
}

// Stores the unit at offset `at` of a message at its place. `output` is the place of the message.
MPICOMM_DEVICE void store_first(u8* output, const InUnits& message, u32 at, const Packet& unit) {
  u8* const to = output + static_cast<i64>(at) - message.begin;
  const bool is_whole = at >= message.begin && at + kPacketNbytes <= message.end;
  if (is_whole && width_of(to) == kPacketNbytes) return store_aligned(to, unit);
  const u32 rest = message.end - at;
  store_part(to, unit, at < message.begin ? message.begin - at : 0, rest < kPacketNbytes ? rest : kPacketNbytes);
}

// The work of this thread in the first step, after its packets have left. Each thread hears the lengths of all messages,
// so no thread waits for another thread of its block. Then it takes its units and stores them at their places. If a
// message needs another step (not `is_only`), it leaves usual units to the turns that follow. Returns false without a
// store if there is too little room, and if the kernel must leave. `at` is the offset of this thread's unit, and `place`
// is the place of its slots.
MPICOMM_DEVICE bool do_first_step(
    const Worker& worker,
    const Counted& x,
    const SentCounts<kRanks>& sent,
    const Loaded& in_buffer,
    const Numbers<kRanks>& numbers,
    u32 at,
    u64 place,
    u64 step_nbytes,
    bool& is_only) {
  const u32 own = worker.x.team.rank;
  // The thread makes all numbers that this rank knows before it waits.
  const u64 room = x.receive.room * x.itemsize, kept_begin = sent.displ_of(own) * x.itemsize;
  const Length kept = Length::of(kept_begin, sent.count_of(own) * x.itemsize, step_nbytes);
  Loaded kept_unit{};
  const bool keeps = first_unit(x, kept_begin, kept, at, step_nbytes, in_buffer, kept_unit);
  const Pair* slots[kOthers]{};
  u32 peers = 0;
#pragma unroll
  for (u32 entry = 0; entry < kOthers; ++entry) {
    const u32 rank = worker.rank_of(entry);
    if (kRanks == 1 || rank == own) continue;
    slots[entry] = numbers.slot_of_length(own, rank);
    peers |= 1u << rank;
  }

  // Pairs with the stores in `Numbers::tell`.
  Pair packets[kOthers]{};
  const auto absent = [&] {
    u32 missing = 0;
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      if (!is_among(peers, entry)) continue;
      packets[entry] = load_volatile(slots[entry]);
      if (!numbers.has_come(packets[entry])) missing |= 1u << worker.rank_of(entry);
    }
    return missing;
  };
  if (kRanks > 1 && !await_ranks(worker.x.team, worker.launch, absent)) return false;

  // The loads of the slots are in flight while the thread finds the places of the messages.
  Held units[kOthers];
  worker.look(units, 0, peers, place);
  Length lengths[kRanks];
  InUnits messages[kRanks];
  u64 begins[kRanks], end = 0;
  u32 senders = 0, in_steps = 0;
#pragma unroll
  for (u32 rank = 0; rank < kRanks; ++rank) {
    const Length length{rank == own ? kept.number : numbers.number_in(packets[entry_of(rank)])};
    lengths[rank] = length;
    messages[rank] = length.in_units(step_nbytes);
    begins[rank] = end;
    end += length.nbytes();
    if (rank != own && messages[rank].has(at)) senders |= 1u << rank;
    if (length.needs_steps(step_nbytes)) is_only = false;
    if (!length.is_in_buffer()) in_steps |= 1u << rank;
  }
  if (!is_only) senders &= ~in_steps;
  bool fits = end <= room;
  if (x.receive.follows == 0) {
    fits = true;
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      const u64 displ = given_displ(x.receive, rank), nbytes = lengths[rank].nbytes();
      begins[rank] = displ * x.itemsize;
      fits &= nbytes == 0 || (displ <= x.receive.room && nbytes <= room - begins[rank]);
    }
  }
  if (!fits) return false;
  if (senders != 0 && !worker.take(units, 0, senders, place)) return false;
#pragma unroll
  for (u32 entry = 0; entry < kOthers; ++entry) {
    if (!is_among(senders, entry)) continue;
    const u32 rank = worker.rank_of(entry);
    const Packet unit = Protocol::unit(units[entry].packets[0]);
    store_first(x.receive.buffer + chosen(begins, rank), chosen(messages, rank), at, unit);
  }
  if (keeps) store_first(x.receive.buffer + chosen(begins, own), kept.in_units(step_nbytes), at, unit_of(kept_unit));
  return true;
}

}  // namespace mpicomm
