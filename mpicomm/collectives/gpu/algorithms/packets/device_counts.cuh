// Messages with counts on the device (MPICOMM_DEVICE_COUNTS): the host knows neither their lengths nor their
// places. Each block reads the counts of this rank's messages, and sends each block of the same
// number the length of the message to its rank. So each rank knows what comes, and where it belongs.
//
// A block whose rank has no room for all messages leaves before it stores any of them. The other ranks
// may have all of their data by then. So block 0 of each rank also sends all peers the lengths of all of its
// messages, and the room that it has. Then all ranks find the same fault in the same launch.
//
// Both travel as packets of the LL protocol in the inboxes for LL packets. A launch of this kernel uses
// these inboxes for nothing else. They have two sets, by the parity of the launch, and every kernel wipes
// old flags. So a slot is free when the inboxes of packets.cu are: see the top of packets.cu.
#pragma once

#include "ll_protocol.cuh"
#include "team.cuh"

namespace mpicomm {

// A buffer with a block for each rank. The host's copies of this structure and of DeviceCounts are in
// arguments.py; a test compares them.
struct DeviceCountsSide {
  u8* buffer;
  u64 room;            // in elements
  void* counts;        // of the blocks; of received blocks this kernel stores them
  const void* displs;  // null if the host knows the displacements, or if there are none
  i64 known[kMaxRanks];  // the displacements that the host knows
  u32 wide_counts;       // whether counts have 64 bits
  u32 wide_displs;
  u32 follows;           // whether each block follows the block before
  u32 unused;
};

struct DeviceCounts {
  DeviceCountsSide send;
  DeviceCountsSide receive;
  u64 itemsize;
};

// The messages of a launch, in shared memory: the fields of Packets with these names.
struct Messages {
  const u8* sends[kMaxRanks];
  u8* receives[kMaxRanks];
  u64 send_nbytes[kMaxRanks];
  u64 receive_nbytes[kMaxRanks];
  i64 receive_displs[kMaxRanks];
  u32 steps;
  u32 paced;
  // Block 0 of each rank sends its facts to all peers. The facts are the bytes of its message to each rank,
  // its room in bytes for the message from each rank, and a word. The word is twice the bytes of its
  // buffer, plus 1 if blocks follow each other.
  u64 facts[kMaxRanks][2 * kMaxRanks + 1];
};

constexpr u32 kOfReceive = 1u << 31;  // in a kCounts record: the displacement of a received block
constexpr u64 kMostReported = ~0u;    // an abort word has room for 32 bits

MPICOMM_DEVICE i64 load_index(const void* indices, u32 wide, u32 rank) {
  return wide != 0 ? static_cast<const i64*>(indices)[rank] : static_cast<const i32*>(indices)[rank];
}

MPICOMM_DEVICE i64 given_displ(const DeviceCountsSide& side, u32 rank) {
  return side.displs != nullptr ? load_index(side.displs, side.wide_displs, rank) : side.known[rank];
}

MPICOMM_DEVICE_CALL bool report_bad_counts(const Team& team, u32 operation, u64 number, u32 of) {
  const Watch watch{team.faults, 0, operation, number, blockIdx.x, team.user_ranks[of]};
  report_fault(watch, 0);
  raise_abort(team, watch);
  return false;
}

// The slots of lengths and facts in a set of inboxes for LL packets, as offsets in bytes.
template <u32 ranks>
struct CountSlots {
  static constexpr u32 kRoomFact = 2 * ranks, kFacts = 2 * ranks + 1;

  // The length of the message from `source` for this block.
  MPICOMM_DEVICE static u64 of_length(u32 source) { return (source * kMaxBlocks + blockIdx.x) * sizeof(Pair); }
  MPICOMM_DEVICE static u64 of_fact(u32 source, u32 fact) {
    return (ranks * kMaxBlocks + source * kFacts + fact) * sizeof(Pair);
  }
};

// Stores a number as a packet of LL, and returns the number of such a packet.
MPICOMM_DEVICE void store_number(Pair* slot, u64 number, u32 launch) {
  const Packet unit{{static_cast<u32>(number), static_cast<u32>(number >> 32), 0, 0}};
  store_volatile(slot, LLProtocol::packet(unit, LLProtocol::flag(launch)));
}
MPICOMM_DEVICE u64 number_in(const Pair& packet) { return packet.second << 32 | static_cast<u32>(packet.first); }

// The counts of this rank's messages, on lane `rank` of a warp for each rank.
template <u32 ranks>
struct SentCounts {
  i64 counts[ranks];
  i64 send_displ;
  i64 receive_displ;

