// The arguments of packets.cu, and the work of one worker thread in one turn: where slots lie, how
// it stores packets in the slots of other ranks, and how it takes packets from this rank's slots.
// The top of packets.cu explains units, stages, steps, laps and why a slot is free.
#pragma once

#include "device_counts.cuh"
#include "fences.cuh"
#include "ll_protocol.cuh"
#include "rows.cuh"
#if defined(MPICOMM_STRIDED)
#include "strided.cuh"
#endif
#include "team.cuh"

namespace mpicomm {

// The host's copies of these constants and of Packets are in arguments.py; a test compares them.
constexpr u32 kRanks = MPICOMM_RANKS;
constexpr u32 kOverseers = 32;   // the overseer warp: threads of a block that move no data
constexpr u32 kStatistics = 2;   // the number of the slots for statistics of rows, as a stage
constexpr u32 kSlotNbytes = 16;  // a packet
constexpr u32 kFencesNbytes = sizeof(Fences);

struct Packets {
  Team team;
  const u8* sends[kMaxRanks];  // the message to each rank; the message to this rank is copied
  u8* receives[kMaxRanks];     // the place of the message from each rank; with fan-out of the message of stage C
  u64 send_nbytes[kMaxRanks];
  u64 receive_nbytes[kMaxRanks];
  const u8* own;  // this rank's contribution to the reduction, if it is one of the sources
  u8* output;     // the place of the result; null if this rank only sends it on
  u64 output_nbytes;
  u32 steps;  // the steps of this rank; with fan-out the same on all ranks
  u32 laps;   // the steps that an inbox holds
  u32 sources;  // the sources of the reduction or relay, bit r for rank r
  u32 targets;  // the targets of the fan-out, as bits
  u32 paced;    // the peers with messages longer than an inbox, of different lengths each way
  u32 stages;   // the inboxes for one source and parity: 1 or 2, with fan-out 2
  u8* inboxes[kMaxRanks];  // the inboxes of every rank, for the protocol of this kernel
  u64 inbox_nbytes;        // of one inbox
  LLInboxes ll;
  Fences* fences;  // one for each block
#if defined(MPICOMM_EPILOGUE) || defined(MPICOMM_WEIGHT)
  Finish finish;
#endif
#if defined(MPICOMM_DEVICE_COUNTS)
  DeviceCounts device_counts;
#endif
#if defined(MPICOMM_STRIDED)
  Gaps send_gaps[kMaxRanks];
  Gaps receive_gaps[kMaxRanks];
  Strides strides[kMostStrides];
#endif
};
static_assert(sizeof(Packets) <= 4096, "drivers before 530 take no more arguments");

#if defined(MPICOMM_EPILOGUE) || defined(MPICOMM_WEIGHT)
MPICOMM_DEVICE const Finish& finish_of(const Packets& x) { return x.finish; }
#else
MPICOMM_DEVICE Finish finish_of(const Packets&) { return {}; }
#endif

// The messages of a launch. If counts lie on the device, the kernel finds them itself (device_counts.cuh).
#if defined(MPICOMM_DEVICE_COUNTS)
constexpr bool kDeviceCounts = true;
using AllMessages = Messages;
#else
constexpr bool kDeviceCounts = false;
using AllMessages = const Packets;
#endif
static_assert(!kDeviceCounts || !kFanOut, "only messages have counts on the device");

// Loads the unit at offset `at` of the message to rank `to`, and stores a unit of the message of rank
// `of`.
#if defined(MPICOMM_STRIDED)
static_assert(!kDeviceCounts && !kFanOut && !kWire, "only messages of bytes have gaps");
MPICOMM_DEVICE Loaded load_message(const AllMessages& m, u32 to, u64 at) {
  return load_strided(m.strides, m.send_gaps[to], m.sends[to], at, m.send_nbytes[to]);
}
MPICOMM_DEVICE void store_message(const Packets& x, const AllMessages& m, u32 of, u64 at, const Unit& unit) {
  store_strided(x.strides, x.receive_gaps[of], m.receives[of], at, m.receive_nbytes[of], unit);
}
#else
MPICOMM_DEVICE Loaded load_message(const AllMessages& m, u32 to, u64 at) {
  return load_at(m.sends[to], at, m.send_nbytes[to]);
}
MPICOMM_DEVICE void store_message(const Packets& x, const AllMessages& m, u32 of, u64 at, const Unit& unit) {
  finish_of(x).store(m.receives[of], at, m.receive_nbytes[of], unit);
}
#endif

// Whether a launch reuses slots.
#if defined(MPICOMM_LAPS)
constexpr bool kLaps = true;
static_assert(Protocol::kResetsSlots && !kOneStep, "there are as many slots as steps");
#else
constexpr bool kLaps = false;
#endif

// Whether a launch reuses slots between two ranks, and one of them sends more than the other.
#if defined(MPICOMM_PACED)
constexpr bool kPaced = true;
static_assert(kLaps && !kFanOut, "else no rank waits for the word of a rank that sends nothing");
#else
constexpr bool kPaced = false;
#endif

// The most threads of a block for which there are registers. The workers are the threads that move
// data.
constexpr u32 kMostOfOneStep = kRanks > 4 ? 512 : 768;
constexpr u32 kMostOfUnits = kRanks > 4 ? 256 : kFanOut ? 512 : kRanks > 2 ? 640 : 768;
constexpr u32 kMostOfQuantized = kRanks > 4 ? 256 : kRanks > 2 || kFanOut ? 384 : 512;
constexpr u32 kMostOfMore = kWire ? kMostOfQuantized : kMostOfUnits;
#if defined(MPICOMM_WEIGHT)
constexpr u32 kWorkers = kGroups * kNormThreads;
#else
constexpr u32 kWorkers = (kOneStep ? kMostOfOneStep : kMostOfMore) - kOverseers;
#endif
constexpr u32 kThreads = kWorkers + kOverseers;
static_assert(kWorkers <= Fences::kMostWorkers && kOverseers == kLanes, "one overseer for each lane of the workers");

#if defined(MPICOMM_DTYPE) && !defined(MPICOMM_MOVES)
constexpr bool kRelays = false;
constexpr bool kReduces = true;  // whether the packets of all sources give one result
#else
constexpr bool kRelays = kFanOut;
constexpr bool kReduces = kRelays;
#endif

// The units that a thread sends in a turn, in registers. Their order is the distance from this
// rank, because a rank begins with the next rank (team.cuh).
struct Outgoing {
  Loaded units[kSameToAll ? 2 : kRanks];
  Unit sent{};  // the unit of the turn before, if all ranks get the same

