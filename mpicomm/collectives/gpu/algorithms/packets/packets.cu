// One exchange in packets of 16 bytes that show by themselves whether they have come
// (packet_protocols.cuh). Every rank stores its messages straight into the inboxes of the other
// ranks. A receiver loads each slot of its inboxes until the packet is there. The kernel is fast
// from 8 bytes up, because no flag, fence or barrier lies between the store of a packet and its
// use.
//
// Units. One packet carries one unit of a message (units.cuh). On each rank, one worker thread handles unit u
// of all messages. That thread reads unit u of the user's memory before it writes there, so input
// and output may be the same memory. rows.cuh says which units a thread has.
//
// Stages. An inbox holds the packets of one source rank in one stage.
//   A: a rank stores unit u of its message to rank p in the first inbox that p has for it.
//   B: a rank takes unit u of all of its sources from its first inboxes, and reduces or places it.
//      With fan-out it also stores the result in the second inboxes of other ranks. With rows it
//      stores the statistics of a row there before the last units of the row.
//   C: these ranks take the results from their second inboxes. In a two-shot all-reduce all ranks
//      do that, in a two-shot reduce only the root.
// A relay is a fan-out without a reduction: each rank sends on the data that a single source has
// sent to it.
//
// Steps and turns. With T worker threads, a step is up to T units, one for each thread. In turn k a
// thread does A of step k, B of step k-1 and C of step k-2. The loads of all three are in flight at
// once. In an inbox, the thread with number n has slot n of each step, whether or not it has a unit in
// the step. Without rows unit u so has slot u, whichever thread handles it. Hence a rank in a launch of
// one step, which numbers its threads otherwise, can exchange a message with a rank in a longer launch.
//
// Why a slot is free when a rank stores in it, from launch to launch. There are two sets of
// inboxes. The parity of the launch selects the set. A rank begins launch n only after all other
// ranks have begun launch n-1 (`announce`). So they have finished launch n-2, which used the same
// slots as launch n. With one set a fast rank would overwrite packets that a slow rank has yet to
// read. A set is one half of the memory, also for launches with one inbox for each source (`stages`),
// which is twice as long then.
//
// Why a slot is free within a launch. A message may have more steps than the L steps that an inbox
// holds ("laps", only on the sentinel protocol). Then the packet of step k goes where the packet
// of step k-L was, and the receiver has reset the slot in between. The reset needs a fence.
// Otherwise it could arrive after the packet of step k and wipe it out.
//
// A worker requests a fence in turns P, 2*P and so on. S turns later, before turn F, it waits until
// the fence is over (see fences.cuh). P+S is L-3. A worker that resets a slot requests a fence at
// most P turns later. S turns after that it has waited for the fence. Hence:
//
//     (*)  A reset of turn t has reached its slot before the same worker stores anything in turn
//          t+L-3 or later.
//
// With rows P+S is L-4, and (*) holds for turn t+L-4.
//
// A packet that the sender takes shows it that the slot is free, because the receiver stored that
// packet late enough:
//
// - First inbox, with fan-out. The sender stores step k in turn k (A). The receiver reset the slot
//   in its turn k-L+1 (B of step k-L). By (*) the reset is there before the stores of its turn k-2.
//   In that turn the receiver stored step k-3 for stage C. The sender took it at the end of its
//   turn k-1.
// - First inbox, without fan-out. The receiver stored step k-2 in its turn k-2 (A), after the same
//   reset. The sender took it at the end of its turn k-1 (B). The same holds with fan-out for two
//   ranks that fan out only to a third rank. The shards of all ranks have equally many steps, or
//   one more, so a rank that sends step k also takes step k-2.
// - First inbox, with rows. The thread may have no unit in step k-2, but then it has a unit in step
//   k-3 (rows.cuh). The receiver stored step k-3 in its turn k-3 (A). By (*) for rows, the same
//   reset is there before the stores of that turn. The sender took the packet at the end of its
//   turn k-2 (B).
// - First inbox, with rows and fan-out. The receiver stored step k-3 for stage C in its turn k-2. If
//   it has no unit in step k-3, it has one in step k-4, and stored that in its turn k-3. By (*) for
//   rows, the same reset is there before the stores of both turns. The sender took the packet at the
//   end of its turn k-1 or k-2 (C).
// - Second inbox. The sender stores step k in turn k+1 (B). The receiver reset the slot in its turn
//   k-L+2 (C of step k-L). By (*) the reset is there before the stores of its turn k-1. The
//   receiver stored step k in its turn k (A). The sender took it before it stored the result.
// - Statistics. The first thread of a group stores them in the turn in which it stores its unit of the
//   same step for stage C. It also takes them in the same turn as that unit. So the proof for that
//   unit is a proof for them.
// - Second inbox, between two relays. The sender stores step k in turn k+1 (B). The receiver reset
//   the slot in its turn k-L+2 (C of step k-L). By (*) the reset is there before the stores of its
//   turn k-1. In that turn the receiver stored step k-2 for stage C. The sender took it at the end
//   of its turn k. The source of a relay also takes part in stage C. It needs no data, but the
//   empty packets of the relays show it how far they are.
// - Paced. Without fan-out one of two ranks may have more to send than the other. If the other rank
//   has no unit, it stores an empty packet in its turns F, and in no other turns. The first rank
//   takes it like any packet. Let F be the last of these turns up to k-2. Its packet replaces the
//   packet of step k-2 above. The worker requested the fence before turn F in turn F-S. F is later
//   than k-2-P, so F-S is k-L+2 or later, hence after the reset in turn k-L+1.
//
// No fence is needed between a packet that a rank takes and its next store. The thread polls
// each packet until it has come, and only then goes on. The PTX memory model promises none of these
// orders, because packets neither release nor acquire. fence_slots in memory_order.cuh explains the
// hardware behaviour that this code relies on, and the scope of a fence.
//
// Why the kernel cannot deadlock. Of all threads that wait, consider a thread in the earliest
// launch, and there in the smallest turn. If it waits for a packet, another rank's thread stores
// that packet in an earlier turn. If it waits for a fence, two things come first. Other workers of
// its block come to the turn in which they request the fence, which is an earlier turn. And
// overseers see the other ranks announce this launch, which these do before they wait in it. If it
// waits for a length (device_counts.cuh), the peer stores the length before it waits for a packet. At the
// end of a row it may wait for another worker of its group, and for quantization for another worker of
// its warp. Then that worker waits for a packet or a fence of the same or an earlier turn. It either
// takes that and comes, or gives up and comes. So the thread goes on. That needs all blocks of a
// launch to run at once: see team.cuh.

