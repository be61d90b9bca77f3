// One exchange in packets of 16 bytes that say themselves whether they have come: every rank stores what it sends
// straight into the inboxes of the others, who look at each packet until it is there. No flag, no fence and no barrier
// lies between a store and its use, which is what makes this fast, from 8 bytes up.
//
// Two wires: see packet_wires.cuh.
//
// Stages. A: unit u of what goes to rank p is stored in p's first inbox. B: a rank takes unit u from all of its
// sources and reduces or places it. With fan-out, it also stores the result in the second inboxes of others, and C:
// they take the results from there (all of them in a two-shot all-reduce, the root alone in a two-shot reduce). Where
// nothing is reduced, what fans out is what a single source has sent: relays. Unit u of everything is the work of one
// thread of each rank: what is read of the user's memory is read before the same thread writes there, so input and
// output may be the same memory.
//
// Steps. With T threads, step k is units k * T to (k + 1) * T. In turn k a thread does A of step k, B of step k - 1 and
// C of step k - 2, with the loads of all three under way at once.
//
// Why a slot is free when it is written. There are two sets of inboxes, used in turns by the parity of the launch. A
// rank begins launch n only when all others have begun launch n - 1 (`announce`), hence have finished n - 2, whose
// packets lay where those of n go. Were there one set, a fast rank would write over packets that are still to be read.
// With more steps than an inbox holds ("laps"), packets of step k go where those of k - L were. On the sentinel wire one
// turn in every L - 3 ends with a fence: what was put back in a turn is performed L - 4 turns later at the latest, before
// anything more is stored. Without it that could arrive after the next packet and wipe it out. The LL wire has no laps.
// Two ranks may have more to send one way than the other ("paced", without fan-out): whoever has nothing at a unit that
// the other sends stores an empty packet there in turns that follow a fence, F + 1, and in no others. It is taken as any
// other: what is said below of the packet of step k - 2 then holds of that of F + 1, which is k - 2 or less.
//   first inbox: A of step k is in turn k. Turn k - 1 ended with C of step k - 3, which the peer stored in its turn
//   k - 2, after the fence that followed its B of step k - L, in turn k - L + 1.
//   Without fan-out, B of step k - 2 ended turn k - 1, which the peer had stored in its turn k - 2, likewise.
//   second inbox: B of step k, in turn k + 1, takes what the peer stored in its turn k, after the fence that followed
//   its C of step k - L, in turn k - L + 2.
//   In relays the source takes part in stage C, though it needs nothing but the flags: they tell how far the others are.
//   A relay stores B of step k for another in turn k + 1; its turn k ended with C of step k - 2 from that one, which it
//   stored in its turn k - 1, after its C of step k - 4.
// Where there are no fences, "after" is that whoever has stored a packet has taken what it waited for before: it looked
// at each packet until that had come, and only then went on.
// The scope of the device is enough: the slots lie in its own memory, and stores of the peers come to be ordered with
// its own in the same place. Waiting for the whole system took 3 us a turn, as it waits for the stores to peers too.
//
// Why that cannot deadlock: of all threads that wait, look at one with the earliest launch and in it the smallest turn.
// What it waits for was stored by another rank's thread in an earlier turn, or earlier in the same turn before that
// waited. It needs all blocks of a launch to run at once, which the host sees to.

#include "packet_wires.cuh"
#include "team.cuh"
#if defined(MPICOMM_DTYPE)
#include "reduce_packets.cuh"
#endif

namespace mpicomm {

// The host's copies of these constants and of Packets are in packets.py; a test compares them.
constexpr u32 kRanks = MPICOMM_RANKS;
constexpr u32 kOverseers = 32;   // threads of a block that look after the others
constexpr u32 kStages = 2;       // inboxes of a parity
constexpr u32 kSlotNbytes = 16;  // a packet

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
  u64 flagged;             // where the inboxes of the LL wire begin in this rank's arena
  u64 flagged_nbytes;      // of one source
  u32 steps;  // of this rank; with fan-out, of all
  u32 laps;   // steps that an inbox holds
  u32 sources;  // of the reduction, bit r for rank r; where there is none, ranks to hear from though nothing comes here
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

// Whether slots are used again by two ranks of which one sends more than the other.
#if defined(MPICOMM_PACED)
constexpr bool kPaced = true;
static_assert(Wire::kGivesBack && !kFanOut && !kOneStep, "else nobody waits for the word of a rank that sends nothing");
#else
constexpr bool kPaced = false;
#endif

// Threads of a block, at most, as there are registers; those that move data.
constexpr u32 kMostOfOneStep = kRanks > 4 ? 512 : 768;
constexpr u32 kMostOfMore = kRanks > 4 ? 256 : kFanOut ? 512 : kRanks > 2 ? 640 : 768;
constexpr u32 kThreads = kOneStep ? kMostOfOneStep : kMostOfMore;
constexpr u32 kWorkers = kThreads - kOverseers;

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