  MPICOMM_DEVICE void load(const AllMessages& m, u32 rank, u64 at) {
#pragma unroll
    for (u32 distance = kReduces || kSameToAll ? 1 : 0; distance < (kSameToAll ? 2 : kRanks); ++distance) {
      const u32 to = (rank + distance) % kRanks;
      if (at < m.send_nbytes[to]) units[distance] = load_message(m, to, at);
    }
  }
};

// The escape of a slot of `owner`. Escapes follow the inboxes, in the order of the slots.
MPICOMM_DEVICE u8* escape_of(const Packets& x, u32 owner, const Pair* slot) {
  u8* const inboxes = x.inboxes[owner];
  const u64 begin = reinterpret_cast<const u8*>(slot) - inboxes;
  return inboxes + 2 * x.stages * kRanks * x.inbox_nbytes + begin / kSlotNbytes;
}

// Waits for the escape of a packet of `rank` and takes it. Returns 0 if the kernel must leave.
MPICOMM_DEVICE_CALL u32 take_escape(const Team& team, u32 launch, u32 rank, u8* escape) {
  u32 code = 0;
  const auto absent = [&] {
    code = load_volatile(escape);  // pairs with the store in store_escaped; only the byte counts
    return code == 0 ? 1u << rank : 0u;
  };
  if (!await_ranks(team, launch, absent)) return 0;
  // This rank resets the escape together with the slot, before the slot is free. A later reset
  // could wipe out the next escape of the slot.
  store_volatile(escape, 0);
  return code;
}

// Arrays of the packets of other ranks have an entry for each rank, except between two ranks. Then
// they have one entry, and no code for an absent rank.
constexpr u32 kOthers = kRanks == 2 ? 1 : kRanks;
MPICOMM_DEVICE constexpr u32 entry_of(u32 rank) { return kRanks == 2 ? 0 : rank; }
MPICOMM_DEVICE bool is_among(u32 ranks, u32 entry) { return kRanks == 2 ? ranks != 0 : ranks >> entry & 1; }

// The packets of a unit, as slots hold them.
struct SlotPackets {
  Pair packets[kPackets];
};

// A choice instead of an index, because a variable index would move the entries from registers to memory.
template <class T>
MPICOMM_DEVICE T select(const T (&entries)[kOthers], u32 entry) {
  T one = entries[0];
#pragma unroll
  for (u32 each = 1; each < kOthers; ++each) {
    if (each == entry) one = entries[each];
  }
  return one;
}

// The work of one thread in one turn. `count` is the number of the launch, `launch` its lower half.
struct Worker {
  const Packets& x;
  const AllMessages& m;
  u64 count;
  u32 launch;

