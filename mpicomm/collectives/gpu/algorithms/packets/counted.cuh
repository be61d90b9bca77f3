// Messages with counts on the device (MPICOMM_COUNTED): the host knows neither their lengths nor their
// places. Each block reads the counts of this rank's messages, and tells each block of the same
// number the length of the message to its rank. So each rank knows what comes, and where it belongs.
//
// A block whose rank has no room for all messages leaves before it stores any of them. The other ranks
// may have all of their data by then. So block 0 of each rank also tells all peers the lengths of all of its
// messages, and the room that it has. Then all ranks find the same fault in the same launch.
//
// Both travel as packets of the LL protocol in the inboxes for LL packets. A launch of this kernel uses
// these inboxes for nothing else. They have two sets, by the parity of the launch, and every kernel wipes
// old flags. So a slot is free when the inboxes of packets.cu are: see the top of packets.cu.
//
// The first step (counted_step.cuh) takes about as long as a step of messages that the host knows. Its data is in flight
// together with its lengths. A message near the begin of its buffer travels in units of the buffer, and a worker loads
// its unit of the buffer together with the counts. Every worker hears the lengths itself. So between the lengths and
// the data no thread waits for another thread of its block.
#pragma once

#include "flag_protocol.cuh"
#include "team.cuh"

namespace mpicomm {

// A buffer with a block for each rank. The host's copies of this structure and of Counted are in
// arguments.py; a test compares them.
struct CountedSide {
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

struct Counted {
  CountedSide send;
  CountedSide receive;
  u32 itemsize;
  u32 unused;
};

// The messages of a launch, in shared memory: the fields of Packets with these names.
struct Messages {
  const u8* sends[kMaxRanks];
  u8* receives[kMaxRanks];
  u64 send_nbytes[kMaxRanks];
  u64 receive_nbytes[kMaxRanks];
  u64 received[kMaxRanks];  // the bytes of the message from each rank; `receive_nbytes` only has bytes of later steps
  i64 displs[kMaxRanks];  // of the received blocks, as the caller gives them
  u32 steps;
  u32 paced;
  // Block 0 of each rank tells its facts to all peers. The facts are the elements of its message to each
  // rank, and a word: twice the room of its buffer, plus 1 if blocks follow each other. If they do not, its limits are
  // facts too: its room for the message from each rank.
  u64 facts[kMaxRanks][2 * kMaxRanks + 1];
};

constexpr u32 kOfReceive = 1u << 31;  // in a kCounts record: the displacement of a received block
constexpr u64 kMostReported = ~0u;    // an abort word has room for 32 bits

// A choice between registers instead of an index, because an index would put the values into memory. For the same reason
// the choice is between values, and not between places of values.
template <class T, u32 number>
MPICOMM_DEVICE T chosen(const T (&values)[number], u32 index) {
  T value = values[0];
#pragma unroll
  for (u32 each = 1; each < number; ++each) {
    const T other = values[each];
    value = each == index ? other : value;
  }
  return value;
}

// An integer of an array on the device, as the words that have come. An array of 32 bits has one word, which is loaded
// twice. Without branches and conversions, the loads of all integers are in flight at once.
struct Index {
  u32 low, high;

  MPICOMM_DEVICE void load(const void* indices, u32 wide, u32 rank) {
    const u32* const words = static_cast<const u32*>(indices) + (rank << wide);
    low = words[0], high = words[wide];
  }
  MPICOMM_DEVICE i64 value(u32 wide) const {
    if (wide == 0) return static_cast<i32>(low);
    return static_cast<i64>(static_cast<u64>(high) << 32 | low);
  }
};

// The displacement that the caller gives for the block of a rank.
MPICOMM_DEVICE i64 given_displ(const CountedSide& side, u32 rank) {
  if (side.displs == nullptr) return side.known[rank];
  Index displ;
  displ.load(side.displs, side.wide_displs, rank);
  return displ.value(side.wide_displs);
}

MPICOMM_DEVICE_CALL bool refuse_counts(const Team& team, u32 operation, u64 number, u32 of) {
  const Watch watch{team.faults, 0, operation, number, blockIdx.x, team.names[of]};
  report_fault(watch, 0);
  raise_abort(team, watch);
  return false;
}

// The messages that this rank sends, in registers. Every thread loads the counts of all messages, and then its first
// data. So the data is on its way before a barrier of the block.
template <u32 ranks>
struct SentCounts {
  i64 counts[ranks];
  i64 displs[ranks];
  u64 room;

