// What packets.cu is told, and what one of its threads does in one turn: where slots lie, how packets are stored in those
// of others and taken from its own. Stages, steps, laps and why a slot is free: see the top of packets.cu.
#pragma once

#include "fences.cuh"
#include "ll_flags.cuh"
#include "packet_wires.cuh"
#include "team.cuh"
#if defined(MPICOMM_DTYPE)
#include "reduce_packets.cuh"
#endif

namespace mpicomm {

// The host's copies of these constants and of Packets are in arguments.py; a test compares them.
constexpr u32 kRanks = MPICOMM_RANKS;
constexpr u32 kOverseers = 32;   // threads of a block that look after the others
constexpr u32 kStages = 2;       // inboxes of a parity
constexpr u32 kSlotNbytes = 16;  // a packet
constexpr u32 kFencesNbytes = sizeof(Fences);

struct Packets {
  Team team;
  const u8* sends[kMaxRanks];  // what goes to each rank; what goes to this one is copied
  u8* receives[kMaxRanks];     // where what comes from each rank goes; with fan-out what comes in stage C
  u64 send_nbytes[kMaxRanks];
  u64 receive_nbytes[kMaxRanks];
  const u8* own;  // this rank's contribution to the reduction, if it is one of the sources
  u8* output;     // null where the result is only sent on
  u64 output_nbytes;
  u8* inboxes[kMaxRanks];  // every rank's, of this kernel's wire
  u64 inbox_nbytes;        // of one source
  FlaggedInboxes flagged;
  Fences* fences;  // of each block
  u32 steps;  // of this rank; with fan-out, of all
  u32 laps;   // steps that an inbox holds
  u32 sources;  // of the reduction or relay, bit r for rank r
  u32 targets;  // of the fan-out
  u32 paced;    // ranks to or from which more goes than an inbox holds, and not as much as the other way
  u32 unused;
};

#if defined(MPICOMM_FAN_OUT)
constexpr bool kFanOut = true;
#else
constexpr bool kFanOut = false;
#endif

// Whether there is one step. A kernel for that alone has no loop, and the time of a short launch is that of fetching its
// code: 0.4 us of 3.2 went with the rest of it.
#if defined(MPICOMM_ONE_STEP)
constexpr bool kOneStep = true;
#else
constexpr bool kOneStep = false;
#endif

// Whether slots are used again.
#if defined(MPICOMM_LAPS)
constexpr bool kLaps = true;
static_assert(Wire::kGivesBack && !kOneStep, "there are as many slots as steps");
#else
constexpr bool kLaps = false;
#endif

// Whether slots are used again by two ranks of which one sends more than the other.
#if defined(MPICOMM_PACED)
constexpr bool kPaced = true;
static_assert(kLaps && !kFanOut, "else nobody waits for the word of a rank that sends nothing");
#else
constexpr bool kPaced = false;
#endif

// Threads of a block, at most, as there are registers; those that move data.
constexpr u32 kMostOfOneStep = kRanks > 4 ? 512 : 768;
constexpr u32 kMostOfMore = kRanks > 4 ? 256 : kFanOut ? 512 : kRanks > 2 ? 640 : 768;
constexpr u32 kThreads = kOneStep ? kMostOfOneStep : kMostOfMore;
constexpr u32 kWorkers = kThreads - kOverseers;
static_assert(kWorkers <= Fences::kMostWorkers && kOverseers == kLanes, "one overseer for each lane of the workers");

#if defined(MPICOMM_DTYPE)
constexpr bool kRelays = false;
constexpr bool kReduces = true;  // whether what a rank takes becomes one result
#else
constexpr bool kRelays = kFanOut;
constexpr bool kReduces = kRelays;
#endif

// What a single source sends, as it is.
MPICOMM_DEVICE Packet single(const Packet (&units)[kRanks], u32 sources) {
#pragma unroll
  for (u32 rank = 0; rank < kRanks; ++rank) {
    if (sources >> rank & 1) return units[rank];
  }
  return {};
}

// What of all sources becomes one result.
MPICOMM_DEVICE Packet reduce(const Packet (&units)[kRanks], u32 sources) {
#if defined(MPICOMM_DTYPE)
  if ((sources & (sources - 1)) != 0) return reduce_packets<kUnitNbytes>(units, sources);
#endif
  return single(units, sources);
}

// What a thread sends in a turn, on its way through registers: by distance from this rank, as each begins with the
// next, so that at any time each is written to by one.
struct Outgoing {
  Packet units[kRanks];

  MPICOMM_DEVICE void load(const Packets& x, u64 at) {
#pragma unroll
    for (u32 distance = kReduces ? 1 : 0; distance < kRanks; ++distance) {
      const u32 to = (x.team.rank + distance) % kRanks;
      if (at < x.send_nbytes[to]) {
        units[distance] = load_unit(x.sends[to], width_of(x.sends[to]), at, x.send_nbytes[to]);
      }
    }
  }
};

// Takes an escape that a packet of `rank` says there is; 0 if the kernel must leave.
MPICOMM_DEVICE_CALL u32 take_escape(const Team& team, u32 launch, u32 rank, u8* escape) {
  u32 code = 0;
  const auto absent = [&] {
    code = load_volatile(escape);  // pairs with the store of it in store_escaped: it says everything
    return code == 0 ? 1u << rank : 0u;
  };
  if (!await_ranks(team, launch, absent)) return 0;
  // Before the slot is free, with what is put back there: a later escape of the slot could else be wiped out.
  store_volatile(escape, 0);
  return code;
}

// What one thread does in one turn; the counts of a launch.
struct Worker {
  const Packets& x;
  u64 count;
  u32 launch;