  // The slot of the first packet of a unit. The slots of its other packets follow at a distance of
  // kSharers.
  //
  // No rank sends to itself. So in stage C the inbox from the owner itself has slots for statistics of
  // rows, which the first thread of a group takes. Its slot for `source` is the slot of thread `source`.
  MPICOMM_DEVICE Pair* slot(u32 owner, u32 stage, u32 source, u64 slot_index) const {
    if (stage == kStatistics) return slot(owner, 1, owner, slot_index + source);
    const u32 inbox = ((launch % 2) * x.stages + stage) * kRanks + source;
    const u64 first = kPackets == 1 ? slot_index : slot_index / kSharers * kSharers * kPackets + slot_index % kSharers;
    return reinterpret_cast<Pair*>(x.inboxes[owner] + inbox * x.inbox_nbytes) + first;
  }

  MPICOMM_DEVICE u8* escape(u32 owner, const Pair* slot) const { return escape_of(x, owner, slot); }

  // The rank of an entry.
  MPICOMM_DEVICE u32 rank_of(u32 entry) const { return kRanks == 2 ? 1 - x.team.rank : entry; }

  // Loads the slots of one unit of a stage for each of `ranks`.
  MPICOMM_DEVICE void load_slots(SlotPackets (&units)[kOthers], u32 stage, u32 ranks, u64 slot_index) const {
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      if (!is_among(ranks, entry)) continue;
      const Pair* const from = slot(x.team.rank, stage, rank_of(entry), slot_index);
#pragma unroll
      for (u32 each = 0; each < kPackets; ++each) units[entry].packets[each] = load_volatile(from + each * kSharers);
    }
  }

  MPICOMM_DEVICE static bool has_arrived(const SlotPackets& unit, Protocol::Flag flag) {
    bool come = true;
#pragma unroll
    for (u32 each = 0; each < kPackets; ++each) come &= Protocol::has_arrived(unit.packets[each], flag);
    return come;
  }

  MPICOMM_DEVICE u32 absent(const SlotPackets (&units)[kOthers], u32 ranks, Protocol::Flag flag) const {
    u32 missing = 0;
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      if (is_among(ranks, entry) && !has_arrived(units[entry], flag)) missing |= 1u << rank_of(entry);
    }
    return missing;
  }

  // Whether the packets of all `ranks` have come, and none has an escape. In the common case this
  // is the only check.
  MPICOMM_DEVICE static bool arrived_plain(const SlotPackets (&units)[kOthers], u32 ranks, Protocol::Flag flag) {
    bool plain = true;
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      if (!is_among(ranks, entry)) continue;
      plain &= has_arrived(units[entry], flag) && !Protocol::has_escape(units[entry].packets[0]);
    }
    return plain;
  }

  // Takes one unit from each of `ranks`, after `load_slots` has loaded their slots once, and resets the
  // slots. Returns false if the kernel must leave.
  MPICOMM_DEVICE bool take(SlotPackets (&units)[kOthers], u32 stage, u32 ranks, u64 slot_index) const {
    const Protocol::Flag flag = Protocol::flag(count);
    if (!arrived_plain(units, ranks, flag)) {
      const auto missing = [&] {
        load_slots(units, stage, ranks, slot_index);
        return absent(units, ranks, flag);
      };
      if (absent(units, ranks, flag) != 0 && !await_ranks(x.team, launch, missing)) return false;
#pragma unroll
      for (u32 entry = 0; entry < kOthers; ++entry) {
        Pair& packet = units[entry].packets[0];
        if (!is_among(ranks, entry) || !Protocol::has_escape(packet)) continue;
        const u32 rank = rank_of(entry);
        const Pair* const from = slot(x.team.rank, stage, rank, slot_index);
        const u32 code = take_escape(x.team, launch, rank, escape(x.team.rank, from));
        if (code == 0) return false;
        packet = unescaped(packet, code);
      }
    }
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      if (!is_among(ranks, entry)) continue;
      Pair* const taken = slot(x.team.rank, stage, rank_of(entry), slot_index);
#pragma unroll
      for (u32 each = 0; each < kPackets; ++each) Protocol::reset_slot(taken + each * kSharers);
    }
    return true;
  }

#if defined(MPICOMM_WIRE)
  static_assert(!Protocol::kEscapes, "scales lie in the places of escapes");
  // The scales beside the slots of this thread: see units.cuh.
  MPICOMM_DEVICE ScaleWord* scales(u32 owner, u32 stage, u32 source, u64 slot_index) const {
    const u64 first = slot_index / kSharers * kSharers;
    return reinterpret_cast<ScaleWord*>(escape(owner, slot(owner, stage, source, first))) + block_of_warp();
  }