#include "oversee.cuh"
#include "received_rows.cuh"
#include "scales.cuh"

namespace mpicomm {

// S and P at the top of this file. S is the number of turns from the request for a fence to the
// wait for it. P is the number of turns from one request to the next. L is `laps`. S+P is L-3, and
// L is at least 6. With rows S+P is L-4, and L is at least 7. So S is at least one turn, which
// takes longer than a fence. P is longer than S, so no turn both waits for a fence and requests
// the next fence.
MPICOMM_DEVICE u32 sum_of_both(const Packets& x) { return x.laps - (kRows ? 4 : 3); }
MPICOMM_DEVICE u32 slack_of(const Packets& x) { return (sum_of_both(x) + 1) / 4; }
MPICOMM_DEVICE u32 period_of(const Packets& x) { return sum_of_both(x) - slack_of(x); }

// `m` are the messages, part of `x` if the host knows their lengths, else shared memory. `memory` is
// shared memory for rows.
MPICOMM_DEVICE void run(const Packets& x, AllMessages& m, RowMemory* memory) {
  const Team& team = x.team;
  const u32 rank = team.rank, thread = threadIdx.x, workers = blockDim.x - kOverseers;
  const u64 threads = static_cast<u64>(gridDim.x) * workers;
  const u64 number = number_of(thread, workers);
  // The previous kernel may still write memory that this kernel reads.
  wait_for_predecessor();

  // The first loads of a launch. No load waits for another load. They load the number of the launch
  // and the first data. In the overseer warp they load how far the peers are, and whether a rank
  // has given up.
  const u64 count = launches_of(team)[blockIdx.x] + 1;
  const u32 launch = static_cast<u32>(count);
  const u32 overseer = thread - workers;  // huge for workers
  const bool has_peer = overseer < kRanks && overseer != rank;
  Announcements ours{}, theirs{};
  if (has_peer) {
    ours = load_sent_announcements(team, overseer);
    theirs = load_announcements(team, overseer);
  }
  // This load comes before the first use of a load above, because the whole warp waits there.
  Health health;
  if (overseer == kRanks) health = load_health(team);
  Course course(finish_of(x), thread, workers);
  u64 a_at = course.first();
  Outgoing out;
  if (!kDeviceCounts && thread < workers) out.load(m, rank, a_at);
#if defined(MPICOMM_DEVICE_COUNTS)
  SentCounts<kRanks> sent_counts;
  sent_counts.load(x.device_counts, overseer);
#endif

  begin_round_of_flags(x.ll, launch);
  if (blockIdx.x == 0 && has_peer) announce(team, overseer, launch);
  bool ok = true;
  const auto is_behind = [&] { return static_cast<i32>(theirs.last_launch() - (launch - 1)) < 0; };
  if (has_peer && is_behind()) {
    // The peer must have begun the previous launch. Pairs with the peer's store in `announce`.
    // Without the wait this rank would overwrite packets that the peer has yet to take. The load
    // returns before any thread of the block stores to the peer, because a condition and a barrier
    // lie in between.
    const auto absent = [&] {
      theirs = load_announcements(team, overseer);
      return is_behind() ? 1u << overseer : 0u;
    };
    ok = await_ranks(team, launch, absent);
  }
  // A rank that has failed must store nothing to a peer, because the peer could take that for the
  // awaited packet.
  if (overseer == kRanks) ok = is_healthy(team, blockIdx.x, health);
#if defined(MPICOMM_DEVICE_COUNTS)
  const Lengths<kRanks> lengths{team, x.ll, x.device_counts, m, launch, overseer};
  if (thread >= workers) ok = lengths.publish(sent_counts.place(team, x.device_counts, m, overseer) && ok);
#endif
  Fences& fences = x.fences[blockIdx.x];
  if constexpr (kLaps) fences.begin(thread, workers);
  // Either all threads leave or none, because no thread may wait at a barrier for a thread that has
  // left. After this barrier all threads have read the number of the launch, so count_launch may
  // advance it.
  if (!__syncthreads_and(ok)) return;
  const Worker worker{x, m, count, launch};
#if defined(MPICOMM_DEVICE_COUNTS)
  // Turn 0. Its packets leave while the overseers exchange lengths. Until then no thread knows the place
  // of a message in the output.
  const u64 first_at = a_at;
  Outgoing first;
  bool has_lengths = false;
  if (thread < workers) {
    first.load(m, rank, first_at);
    worker.send_units(first, first_at, number);
    a_at = course.after(first_at);
    out.load(m, rank, a_at);
    let_successor_start();
    count_launch(team, count, thread, workers);
  } else {
    has_lengths = lengths.receive_all();
    if (has_lengths) lengths.count_steps(threads * kCarriedNbytes, x.laps);
    ok = has_lengths && lengths.place_received();
  }
  // Orders the lengths before their loads by all threads. If there is no room, all threads leave before
  // any of them stores into the output.
  ok = __syncthreads_and(ok);
  if (thread >= workers) {
    if (blockIdx.x == 0 && has_lengths) lengths.compare_rooms();
  } else if (ok) {
    worker.store_own(first, first_at);
    // One step needs no loop: fetching the code of the loop would take a large part of a short launch.
    if (m.steps == 1) {
      const u32 senders = worker.senders_at(first_at);
      SlotPackets units[kOthers];
      worker.load_slots(units, 0, senders, number);
      if (senders != 0 && worker.take(units, 0, senders, number)) {
        worker.store_received(units, Scales{}, senders, first_at);
      }
      fences.publish(thread, fences.kLeft);
      return;
    }
  }
  if (!ok) return;
#endif
  const u32 steps = kOneStep ? 1 : m.steps, turns = steps + 1 + kFanOut;
  // Whether this launch uses slots again. The host has chosen a kernel without laps if it knows the answer.
  const bool reuses = kLaps && (!kDeviceCounts || steps > x.laps);
  if (thread >= workers) {
    if (blockIdx.x == 0 && has_peer) oversee(x, m, launch, overseer, ours, theirs);
    if (reuses) fences.serve(overseer, workers, period_of(x), turns - 1 - slack_of(x));
    return;
  }

#if defined(MPICOMM_WEIGHT)
  Rows rows(finish_of(x), memory, rank, thread, workers);
  // A worker that breaks off in a row first waits for its group, and other workers of the group may wait
  // for a fence. Pairs with the load in `serve`. Without the word, the overseer would wait for this
  // worker, this worker for its group, and the group for the fence.
  const auto leave = [&] {
    if constexpr (kLaps) fences.publish(thread, fences.kLeft);
    row_barrier(rows.barrier, false);
  };
#if defined(MPICOMM_FAN_OUT)
  ReceivedRows received{rows};
#endif
#endif
  u64 b_at = 0, c_at = 0;
  u32 a_lap = 0, b_lap = 0, c_lap = 0;
  u32 paces_at = reuses ? period_of(x) + slack_of(x) : ~0u;  // the next turn that needs a fence to be over first
  bool paced = false;                                        // whether the previous turn was such a turn
  u32 turn = 0;
  if constexpr (kDeviceCounts) a_lap = turn = 1;

#pragma unroll(kOneStep ? 3 : 1)
  for (; turn < turns; ++turn) {
    const bool has_b = turn >= 1 && turn < turns - kFanOut, has_c = kFanOut && turn >= 2;
    const bool paces = kLaps && turn == paces_at;
    if constexpr (kLaps) {
      if (paces) {
        fences.await(thread, turn - slack_of(x));
        paces_at += period_of(x);
      } else if (turn + slack_of(x) == paces_at) {
        fences.publish(thread, turn);
      }
    }
    // With laps, more values last from turn to turn than there are registers. So the kernel
    // computes these two values again. Without laps it is faster to keep them.
    if constexpr (kLaps) course.step_back(a_at, b_at, c_at);
    const u64 a_slot = a_lap * threads + number;
    const u64 b_slot = b_lap * threads + number;
    const u64 c_slot = c_lap * threads + number;
    // All loads of the turn come before the first use of any of them. The previous turn has loaded
    // the units that go out.
    const bool reduces = kReduces && has_b && b_at < x.output_nbytes;
    const u32 b_senders = has_b ? worker.senders_at(b_at) : 0;
    u32 b_ranks = b_senders;
    // Pairs with `pace` of the ranks to which this rank sends at b_at. Before that packet comes,
    // they may not have taken the packets in the slots where this rank stores next.
    if (kPaced && paced) b_ranks |= m.paced & worker.ranks_at(m.send_nbytes, b_at);
    const u32 c_ranks = has_c ? worker.ranks_at(m.receive_nbytes, c_at) : 0;
    SlotPackets b[kOthers], c[kOthers];
    Scales b_scales, c_scales;
    [[maybe_unused]] Loaded in{};
    [[maybe_unused]] const Unit sent = out.sent;
    worker.load_slots(b, 0, b_ranks, b_slot);
    b_scales.load(worker, 0, b_ranks, b_slot);
    if (!kSameToAll && reduces && x.own != nullptr) in = load_at(x.own, b_at, x.output_nbytes);
#if defined(MPICOMM_WEIGHT)
    Packet residual{};
    if (reduces) residual = rows.load_residual(b_at);
#endif
    if constexpr (kFanOut && !kRows) {
      worker.load_slots(c, 1, c_ranks, c_slot);
      c_scales.load(worker, 1, c_ranks, c_slot);
    }

    if (!kOneStep || turn == 0) {
      worker.send_units(out, a_at, a_slot);
      worker.store_own(out, a_at);
    }
    if (kPaced && paces) worker.pace(a_at, a_slot);
    const u64 next_at = course.after(a_at);
    if (!kOneStep) out.load(m, rank, next_at);
    if (!kDeviceCounts && turn == 0) {
      // These two calls come after the first packets, so they do not delay those. They delay no
      // packet from a peer, because none can have come yet.
      let_successor_start();
      count_launch(team, count, thread, workers);
    }

    bool took = b_ranks == 0 || worker.take(b, 0, b_ranks, b_slot);
    if (b_ranks != 0) took = b_scales.take(worker, 0, b_ranks, b_slot, took);
#if defined(MPICOMM_WEIGHT)
    if (!took) leave();
#endif
    if (!took) break;
    [[maybe_unused]] Reduced reduced{};
    [[maybe_unused]] Unit result{};
    if (reduces) {
      Unit units[kRanks], own;
      if constexpr (kSameToAll) own = sent;
      else own = unit_of(in);
#pragma unroll
      for (u32 source = 0; source < kRanks; ++source) {
        units[source] = source == rank ? own : b_scales.unit(entry_of(source), b[entry_of(source)]);
      }
      reduced = reduce(units, x.sources);
#if defined(MPICOMM_WEIGHT)
      result = rows.add(b_at, reduced, residual);
#else
      if constexpr (!kKeepsReduced) result = finish_of(x).sent_on(reduced, x.output + b_at);
#endif
    }
    const Protocol::Flag flag = Protocol::flag(count);
#if defined(MPICOMM_WEIGHT)
    const bool row_ends = has_b && rows.ends();
    Statistics statistics;
    if (row_ends) {
      if (!rows.end_row(statistics)) break;
      // The statistics leave before the last packets of h. While those come, the receivers normalise the
      // beginning of the row.
      if (kFanOut && reduces && rows.course.thread == 0) {
#pragma unroll
        for (u32 distance = 1; distance < kRanks; ++distance) {
          const u32 to = (rank + distance) % kRanks;
          worker.send(to, kStatistics, b_slot, __builtin_bit_cast(Packet, statistics), flag);
        }
      }
    }
#endif
    if (reduces) {
      if constexpr (kFanOut) {
#pragma unroll
        for (u32 distance = 1; distance < kRanks; ++distance) {
          const u32 to = (rank + distance) % kRanks;
          if (x.targets >> to & 1) worker.send(to, 1, b_slot, result, flag);
          if (kRelays && x.sources >> to & 1) worker.send(to, 1, b_slot, Unit{}, flag);  // the source needs no data
        }
      }
      if (!kRows && x.output != nullptr) {
        if constexpr (kKeepsReduced) store_at(x.output, b_at, x.output_nbytes, reduced);
        else finish_of(x).store(x.output, b_at, x.output_nbytes, result);
      }
    }
    if constexpr (!kReduces) worker.store_received(b, b_scales, b_senders, b_at);
#if defined(MPICOMM_WEIGHT)
    if (row_ends) rows.normalise(statistics);
#if defined(MPICOMM_FAN_OUT)
    if (has_c) {
      worker.load_slots(c, 1, c_ranks, c_slot);
      const bool others_meet = turn + 1 < turns;
      if (!received.take(worker, c, c_ranks, c_at, c_slot, [&] { if (others_meet) leave(); })) break;
    }
    received.follow();
#endif
    if (has_b) rows.course.after(0);
#else
    if constexpr (kFanOut) {
      if (c_ranks != 0 && !c_scales.take(worker, 1, c_ranks, c_slot, worker.take(c, 1, c_ranks, c_slot))) break;
      worker.store_received(c, c_scales, c_ranks, c_at);
    }
#endif

    paced = paces;
    c_at = b_at, b_at = a_at, a_at = next_at;
    c_lap = b_lap, b_lap = a_lap, a_lap = a_lap + 1 == x.laps ? 0 : a_lap + 1;
  }
  // Pairs with the load in `serve`. A worker that breaks off requests no more fences. Without this
  // store its overseer would wait for it for ever.
  if constexpr (kLaps) fences.publish(thread, fences.kLeft);
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh.
extern "C" __global__ void __launch_bounds__(mpicomm::kThreads, 1)
    mpicomm_packets(const __grid_constant__ mpicomm::Packets);

MPICOMM_KERNEL void mpicomm_packets(const __grid_constant__ mpicomm::Packets packets) {
#if defined(MPICOMM_WEIGHT)
  __shared__ mpicomm::RowMemory memory[mpicomm::kGroups];
#else
  mpicomm::RowMemory* const memory = nullptr;
#endif
#if defined(MPICOMM_DEVICE_COUNTS)
  __shared__ mpicomm::Messages messages;
#else
  const mpicomm::Packets& messages = packets;
#endif
  mpicomm::run(packets, messages, memory);
}
