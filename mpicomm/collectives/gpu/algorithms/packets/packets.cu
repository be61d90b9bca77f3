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
// With more steps than an inbox holds ("laps"), packets of step k go where those of k - L were. What is put back there
// needs a fence, or it could arrive after the next packet and wipe it out. On the sentinel wire (the LL wire has no laps) a
// thread asks for one in turns P, 2 P and so on, see fences.cuh, and S turns after that, before turn F, waits until it is
// over. As P + S is L - 3, what was put back in a turn is performed before anything is stored L - 3 turns later.
// Two ranks may have more to send one way than the other ("paced", without fan-out): whoever has nothing at a unit that
// the other sends stores an empty packet there in turns F, and in no others. It is taken as any other: what is said below
// of the packet of step k - 2 then holds of that of the last F up to k - 2, which is later than k - 2 - P: the fence was
// asked for in turn F - S, k - L + 2 or later.
//   first inbox: A of step k is in turn k. Turn k - 1 ended with C of step k - 3, which the peer stored in its turn
//   k - 2, after the fence that followed its B of step k - L, in turn k - L + 1.
//   Without fan-out, B of step k - 2 ended turn k - 1, which the peer had stored in its turn k - 2, likewise. So it is
//   between two that fan out to a third alone, as shards are of as many steps as each other, or one more.
//   second inbox: B of step k, in turn k + 1, takes what the peer stored in its turn k, after the fence that followed
//   its C of step k - L, in turn k - L + 2.
//   In relays the source takes part in stage C, though it needs nothing but the flags: they tell how far the others are.
//   A relay stores B of step k for another in turn k + 1; its turn k ended with C of step k - 2 from that one, which it
//   stored in its turn k - 1, after the fence that followed its C of step k - L, in turn k - L + 2.
// Where there are no fences, "after" is that whoever has stored a packet has taken what it waited for before: it looked
// at each packet until that had come, and only then went on.
// The scope of the device is enough: the slots lie in its own memory, and stores of the peers come to be ordered with
// its own in the same place. Waiting for the whole system took 3 us a turn, as it waits for the stores to peers too.
// The model of PTX says nothing of this, as packets neither release nor acquire. What it rests on: a fence is over when
// that place has all that its thread and those it has acquired from had stored; stores of peers come to the same place;
// and what a peer stores after a branch on a packet that it has loaded does not come there before that load was done.
// Slots in memory of the host (MPICOMM_HOST_SLOTS) lie in no device: there a fence is one of the whole system, and what
// was put back has come to that memory when it is over.
//
// Why that cannot deadlock: of all threads that wait, look at one with the earliest launch and in it the smallest turn.
// What it waits for was stored by another rank's thread in an earlier turn. Or it is a fence, for which others of its
// block have to come to a turn that is earlier, and overseers to have seen others announce this launch, which they do
// before they wait in it. It needs all blocks of a launch to run at once, which the host sees to.

#include "packet_worker.cuh"