#endif

  // Stores the packets of `unit` in slots of rank `to`.
  MPICOMM_DEVICE void send(u32 to, u32 stage, u64 slot_index, const Unit& unit, Protocol::Flag flag) const {
    Pair* const target = slot(to, stage, x.team.rank, slot_index);
#if defined(MPICOMM_WIRE)
    // Pairs with the loads in `Scales`. It orders nothing: each receiver waits for both.
    if (is_first_of_block()) store_volatile(scales(to, stage, x.team.rank, slot_index), word_of(unit.scales));
#endif
#pragma unroll
    for (u32 each = 0; each < kPackets; ++each) {
      const Pair packet = Protocol::packet(packet_in(unit, each), flag);
      if (Protocol::has_escape(packet)) return store_escaped(target, escape(to, target), packet);
      store_volatile(target + each * kSharers, packet);
    }
  }

  // Sends the units that `out` holds for offset `at` to the other ranks.
  MPICOMM_DEVICE void send_units(Outgoing& out, u64 at, u64 slot_index) const {
    const u32 rank = x.team.rank;
    if (kSameToAll && at < m.send_nbytes[(rank + 1) % kRanks]) out.sent = unit_of(out.units[1]);
#pragma unroll
    for (u32 distance = 1; distance < kRanks; ++distance) {
      const u32 to = (rank + distance) % kRanks;
      if (at >= m.send_nbytes[to]) continue;
      if constexpr (kSameToAll) send(to, 0, slot_index, out.sent, Protocol::flag(count));
      else send(to, 0, slot_index, unit_of(out.units[distance]), Protocol::flag(count));
    }
  }

  // Stores the unit to this rank itself at its place in the output.
  MPICOMM_DEVICE void store_own(const Outgoing& out, u64 at) const {
    const u32 rank = x.team.rank;
    if (kReduces || at >= m.send_nbytes[rank]) return;
#if defined(MPICOMM_STRIDED)
    store_strided(x.strides, x.receive_gaps[rank], m.receives[rank], at, m.send_nbytes[rank], out.units[0]);
#else
    if constexpr (kSameToAll) store_at(m.receives[rank], at, m.send_nbytes[rank], out.sent);
    else store_at(m.receives[rank], at, m.send_nbytes[rank], unit_of(out.units[0]));
#endif
  }

  // Stores the units of the packets of `ranks` at their places in the output. One copy of the code
  // of a conversion serves all ranks. The code may be long, and a kernel waits until the GPU has
  // fetched it.
  template <class Scales>
  MPICOMM_DEVICE void store_received(
      const SlotPackets (&units)[kOthers], const Scales& scales, u32 ranks, u64 at) const {
#pragma unroll(kConverts ? 1 : kRanks)
    for (u32 entry = 0; entry < kOthers; ++entry) {
      const u32 rank = rank_of(entry);
      if (!is_among(ranks, entry) || (kRelays && m.receives[rank] == nullptr)) continue;
      const Unit unit = scales.unit(entry, select(units, entry));
      store_message(x, m, rank, at, unit);
    }
  }

  // The peers with a unit at offset `at` in a message of `nbytes[rank]` bytes.
  MPICOMM_DEVICE u32 ranks_at(const u64 (&nbytes)[kMaxRanks], u64 at) const {
    u32 ranks = 0;
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (at < nbytes[rank] && rank != x.team.rank) ranks |= 1u << rank;
    }
    return ranks;
  }

  // The ranks from which this thread takes a unit at offset `at` in stage B.
  MPICOMM_DEVICE u32 senders_at(u64 at) const {
    if constexpr (kReduces) return at < x.output_nbytes ? x.sources & ~(1u << x.team.rank) : 0;
    return ranks_at(m.receive_nbytes, at);
  }

  // Sends an empty packet to the ranks that send a unit at offset `at` and get no unit there. The
  // packet says that the resets before the last fence have reached their slots. Pairs with the load
  // in `run` (b_ranks). Without it these ranks would overwrite packets that this rank has yet to
  // take.
  MPICOMM_DEVICE void pace(u64 at, u64 slot_index) const {
    const u32 ranks = m.paced & senders_at(at) & ~ranks_at(m.send_nbytes, at);
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (ranks >> rank & 1) send(rank, 0, slot_index, Unit{}, Protocol::flag(count));
    }
  }
};

}  // namespace mpicomm