  // Loads counts and displacements. No load waits for another load.
  MPICOMM_DEVICE void load(const DeviceCounts& x, u32 rank) {
    if (rank >= ranks) return;
#pragma unroll
    for (u32 each = 0; each < ranks; ++each) counts[each] = load_index(x.send.counts, x.send.wide_counts, each);
    send_displ = given_displ(x.send, rank);
    receive_displ = given_displ(x.receive, rank);
  }

  // Stores the message of this lane for the block, which a barrier publishes. Returns false for a count
  // or a displacement that does not fit the buffer.
  MPICOMM_DEVICE bool place(const Team& team, const DeviceCounts& x, Messages& messages, u32 rank) const {
    if (rank >= ranks) return true;
    i64 displ = send_displ, count = 0;
#pragma unroll
    for (u32 each = 0; each < ranks; ++each) {
      if (each == rank) count = counts[each];
      if (x.send.follows != 0 && each < rank) displ += counts[each];
    }
    const u64 room = x.send.room;
    const bool fits = displ >= 0 && static_cast<u64>(displ) <= room && static_cast<u64>(count) <= room - displ;
    if (count < 0 || (count > 0 && !fits)) return report_bad_counts(team, kCounts, team.user_ranks[rank], team.rank);
    if (receive_displ < 0) return report_bad_counts(team, kCounts, kOfReceive | team.user_ranks[rank], team.rank);
    messages.sends[rank] = x.send.buffer + (count > 0 ? displ * x.itemsize : 0);
    messages.send_nbytes[rank] = count * x.itemsize;
    messages.receive_displs[rank] = receive_displ;
    return true;
  }
};

// The work of the overseers of a block with the lengths of messages. Lane `rank` has the messages to and
// from that rank. All lanes of the warp call each function.
template <u32 ranks>
struct Lengths {
  const Team& team;
  const LLInboxes& inboxes;
  const DeviceCounts& x;
  Messages& messages;
  u32 launch;
  u32 rank;

  using Slots = CountSlots<ranks>;
  static constexpr u32 kRoomFact = Slots::kRoomFact, kFacts = Slots::kFacts;

  // A slot in the arena of `owner`.
  MPICOMM_DEVICE Pair* slot(u32 owner, u64 offset) const {
    const u64 set = inboxes.sets - team.arenas[team.rank] + launch % 2 * inboxes.nbytes;
    return reinterpret_cast<Pair*>(team.arenas[owner] + set + offset);
  }
  MPICOMM_DEVICE Pair* slot_of_length(u32 owner, u32 source) const { return slot(owner, Slots::of_length(source)); }
  MPICOMM_DEVICE Pair* slot_of_fact(u32 owner, u32 source, u32 fact) const {
    return slot(owner, Slots::of_fact(source, fact));
  }

  // Waits for a number of `peer`. Pairs with `store_number`. A packet needs no order, because it holds
  // all of its data.
  MPICOMM_DEVICE bool receive(const Pair* slot, u32 peer, u64& number) const {
    Pair packet{};
    const auto absent = [&] {
      packet = load_volatile(slot);
      return LLProtocol::has_arrived(packet, LLProtocol::flag(launch)) ? 0u : 1u << peer;
    };
    if (!await_ranks(team, launch, absent)) return false;
    number = number_in(packet);
    return true;
  }

  // Sends the peer of this lane the length of the message to it.
  MPICOMM_DEVICE void publish_length() const {
    if (rank >= ranks || rank == team.rank) return;
    store_number(slot_of_length(rank, team.rank), messages.send_nbytes[rank], launch);
  }

  // Receives the length of the message from this lane's rank. Returns false if the kernel must leave.
  MPICOMM_DEVICE bool receive_length() const {
    if (rank >= ranks) return true;
    u64 nbytes = messages.send_nbytes[rank];
    if (rank != team.rank && !receive(slot_of_length(team.rank, rank), rank, nbytes)) return false;
    messages.receive_nbytes[rank] = nbytes;
    return true;
  }

  // The bytes of the buffer, and the bytes that it has from a displacement on.
  MPICOMM_DEVICE u64 room_nbytes() const { return x.receive.room * x.itemsize; }
  MPICOMM_DEVICE u64 limit() const {
    const u64 displ = static_cast<u64>(messages.receive_displs[rank]);
    return displ < x.receive.room ? (x.receive.room - displ) * x.itemsize : 0;
  }

  // Finds the place of the message from this lane's rank, after all lanes have received their lengths. Returns
  // false if the buffer has no room for it.
  MPICOMM_DEVICE bool place_received() const {
    if (rank >= ranks) return true;
    const u64 nbytes = messages.receive_nbytes[rank];
    u64 begin = static_cast<u64>(messages.receive_displs[rank]) * x.itemsize, total = 0;
#pragma unroll
    for (u32 each = 0; each < ranks; ++each) {
      if (x.receive.follows != 0 && each < rank) begin += messages.receive_nbytes[each];
      total += messages.receive_nbytes[each];
    }
    if (x.receive.follows != 0 ? total > room_nbytes() : nbytes > limit()) return false;
    messages.receives[rank] = x.receive.buffer + (nbytes > 0 ? begin : 0);
    return true;
  }