  MPICOMM_DEVICE void load(const CountedSide& side) {
    Index given[ranks];
#pragma unroll
    for (u32 rank = 0; rank < ranks; ++rank) given[rank].load(side.counts, side.wide_counts, rank);
    room = side.room;
    i64 end = 0;
#pragma unroll
    for (u32 rank = 0; rank < ranks; ++rank) {
      counts[rank] = given[rank].value(side.wide_counts);
      displs[rank] = side.follows != 0 ? end : given_displ(side, rank);
      end += counts[rank];
    }
  }

  MPICOMM_DEVICE i64 count_of(u32 rank) const { return chosen(counts, rank); }
  MPICOMM_DEVICE i64 displ_of(u32 rank) const { return chosen(displs, rank); }

  // Whether a message has more than `step_nbytes`.
  MPICOMM_DEVICE bool needs_steps(u64 step_nbytes, u32 itemsize) const {
    bool needs = false;
#pragma unroll
    for (u32 rank = 0; rank < ranks; ++rank) needs |= static_cast<u64>(counts[rank]) * itemsize > step_nbytes;
    return needs;
  }

  // Whether a message lies in the buffer. A negative number is too large without its sign.
  MPICOMM_DEVICE bool fits(i64 count, i64 displ) const {
    return static_cast<u64>(displ) <= room && static_cast<u64>(count) <= room - displ;
  }
};

// A message in the units of the first step: its bytes from `begin` to `end`. Usually unit u has the bytes from 16*u on of
// the message. If the message ends within the first step of the send buffer, unit u has the bytes from 16*u on of the
// buffer. A thread loads these units before it knows the counts. Bytes of later steps do not count.
struct InUnits {
  u32 begin, end;

  // Whether the unit at offset `at` has bytes of the message.
  MPICOMM_DEVICE bool has(u32 at) const { return at < end && at + kPacketNbytes > begin && begin < end; }
};

// The bytes of a message, and its bytes in units, as blocks tell them. A step has less than 2^31 bytes.
struct Length {
  static constexpr u64 kInBuffer = 1ull << 63;
  static constexpr u32 kBits = 31, kMask = (1u << kBits) - 1;
  u64 number;

  // The message begins at `begin` of the send buffer.
  MPICOMM_DEVICE static Length of(u64 begin, u64 nbytes, u64 step_nbytes) {
    return {begin + nbytes <= step_nbytes ? kInBuffer | begin << kBits | nbytes : nbytes};
  }
  MPICOMM_DEVICE bool is_in_buffer() const { return (number & kInBuffer) != 0; }
  MPICOMM_DEVICE u64 nbytes() const { return is_in_buffer() ? number & kMask : number; }
  MPICOMM_DEVICE bool needs_steps(u64 step_nbytes) const { return !is_in_buffer() && number > step_nbytes; }
  MPICOMM_DEVICE InUnits in_units(u64 step_nbytes) const {
    const u32 low = static_cast<u32>(number) & kMask, begin = static_cast<u32>(number >> kBits) & kMask;
    if (is_in_buffer()) return {begin, begin + low};
    return {0, static_cast<u32>(number < step_nbytes ? number : step_nbytes)};
  }
};

// The numbers that blocks tell each other, as packets in the inboxes of LL.
template <u32 ranks>
struct Numbers {
  const Team& team;
  const FlaggedInboxes& inboxes;
  u32 launch;

  static constexpr u32 kFacts = 2 * ranks + 1;

  // Packets in the arena of `owner`: first of lengths, then of facts.
  MPICOMM_DEVICE Pair* slots(u32 owner) const {
    const u64 set = inboxes.sets - team.arenas[team.rank] + launch % 2 * inboxes.nbytes;
    return reinterpret_cast<Pair*>(team.arenas[owner] + set);
  }
  MPICOMM_DEVICE Pair* slot_of_length(u32 owner, u32 source) const {
    return slots(owner) + source * kMaxBlocks + blockIdx.x;
  }
  MPICOMM_DEVICE Pair* slot_of_fact(u32 owner, u32 source, u32 fact) const {
    return slots(owner) + ranks * kMaxBlocks + source * kFacts + fact;
  }