namespace mpicomm {

// How many turns after it was asked for a fence has to be over, and the turns between two of them: see "laps" at the top.
// They add up to laps - 3. The slack is a turn or more, each of some four microseconds, of which a fence takes two. The
// period is longer: no turn both waits for a fence and asks for the next.
MPICOMM_DEVICE u32 slack_of(const Packets& x) { return (x.laps - 2) / 4; }
MPICOMM_DEVICE u32 period_of(const Packets& x) { return x.laps - 3 - slack_of(x); }

// What the threads that move no data do, beside those that do: it costs nothing, if they are not the last to end and
// nobody waits for a fence of theirs. `ours` and `theirs` know the last launch.
MPICOMM_DEVICE void oversee(
    const Packets& x, u32 launch, u32 peer, const Announcements& ours, const Announcements& theirs) {
  const Team& team = x.team;
  // A rank that had nothing to take in the last launch was not told then that others were in something else.
  if (theirs.differ_from(ours, launch - 1)) refuse(team, peer, launch - 1);
  if ((x.sources >> peer & 1) != 0 || x.receive_nbytes[peer] > 0 || (kPaced && (x.paced >> peer & 1) != 0)) {
    // Data does not say what call it belongs to; its sender does, in an announcement that was made before.
    u32 said = kAbsent;
    const auto absent = [&] {
      said = look_at(team, peer, launch);
      return said == kAbsent ? 1u << peer : 0u;
    };
    if (await_ranks(team, launch, absent) && said == kDifferent) refuse(team, peer, launch);
  }
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

  begin_round_of_flags(x.flagged, launch);
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
  Fences& fences = x.fences[blockIdx.x];
  if constexpr (kLaps) fences.begin(thread, workers);
  // All leave or none: and all have read their number before it is advanced.
  if (!__syncthreads_and(ok)) return;
  const u32 steps = kOneStep ? 1 : x.steps, turns = steps + 1 + kFanOut;
  if (thread >= workers) {
    if (blockIdx.x == 0 && has_peer) oversee(x, launch, overseer, ours, theirs);
    if constexpr (kLaps) fences.serve(overseer, workers, period_of(x), turns - 1 - slack_of(x));
    return;
  }

  const Worker worker{x, count, launch};
  u64 b_at = a_at - step_nbytes, c_at = b_at - step_nbytes;
  u32 a_lap = 0, b_lap = 0, c_lap = 0;
  u32 paces_at = period_of(x) + slack_of(x);  // the next turn before which a fence must be over
  bool paced = false;                         // whether there was one before the last turn

#pragma unroll(kOneStep ? 3 : 1)
  for (u32 turn = 0; turn < turns; ++turn) {
    const bool has_b = turn >= 1 && turn < turns - kFanOut, has_c = kFanOut && turn >= 2;
    const bool paces = kLaps && turn == paces_at;
    if constexpr (kLaps) {
      if (paces) {
        fences.await(thread, turn - slack_of(x));
        paces_at += period_of(x);
      } else if (turn + slack_of(x) == paces_at) {
        fences.say(thread, turn);
      }
    }
    // Of what lasts from turn to turn there is too much here; where there is not, to keep them is a percent faster.
    if constexpr (kLaps) b_at = a_at - step_nbytes, c_at = b_at - step_nbytes;
    const u64 a_place = a_lap * threads + number;
    const u64 b_place = b_lap * threads + number;
    const u64 c_place = c_lap * threads + number;
    // All loads of the turn, before anything waits for one of them; what goes out was loaded in the turn before.
    const bool reduces = kReduces && has_b && b_at < x.output_nbytes;
    const u32 b_senders = has_b ? worker.senders_at(b_at) : 0;
    u32 b_ranks = b_senders;
    // Pairs with `pace` of those to whom this rank sends at b_at: until that has come, they may not have taken what lies in
    // the slots that this rank goes on to store in.
    if (kPaced && paced) b_ranks |= x.paced & worker.ranks_at(x.send_nbytes, b_at);
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

    if (b_ranks != 0 && !worker.take(b, 0, b_ranks, b_place)) break;
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
      if (c_ranks != 0 && !worker.take(c, 1, c_ranks, c_place)) break;
      worker.place(c, c_ranks, c_at);
    }

    paced = paces;
    c_at = b_at, b_at = a_at, a_at += step_nbytes;
    c_lap = b_lap, b_lap = a_lap, a_lap = a_lap + 1 == x.laps ? 0 : a_lap + 1;
  }
  // Pairs with `serve`: a thread that broke off asks for no fence any more, and overseers would wait for it for ever.
  if constexpr (kLaps) fences.say(thread, fences.kLeft);
}

}  // namespace mpicomm

// Bounds the registers, so that a block always fits: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kThreads, 1)
    mpicomm_packets(const __grid_constant__ mpicomm::Packets);

MPICOMM_KERNEL void mpicomm_packets(const __grid_constant__ mpicomm::Packets packets) { mpicomm::run(packets); }