  MPICOMM_DEVICE Pair* slot(u32 owner, u32 stage, u32 source, u64 place) const {
    const u32 inbox = ((launch % 2) * kStages + stage) * kRanks + source;
    return reinterpret_cast<Pair*>(x.inboxes[owner] + inbox * x.inbox_nbytes) + place;
  }

  // That of a slot: they follow the inboxes, one after the other.
  MPICOMM_DEVICE u8* escape(u32 owner, const Pair* slot) const {
    u8* const inboxes = x.inboxes[owner];
    const u64 begin = reinterpret_cast<const u8*>(slot) - inboxes;
    return inboxes + 2 * kStages * kRanks * x.inbox_nbytes + begin / kSlotNbytes;
  }

  // Looks at slots of a stage, one per rank of the set.
  MPICOMM_DEVICE void look(Pair (&packets)[kRanks], u32 stage, u32 ranks, u64 place) const {
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (ranks >> rank & 1) packets[rank] = load_volatile(slot(x.team.rank, stage, rank, place));
    }
  }

  MPICOMM_DEVICE static u32 absent(const Pair (&packets)[kRanks], u32 ranks, Wire::Flag flag) {
    u32 missing = 0;
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (ranks >> rank & 1 && !Wire::has_come(packets[rank], flag)) missing |= 1u << rank;
    }
    return missing;
  }

  // Whether a packet of each rank of the set is there, as it was sent. This one look is for packets that have not come
  // and for those with escapes: there is no other as long as all goes well.
  MPICOMM_DEVICE static bool are_plain(const Pair (&packets)[kRanks], u32 ranks, Wire::Flag flag) {
    bool plain = true;
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (ranks >> rank & 1) plain &= Wire::has_come(packets[rank], flag) && !Wire::has_escape(packets[rank]);
    }
    return plain;
  }

  // Takes one packet from each rank of the set; they have been looked at once.
  MPICOMM_DEVICE bool take(Pair (&packets)[kRanks], u32 stage, u32 ranks, u64 place) const {
    const Wire::Flag flag = Wire::flag(count);
    if (!are_plain(packets, ranks, flag)) {
      const auto missing = [&] {
        look(packets, stage, ranks, place);
        return absent(packets, ranks, flag);
      };
      if (absent(packets, ranks, flag) != 0 && !await_ranks(x.team, launch, missing)) return false;
#pragma unroll
      for (u32 rank = 0; rank < kRanks; ++rank) {
        if (!(ranks >> rank & 1) || !Wire::has_escape(packets[rank])) continue;
        const Pair* const from = slot(x.team.rank, stage, rank, place);
        const u32 code = take_escape(x.team, launch, rank, escape(x.team.rank, from));
        if (code == 0) return false;
        packets[rank] = unescaped(packets[rank], code);
      }
    }
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (ranks >> rank & 1) Wire::give_back(slot(x.team.rank, stage, rank, place));
    }
    return true;
  }

  // Stores a unit in a slot of a peer.
  MPICOMM_DEVICE void send(u32 to, u32 stage, u64 place, const Packet& unit, Wire::Flag flag) const {
    Pair* const target = slot(to, stage, x.team.rank, place);
    const Pair packet = Wire::packet(unit, flag);
    if (Wire::has_escape(packet)) return store_escaped(target, escape(to, target), packet);
    store_volatile(target, packet);
  }

  // Sends what was loaded at `at`; what goes to this rank itself is stored where it belongs.
  MPICOMM_DEVICE void push(const Outgoing& out, u64 at, u64 place) const {
    const u32 rank = x.team.rank;
#pragma unroll
    for (u32 distance = 1; distance < kRanks; ++distance) {
      const u32 to = (rank + distance) % kRanks;
      if (at < x.send_nbytes[to]) send(to, 0, place, out.units[distance], Wire::flag(count));
    }
    if (!kReduces && at < x.send_nbytes[rank]) {
      store_unit(x.receives[rank], width_of(x.receives[rank]), at, x.send_nbytes[rank], out.units[0]);
    }
  }

  MPICOMM_DEVICE void place(const Pair (&packets)[kRanks], u32 ranks, u64 at) const {
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (!(ranks >> rank & 1) || (kRelays && x.receives[rank] == nullptr)) continue;
      store_unit(x.receives[rank], width_of(x.receives[rank]), at, x.receive_nbytes[rank], Wire::unit(packets[rank]));
    }
  }

  // The ranks, but this one, of which messages of so many bytes have a unit at `at`.
  MPICOMM_DEVICE u32 ranks_at(const u64 (&nbytes)[kMaxRanks], u64 at) const {
    u32 ranks = 0;
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (at < nbytes[rank] && rank != x.team.rank) ranks |= 1u << rank;
    }
    return ranks;
  }

  // Those whose unit at `at` this thread takes in stage B.
  MPICOMM_DEVICE u32 senders_at(u64 at) const {
    if constexpr (kReduces) return at < x.output_nbytes ? x.sources & ~(1u << x.team.rank) : 0;
    return ranks_at(x.receive_nbytes, at);
  }

  // Tells those who send at `at` and are sent nothing there that what was put back before the last fence is performed.
  // Pairs with the look at it in `run`; without it they would store over packets that this rank has yet to take.
  MPICOMM_DEVICE void pace(u64 at, u64 place) const {
    const u32 ranks = x.paced & senders_at(at) & ~ranks_at(x.send_nbytes, at);
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (ranks >> rank & 1) send(rank, 0, place, Packet{}, Wire::flag(count));
    }
  }
};

}  // namespace mpicomm