  MPICOMM_DEVICE void tell(Pair* slot, u64 number) const {
    const Packet unit{{static_cast<u32>(number), static_cast<u32>(number >> 32), 0, 0}};
    store_volatile(slot, FlagProtocol::packet(unit, FlagProtocol::flag(launch)));
  }

  MPICOMM_DEVICE bool has_come(const Pair& packet) const {
    return FlagProtocol::has_come(packet, FlagProtocol::flag(launch));
  }
  MPICOMM_DEVICE static u64 number_in(const Pair& packet) {
    const Packet unit = FlagProtocol::unit(packet);
    return static_cast<u64>(unit.words[1]) << 32 | unit.words[0];
  }

  // Waits for a number of `peer`. Pairs with the store in `tell`. A packet needs no order, because it holds
  // all of its data.
  MPICOMM_DEVICE bool hear(const Pair* slot, u32 peer, u64& number) const {
    Pair packet{};
    const auto absent = [&] {
      packet = load_volatile(slot);
      return has_come(packet) ? 0u : 1u << peer;
    };
    if (!await_ranks(team, launch, absent)) return false;
    number = number_in(packet);
    return true;
  }
};

// The work of the overseers of a block with the lengths of messages. Lane `rank` has the messages to and
// from that rank. All lanes of the warp call each function.
template <u32 ranks>
struct Lengths {
  const Numbers<ranks> numbers;
  const Counted& x;
  Messages& messages;
  u32 rank;

  // The facts of a rank: its counts, the word of its room, and its limits.
  static constexpr u32 kRoomFact = ranks, kLimits = ranks + 1, kFacts = Numbers<ranks>::kFacts;

  // Stores the message to this lane's rank for the block. A barrier publishes it.
  MPICOMM_DEVICE void place_sent(const SentCounts<ranks>& sent, i64 receive_displ) const {
    if (rank >= ranks) return;
    const i64 count = sent.count_of(rank);
    messages.displs[rank] = receive_displ;
    messages.sends[rank] = x.send.buffer + (count > 0 ? sent.displ_of(rank) * x.itemsize : 0);
    messages.send_nbytes[rank] = count * x.itemsize;
  }

  // Learns the lengths of all messages, on all lanes. Returns false if the kernel must leave.
  MPICOMM_DEVICE bool hear() const {
    bool ok = true;
    if (rank < ranks) {
      const u32 own = numbers.team.rank;
      Length length{messages.send_nbytes[rank]};
      if (rank != own) ok = numbers.hear(numbers.slot_of_length(own, rank), rank, length.number);
      messages.received[rank] = length.nbytes();
      // Workers place the units of the buffer in the first step.
      messages.receive_nbytes[rank] = length.is_in_buffer() ? 0 : length.nbytes();
    }
    ok = __all_sync(kWarp, ok);
    // Orders the numbers of all lanes before the loads of the caller.
    __syncwarp(kWarp);
    return ok;
  }

  // The elements that the buffer has from a displacement on.
  MPICOMM_DEVICE u64 limit(u64 displ) const { return displ < x.receive.room ? x.receive.room - displ : 0; }

  // Finds the place of the message from this lane's rank, after all lanes have learnt their lengths. Returns
  // false if the buffer has no room for it.
  MPICOMM_DEVICE bool place_received() const {
    if (rank >= ranks) return true;
    const u64 nbytes = messages.received[rank];
    u64 begin = messages.displs[rank] * x.itemsize, total = 0;
#pragma unroll
    for (u32 each = 0; each < ranks; ++each) {
      if (x.receive.follows != 0 && each < rank) begin += messages.received[each];
      total += messages.received[each];
    }
    if (x.receive.follows != 0 ? total > x.receive.room * x.itemsize : nbytes > limit(messages.displs[rank]) * x.itemsize) return false;
    messages.receives[rank] = x.receive.buffer + (nbytes > 0 ? begin : 0);
    return true;
  }