  MPICOMM_DEVICE void store_count() const {
    const u64 count = messages.receive_nbytes[rank] / x.itemsize;
    if (x.receive.wide_counts != 0) static_cast<i64*>(x.receive.counts)[rank] = static_cast<i64>(count);
    else static_cast<i32*>(x.receive.counts)[rank] = static_cast<i32>(count);
  }

  // Calls `act` for the facts of this lane of each peer, until it returns false.
  template <class Act>
  MPICOMM_DEVICE bool each_fact(Act act) const {
    for (u32 i = rank; i < (ranks - 1) * kFacts; i += kLanes) {
      if (!act((team.rank + 1 + i / kFacts) % ranks, i % kFacts)) return false;
    }
    return true;
  }

  // Sends all peers the facts of this rank.
  MPICOMM_DEVICE void publish_facts() const {
    u64* const mine = messages.facts[team.rank];
    if (rank < ranks) mine[rank] = messages.send_nbytes[rank], mine[ranks + rank] = limit();
    if (rank == 0) mine[kRoomFact] = room_nbytes() << 1 | (x.receive.follows != 0 ? 1 : 0);
    // Orders the facts of all lanes before the loads below.
    __syncwarp(kWarp);
    each_fact([&](u32 peer, u32 fact) {
      store_number(slot_of_fact(peer, team.rank, fact), mine[fact], launch);
      return true;
    });
  }

  // Receives the facts of all peers. Returns false if the kernel must leave.
  MPICOMM_DEVICE bool receive_facts() const {
    return each_fact([&](u32 peer, u32 fact) {
      return receive(slot_of_fact(team.rank, peer, fact), peer, messages.facts[peer][fact]);
    });
  }

  // Gives up if a rank has no room for its messages. Otherwise stores the counts that have come. The lanes of
  // block 0 call it after a barrier.
  MPICOMM_DEVICE void compare_rooms() const {
    if (rank >= ranks) return;
    const u64* const theirs = messages.facts[rank];
    const u64 room = theirs[kRoomFact] >> 1;
    u64 total = 0, needed = 0;
#pragma unroll
    for (u32 source = 0; source < ranks; ++source) {
      const u64 nbytes = messages.facts[source][rank], limit = theirs[ranks + source];
      total += nbytes;
      if (nbytes > limit && room - limit + nbytes > needed) needed = room - limit + nbytes;
    }
    if ((theirs[kRoomFact] & 1) != 0) needed = total > room ? total : 0;
    if (needed == 0) return store_count();
    const u64 elements = needed / x.itemsize;
    report_bad_counts(team, kReceiveOverflow, elements < kMostReported ? elements : kMostReported, rank);
  }

  // Computes the steps, and the peers to pace, as the host does for lengths that it knows. `step_nbytes` are
  // the bytes of a message in a step, and `laps` are the steps that an inbox holds.
  MPICOMM_DEVICE void count_steps(u64 step_nbytes, u32 laps) const {
    if (rank != 0) return;
    u64 longest = 1;
    u32 paced = 0;
    for (u32 each = 0; each < ranks; ++each) {
      const u64 sent = messages.send_nbytes[each], received = messages.receive_nbytes[each];
      const u64 most = sent > received ? sent : received;
      longest = most > longest ? most : longest;
      if (each != team.rank && sent != received && most > step_nbytes * laps) paced |= 1u << each;
    }
    messages.steps = static_cast<u32>((longest + step_nbytes - 1) / step_nbytes);
    messages.paced = paced;
  }

  // Sends lengths and facts, unless a lane is not `ok`. Returns whether all lanes are. A lane is only ok after its
  // peer has begun the last launch, so the slots are free, and after it has seen that no rank has given up.
  MPICOMM_DEVICE bool publish(bool ok) const {
    if (!__all_sync(kWarp, ok)) return false;
    if (blockIdx.x == 0) publish_facts();
    else publish_length();
    return true;
  }

  // Receives the lengths of all messages, on all lanes of the warp. Returns false if the kernel must leave.
  MPICOMM_DEVICE bool receive_all() const {
    bool ok = blockIdx.x == 0 ? receive_facts() : receive_length();
    ok = __all_sync(kWarp, ok);
    // Orders the numbers of all lanes before the loads below.
    __syncwarp(kWarp);
    if (!ok || blockIdx.x != 0) return ok;
    if (rank < ranks) messages.receive_nbytes[rank] = messages.facts[rank][team.rank];
    // Orders the lengths of all lanes before the loads of the caller.
    __syncwarp(kWarp);
    return true;
  }
};

}  // namespace mpicomm