  // Tells those who send at `at` and are sent nothing there how far this rank is.
  MPICOMM_DEVICE void pace(u64 at, u64 place) const {
    const u32 ranks = x.paced & senders_at(at) & ~ranks_at(x.send_nbytes, at);
#pragma unroll
    for (u32 rank = 0; rank < kRanks; ++rank) {
      if (ranks >> rank & 1) send(rank, 0, place, Packet{}, Wire::flag(count));
    }
  }
};

// What the threads that move no data do, beside those that do: they cost nothing, if they are not the last to end.
// `ours` and `theirs` know the last launch.
MPICOMM_DEVICE void oversee(
    const Packets& x, u32 launch, u32 peer, const Announcements& ours, const Announcements& theirs) {
  const Team& team = x.team;
  // A rank that had nothing to take in the last launch was not told then that others were in something else.
  if (theirs.differ_from(ours, launch - 1)) refuse(team, peer, launch - 1);
  if ((x.sources >> peer & 1) != 0 || x.receive_nbytes[peer] > 0) {
    // Data does not say what call it belongs to; its sender does, in an announcement that was made before.
    u32 said = kAbsent;
    const auto absent = [&] {
      said = look_at(team, peer, launch);
      return said == kAbsent ? 1u << peer : 0u;
    };
    if (await_ranks(team, launch, absent) && said == kDifferent) refuse(team, peer, launch);
  }
}

// Numbers of launches come again after 2^30; a flag that has lain in a slot since then would be taken for new. Launches
// 0 and 1 of each such round therefore wipe the set of inboxes that the next one uses: nobody writes there before this
// launch is announced, and all that was written there has been taken.
MPICOMM_DEVICE_CALL void wipe(const Packets& x, u32 launch) {
  const u64 nbytes = kStages * kRanks * x.flagged_nbytes;
  u8* const set = x.team.arenas[x.team.rank] + x.flagged + (launch + 1) % 2 * nbytes;
  for (u64 at = static_cast<u64>(threadIdx.x) * kSlotNbytes; at < nbytes; at += blockDim.x * kSlotNbytes) {
    store_volatile(reinterpret_cast<Pair*>(set + at), {0, 0});
  }
  fence_system();  // before this launch is announced: a peer could else write first and lose what it wrote
  __syncthreads();
}