  MPICOMM_DEVICE void store_count() const {
    const u64 count = messages.facts[rank][numbers.team.rank];
    if (x.receive.wide_counts != 0) static_cast<i64*>(x.receive.counts)[rank] = static_cast<i64>(count);
    else static_cast<i32*>(x.receive.counts)[rank] = static_cast<i32>(count);
  }

  // Tells all peers the facts of this rank.
  MPICOMM_DEVICE void tell_facts(const SentCounts<ranks>& sent) const {
    const u32 own = numbers.team.rank, facts = x.receive.follows != 0 ? kLimits : kFacts;
    for (u32 i = rank; i < ranks * facts; i += kLanes) {
      const u32 peer = i / facts, fact = i % facts;
      u64 number = x.receive.room << 1 | (x.receive.follows != 0 ? 1 : 0);
      if (fact < ranks) number = sent.count_of(fact);
      if (fact >= kLimits) number = limit(given_displ(x.receive, fact - kLimits));
      if (peer == own) messages.facts[own][fact] = number;
      else numbers.tell(numbers.slot_of_fact(peer, own, fact), number);
    }
  }

  // Hears the facts from number `first` to number `end` of the peers `of`, on all lanes. Returns false if the kernel must
  // leave.
  MPICOMM_DEVICE bool hear_facts(u32 first, u32 end, u32 of) const {
    const u32 own = numbers.team.rank, facts = end - first;
    bool ok = true;
    for (u32 i = rank; i < ranks * facts; i += kLanes) {
      const u32 peer = i / facts, fact = first + i % facts;
      if (peer == own || !(of >> peer & 1)) continue;
      ok = ok && numbers.hear(numbers.slot_of_fact(own, peer, fact), peer, messages.facts[peer][fact]);
    }
    ok = __all_sync(kWarp, ok);
    // Orders the facts of all lanes before the loads of the caller.
    __syncwarp(kWarp);
    return ok;
  }

  // Gives up if a rank has no room for its messages. Otherwise stores the counts that have come. All lanes of the
  // overseers of block 0 call it.
  MPICOMM_DEVICE void compare_rooms() const {
    if (!hear_facts(0, kLimits, ~0u)) return;
    u32 limited = 0;  // the ranks with limits
#pragma unroll
    for (u32 each = 0; each < ranks; ++each) limited |= (messages.facts[each][kRoomFact] & 1) != 0 ? 0 : 1u << each;
    if (limited != 0 && !hear_facts(kLimits, kFacts, limited)) return;
    if (rank >= ranks) return;
    const u64* const theirs = messages.facts[rank];
    const u64 room = theirs[kRoomFact] >> 1;
    u64 total = 0, needed = 0;
#pragma unroll
    for (u32 source = 0; source < ranks; ++source) total += messages.facts[source][rank];
    if (!(limited >> rank & 1)) {
      needed = total > room ? total : 0;
    } else {
      for (u32 source = 0; source < ranks; ++source) {
        const u64 count = messages.facts[source][rank], limit = theirs[kLimits + source];
        if (count > limit && room - limit + count > needed) needed = room - limit + count;
      }
    }
    if (needed == 0) return store_count();
    refuse_counts(numbers.team, kCountedRoom, needed < kMostReported ? needed : kMostReported, rank);
  }

  // Computes the steps, and the peers to pace, as the host does for lengths that it knows. `step_nbytes` are
  // the bytes of a message in a step, and `laps` are the steps that an inbox holds.
  MPICOMM_DEVICE void count_steps(u64 step_nbytes, u32 laps) const {
    u64 longest = 1;
    u32 paced = 0;
#pragma unroll
    for (u32 each = 0; each < ranks; ++each) {
      const u64 sent = messages.send_nbytes[each], received = messages.received[each];
      const u64 most = sent > received ? sent : received;
      longest = most > longest ? most : longest;
      if (each != numbers.team.rank && sent != received && most > step_nbytes * laps) paced |= 1u << each;
    }
    if (rank == 0) {
      messages.steps = longest <= step_nbytes ? 1 : static_cast<u32>((longest + step_nbytes - 1) / step_nbytes);
      messages.paced = paced;
    }
    // Orders the steps before the loads of the other lanes.
    __syncwarp(kWarp);
  }
};

}  // namespace mpicomm