MPICOMM_DEVICE void run(const Packets& x) {
  const Team& team = x.team;
  const u32 rank = team.rank, thread = threadIdx.x, workers = blockDim.x - kOverseers;
  const u64 threads = static_cast<u64>(gridDim.x) * workers;
  const u64 number = static_cast<u64>(blockIdx.x) * workers + thread;
  const u64 step_nbytes = threads * kUnitNbytes;
  // Everything before may lie in memory that the kernel ahead still writes.
  wait_for_predecessor();

  // What this launch needs from memory first, none of which waits for another: its number, the first data and, in a warp
  // that moves none, how far the others are and whether somebody has given up.
  const u64 count = launches_of(team)[blockIdx.x] + 1;
  const u32 launch = static_cast<u32>(count);
  const u32 overseer = thread - workers;  // huge for threads that move data
  const bool has_peer = overseer < kRanks && overseer != rank;
  Announcements ours{}, theirs{};
  if (has_peer) {
    ours = load_said(team, overseer);
    theirs = load_announcements(team, overseer);
  }
  // Before anything depends on one of the loads above, which a warp waits for as a whole.
  Health health;
  if (overseer == kRanks) health = load_health(team);
  u64 a_at = number * kUnitNbytes;
  Outgoing out;
  if (thread < workers) out.load(x, a_at);

  if (blockIdx.x == 0 && (launch & ((1u << kFlagBits) - 1)) < 2) wipe(x, launch);
  if (blockIdx.x == 0 && has_peer) announce(team, overseer, launch);
  bool ok = true;
  const auto is_behind = [&] { return static_cast<i32>(theirs.last_launch() - (launch - 1)) < 0; };
  if (has_peer && is_behind()) {
    // Pairs with the peer's announcement of its last launch. This thread's load has returned before any thread of the
    // block stores to the peer: a barrier and a condition lie between.
    const auto absent = [&] {
      theirs = load_announcements(team, overseer);
      return is_behind() ? 1u << overseer : 0u;
    };
    ok = await_ranks(team, launch, absent);
  }
  // Before anything is stored to a peer, which could not tell it from what it waits for.
  if (overseer == kRanks) ok = is_healthy(team, blockIdx.x, health);
  // All leave or none: and all have read their number before it is advanced.
  if (!__syncthreads_and(ok)) return;
  if (thread >= workers) {
    if (blockIdx.x == 0 && has_peer) oversee(x, launch, overseer, ours, theirs);
    return;
  }

  const Worker worker{x, count, launch};
  u64 b_at = a_at - step_nbytes, c_at = b_at - step_nbytes;
  u32 a_lap = 0, b_lap = 0, c_lap = 0;
  bool paces = false, paced = false;  // whether this turn, and the last one, follow a fence

  const u32 steps = kOneStep ? 1 : x.steps;
#pragma unroll(kOneStep ? 3 : 1)
  for (u32 turn = 0; turn < steps + 1 + kFanOut; ++turn) {
    const bool has_b = turn >= 1 && turn < steps + 1, has_c = kFanOut && turn >= 2;
    const u64 a_place = a_lap * threads + number;
    const u64 b_place = b_lap * threads + number;
    const u64 c_place = c_lap * threads + number;
    // All loads of the turn, before anything waits for one of them; what goes out was loaded in the turn before.
    const bool reduces = kReduces && has_b && b_at < x.output_nbytes;
    const u32 b_senders = has_b ? worker.senders_at(b_at) : 0;
    u32 b_ranks = b_senders;
    if (kPaced && has_b && paced) b_ranks |= x.paced & worker.ranks_at(x.send_nbytes, b_at);
    const u32 c_ranks = has_c ? worker.ranks_at(x.receive_nbytes, c_at) : 0;
    Pair b[kRanks], c[kRanks];
    [[maybe_unused]] Packet in{};
    worker.look(b, 0, b_ranks, b_place);
    if (reduces && x.own != nullptr) in = load_unit(x.own, width_of(x.own), b_at, x.output_nbytes);
    if constexpr (kFanOut) worker.look(c, 1, c_ranks, c_place);

    if (!kOneStep || turn == 0) worker.push(out, a_at, a_place);
    if (kPaced && paces) worker.pace(a_at, a_place);
    if (!kOneStep) out.load(x, a_at + step_nbytes);
    if (turn == 0) {
      // What would otherwise hold the first packets up, while nothing can have come yet.
      let_successor_start();
      count_launch(team, count, thread, workers);
    }

    if (b_ranks != 0 && !worker.take(b, 0, b_ranks, b_place)) return;
    if (reduces) {
      Packet units[kRanks];
#pragma unroll
      for (u32 source = 0; source < kRanks; ++source) units[source] = source == rank ? in : Wire::unit(b[source]);
      const Packet result = reduce(units, x.sources);
      if constexpr (kFanOut) {
        const Wire::Flag flag = Wire::flag(count);
#pragma unroll
        for (u32 distance = 1; distance < kRanks; ++distance) {
          const u32 to = (rank + distance) % kRanks;
          if (x.targets >> to & 1) worker.send(to, 1, b_place, result, flag);
          if (kRelays && x.sources >> to & 1) worker.send(to, 1, b_place, Packet{}, flag);  // it needs no data
        }
      }
      if (x.output != nullptr) store_unit(x.output, width_of(x.output), b_at, x.output_nbytes, result);
    }
    if constexpr (!kReduces) worker.place(b, b_senders, b_at);
    if constexpr (kFanOut) {
      if (c_ranks != 0 && !worker.take(c, 1, c_ranks, c_place)) return;
      worker.place(c, c_ranks, c_at);
    }

    // See "laps" at the top.
    paced = paces;
    paces = Wire::kGivesBack && !kOneStep && x.steps > x.laps && turn % (x.laps - 3) == 0;
    if (paces) fence_device();
    c_at = b_at, b_at = a_at, a_at += step_nbytes;
    c_lap = b_lap, b_lap = a_lap, a_lap = a_lap + 1 == x.laps ? 0 : a_lap + 1;
  }
}

}  // namespace mpicomm

// Bounds the registers, so that a block always fits: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kThreads, 1)
    mpicomm_packets(const __grid_constant__ mpicomm::Packets);

MPICOMM_KERNEL void mpicomm_packets(const __grid_constant__ mpicomm::Packets packets) { mpicomm::run(packets); }
