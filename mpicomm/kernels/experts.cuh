// Mixture of experts: the memory of an Experts object, its launches and its waits. The kernels are
// in experts_dispatch.cu and experts_combine.cu. Each launch has two kinds of blocks: senders, which
// store into the memory of peers, and receivers, which take data from the memory of this rank.
//
// Memory. The arena of a rank has these parts after its head. A source is a rank with tokens. The
// part of a source or of a peer in an arena has the number `index_in`.
//
//     routes       of each source: two packets with the number of its tokens, for odd and even launches, then
//                  a packet with the expert and the weight of each slot of each token
//     row flags    of each peer: a word for each part of each token
//     rows         of each peer: its tokens; only the tokens of this rank's experts
//     sum flags    of each peer: a word for each part of each token of this rank
//     sums         of each peer: its sums for the tokens of this rank
//     values       a number for each slot of each token of this rank, from the rank of its expert
//     counted      of each receiver block: a flag for its histogram; then the count of renewals
//     histograms   of each receiver block: its pairs of each expert, and its rows on each rank
//
// The last two are private to the rank.
//
// A token has the same seat in `routes`, in `rows` and in `sums`, which depends only on its number and on
// the number of tokens of its source. So a rank pushes rows before it knows the tokens of the others. There
// are three groups of seats. A rank with few tokens takes the first group in even launches, and the
// second in odd ones. A rank with more takes the third group.
//
// Parts. A row travels in parts, of up to kPartPackets packets for each lane of a warp. A warp stores
// some parts into the memory of peers, and then a flag for each part and peer. A release waits until
// all earlier stores of the warp have arrived, so a warp with many parts stores several of them
// before it. Warps release at different times, so the links stay busy.
//
// Launches. The launches of an Experts object, dispatches and combines, have numbers, alike on all
// ranks (team.cuh). The flags of a launch are its number.
//
// Why a seat is free. A dispatch stores into routes and rows, which only dispatches read. A combine
// stores into sums and values, which only combines read. Launch n of one kind may store into seats of a peer
// after the last launch of that kind with these seats has ended there. For few tokens, and if launch
// n - 1 was of the other kind, that is launch n - 2 or an earlier one, which the peer has ended when it
// announces n - 1. Otherwise the peer has ended launch n - 1 when it announces n. So a rank waits for
// the announcement of n - 1 in most cases, and only if the peer is late.
//
// Why no ranks wait in a circle. A sender waits only for announcements, which each launch makes
// first. A receiver waits for senders of the same launch, and for receivers of its rank that wait
// for senders. All blocks of a launch run at once (team.cuh).
#pragma once

#include "channel_words.cuh"
#include "flag_protocol.cuh"

namespace mpicomm {

// The host's copies of these constants and of Experts are in experts.py; a test compares them.
constexpr u32 kMostExperts = 512;
constexpr u32 kMostTopK = kLanes;
constexpr u32 kPartPackets = 4;
constexpr u64 kWarpNbytes = kLanes * kPacketNbytes;

// The sets of ranks and of slots of a token: the ranks of its experts, and the slots with an expert.
struct Targets {
  u32 ranks;
  u32 slots;
};

struct Experts {
  Team team;
  // Offsets in every arena.
  u64 routes;
  u64 row_flags;
  u64 rows;
  u64 sum_flags;
  u64 sums;
  u64 values;
  u64 counted;
  u64 histograms;
  u64 row_nbytes;   // of a dispatch or of a combine, whole packets, as `part_nbytes`
  u64 part_nbytes;  // at most kPartPackets * kWarpNbytes
  u32 parts;        // of a row; the last part may be shorter
  u32 max_tokens;
  u32 few_tokens;
  u32 seats;
  u32 top_k;
  u32 senders;  // the first blocks of a launch; the others are receivers
  u32 unused;
  u32 firsts[kMaxRanks + 1];  // the first expert of each rank, then the number of experts
};

enum Kind : u32 { kDispatches = 0, kCombines = 1 };

// A launch, and whether the launch before was of the same kind.
struct Turn {
  u64 number;
  bool again;

  MPICOMM_DEVICE u32 parity() const { return number & 1; }
};

// Returns this launch. The count of a block is {number of the last launch, its kind:1}.
MPICOMM_DEVICE Turn turn_of(const Team& team, Kind kind) {
  const u64 last = launches_of(team)[blockIdx.x];
  const u64 number = (last >> 1) + 1;
  return {number, (last & 1) == kind};
}

// The seat of a token of a rank with `tokens` tokens.
MPICOMM_DEVICE u32 seat_of(const Experts& x, const Turn& turn, u32 tokens, u32 token) {
  return token + x.few_tokens * (tokens <= x.few_tokens ? turn.parity() : 2);
}

// The launch that a peer must have begun before this rank stores into the seats of a rank with `tokens`
// tokens there.
MPICOMM_DEVICE u64 awaited(const Experts& x, const Turn& turn, u32 tokens) {
  return turn.again && tokens > x.few_tokens ? turn.number : turn.number - 1;
}

// The number of the part of `peer` in the arena of `owner`. The owner itself comes last, because
// only `routes` has a part for it.
MPICOMM_DEVICE u32 index_in(const Team& team, u32 owner, u32 peer) {
  return (peer + 2 * team.size - owner - 1) % team.size;
}

constexpr u32 kHeads = 2;  // the packets with numbers of tokens
MPICOMM_DEVICE Pair* routes_of(const Experts& x, u32 owner, u32 source) {
  const u64 each = static_cast<u64>(x.seats) * x.top_k + kHeads;
  return reinterpret_cast<Pair*>(x.team.arenas[owner] + x.routes) + index_in(x.team, owner, source) * each;
}
MPICOMM_DEVICE u64 seat_in(const Experts& x, u32 owner, u32 peer, u32 seat) {
  return static_cast<u64>(index_in(x.team, owner, peer)) * x.seats + seat;
}
MPICOMM_DEVICE u64* flag_in(const Experts& x, u64 flags, u32 owner, u32 peer, u32 seat, u32 part) {
  return reinterpret_cast<u64*>(x.team.arenas[owner] + flags) + seat_in(x, owner, peer, seat) * x.parts + part;
}
MPICOMM_DEVICE float* values_in(const Experts& x, u32 owner, u32 seat) {
  return reinterpret_cast<float*>(x.team.arenas[owner] + x.values) + static_cast<u64>(seat) * x.top_k;
}
MPICOMM_DEVICE u8* row_in(const Experts& x, u64 rows, u32 owner, u32 peer, u32 seat) {
  return x.team.arenas[owner] + rows + seat_in(x, owner, peer, seat) * x.row_nbytes;
}

// The number of packets that earlier dispatches have renewed.
MPICOMM_DEVICE u64* renewals_of(const Experts& x) {
  return reinterpret_cast<u64*>(x.team.arenas[x.team.rank] + x.counted) + kMaxBlocks;
}

MPICOMM_DEVICE u32 num_experts(const Experts& x) { return x.firsts[x.team.size]; }

// The rank of an expert. Ranks without experts have the same first expert as the next rank.
MPICOMM_DEVICE u32 rank_of(const Experts& x, u32 expert) {
  u32 rank = 0;
  for (u32 next = 1; next < x.team.size; ++next) rank += expert >= x.firsts[next];
  return rank;
}

// The packets of a lane in a part of a row.
struct Part {
  u64 begin;
  u64 end;

  MPICOMM_DEVICE Part(const Experts& x, u32 part, u32 lane) {
    const u64 next = (part + 1) * x.part_nbytes;
    begin = part * x.part_nbytes + lane * kPacketNbytes;
    end = next < x.row_nbytes ? next : x.row_nbytes;
  }
  MPICOMM_DEVICE u64 at(u32 i) const { return begin + i * kWarpNbytes; }
  MPICOMM_DEVICE bool has(u32 i) const { return at(i) < end; }
};

struct Packets {
  Packet of[kPartPackets];

  // `place` is the address of a byte of the row.
  template <class Place>
  MPICOMM_DEVICE void load(Place place, const Part& part) {
#pragma unroll
    for (u32 i = 0; i < kPartPackets; ++i) {
      if (part.has(i)) of[i] = load_aligned(place(part.at(i)));
    }
  }
  template <class Place>
  MPICOMM_DEVICE void store(Place place, const Part& part) const {
#pragma unroll
    for (u32 i = 0; i < kPartPackets; ++i) {
      if (part.has(i)) store_aligned(place(part.at(i)), of[i]);
    }
  }
};

// The rank that is to blame if `peer` does not send; `peer` may be this rank. A rank that has announced
// the launch may wait for a rank that has not, so that rank is to blame.
MPICOMM_DEVICE_CALL u32 blamed(const Team& team, u32 peer, u32 launch) {
  if (peer != team.rank && look_at(team, peer, launch) == kAbsent) return peer;
  for (u32 rank = 0; rank < team.size; ++rank) {
    if (rank != team.rank && look_at(team, rank, launch) == kAbsent) return rank;
  }
  return peer;
}

// A thread that waits for a peer asks its watch now and then. `leaves` returns true if the peer makes another
// call, or if a rank has given up. Then the kernel must leave.
struct PeerWatch {
  const Team& team;
  u32 peer;
  Watch watch;

  MPICOMM_DEVICE PeerWatch(const Experts& x, u32 operation, u64 number, u32 peer)
      : team(x.team),
        peer(peer),
        watch{x.team.faults, x.team.timeout_ns, operation, number, blockIdx.x, x.team.names[peer]} {}

  MPICOMM_DEVICE_CALL bool leaves() {
    const u32 launch = static_cast<u32>(watch.sequence);
    if (is_told(team) || load_relaxed(team.faults.failed) != kClear) return true;
    watch.peer = team.names[blamed(team, peer, launch)];
    return peer != team.rank && look_at(team, peer, launch) == kDifferent && !refuse(team, peer, launch);
  }
};

// Waits for `peer`. If the result is false, the kernel must leave: time is up, the peer makes
// another call, or a rank has given up.
template <class Reached>
MPICOMM_DEVICE bool await_peer(const Experts& x, u32 operation, u64 number, u32 peer, Reached reached) {
  PeerWatch mine(x, operation, number, peer);
  return lasts(x.team, mine.watch, spin(reached, [&] { return mine.leaves(); }, mine.watch));
}

// Waits for other blocks of this rank. The wait has no limit. The other blocks wait for peers with a
// limit, and then every rank is told. With a limit this block could name the wrong rank.
template <class Reached>
MPICOMM_DEVICE bool await_block(const Experts& x, u64 number, Reached reached) {
  const Team& team = x.team;
  const Watch watch{team.faults, ~0ull, kDispatch, number, blockIdx.x, team.names[team.rank]};
  const auto leaves = [&] { return is_told(team) || load_relaxed(team.faults.failed) != kClear; };
  return lasts(team, watch, spin(reached, leaves, watch));
}

// All threads call it first. The previous kernel may still write memory that this kernel reads, or read memory
// that peers write after the announcement of this launch. All blocks of this kernel run when blocks of the next
// kernel begin, so these keep out no block for which a peer waits.
MPICOMM_DEVICE void begin_after_predecessor() {
  wait_for_predecessor();
  let_successor_start();
}

// Begins a launch on all threads of a block: announces the launch, and counts it. If the result is
// false, all threads must leave.
MPICOMM_DEVICE bool begin_launch(const Experts& x, Kind kind, const Turn& turn) {
  const Team& team = x.team;
  const u32 thread = threadIdx.x;
  const bool healthy = thread != 0 || is_healthy(team, blockIdx.x, load_health(team));
  // Orders the loads of the count by all threads before `count_launch`.
  if (!__syncthreads_and(healthy)) return false;
  // A release, because the peer may next overwrite memory that earlier launches of this rank read.
  // Pairs with the acquire in `peers_are_ready`.
  // A receiver announces, because a release takes long, and a sender has routes to send.
  if (blockIdx.x == gridDim.x - 1 && thread < team.size && thread != team.rank) {
    announce_all_before(team, thread, static_cast<u32>(turn.number));
  }
  count_launch(team, turn.number << 1 | kind, thread, blockDim.x);
  return true;
}

// Waits until `peer` has begun launch `begun`, which lets this rank store into the seats of its memory. If the
// result is false, the kernel must leave.
MPICOMM_DEVICE bool await_begun(const Experts& x, u32 operation, const Turn& turn, u32 peer, u64 begun) {
  const auto reached = [&] {
    // Pairs with the release in `begin_launch` of the peer. Without the acquire the stores of this
    // launch could overtake it, and overwrite data that the peer still reads.
    const u32 last = acquire_announcements(x.team, peer).last_launch();
    return static_cast<i32>(last - static_cast<u32>(begun)) >= 0;
  };
  return await_peer(x, operation, turn.number, peer, reached);
}

// Waits on all threads of a sender block until all peers let this launch store into their memory: into
// seats of a rank with `tokens_at(peer)` tokens. If the result is false, all threads must leave.
template <class TokensAt>
MPICOMM_DEVICE bool peers_are_ready(const Experts& x, u32 operation, const Turn& turn, TokensAt tokens_at) {
  const u32 peer = threadIdx.x;
  bool ok = true;
  if (peer < x.team.size && peer != x.team.rank) {
    ok = await_begun(x, operation, turn, peer, awaited(x, turn, tokens_at(peer)));
  }
  // Orders the stores of all threads of the block after the acquires.
  return __syncthreads_and(ok);
}

// The parts that a warp has stored and has yet to publish. Each lane keeps one flag.
struct Unpublished {
  u64* flag = nullptr;

  // The number of parts until the next publication, for a warp with so many parts left. Runs become shorter
  // towards the end. Otherwise much data would wait for the last flags, and receivers would take it only then.
  MPICOMM_DEVICE static u32 run_of(const Team& team, u64 left) {
    const u32 lanes = kLanes / team.size, bound = lanes < kMost ? lanes : kMost;
    const u64 run = (left + kOfTheRest - 1) / kOfTheRest;
    return run < bound ? static_cast<u32>(run) : bound;
  }
  // Notes part number `i` since the last publication, for the ranks in the set `targets`.
  MPICOMM_DEVICE void note(const Experts& x, u64 flags, u32 i, u32 targets, u32 seat, u32 part, u32 lane) {
    const u32 rank = lane % x.team.size;
    if (lane / x.team.size == i && (targets >> rank & 1) != 0) {
      flag = flag_in(x, flags, rank, x.team.rank, seat, part);
    }
  }
  // All lanes of the warp call it.
  MPICOMM_DEVICE void publish(const Turn& turn) {
    // Orders the stores of all lanes before the releases.
    __syncwarp();
    // Pairs with the acquire in `await_part` of the peer, and publishes the part. A plain store could
    // arrive before the data, and the peer would take the row of an earlier launch.
    if (flag != nullptr) store_release(flag, turn.number);
    flag = nullptr;
  }

 private:
  static constexpr u32 kMost = 8;
  static constexpr u32 kOfTheRest = 4;
};

// The parts of one kind of data that the warps of the sender blocks share out. Each warp takes runs of
// neighbouring parts, and publishes each run. All parts of a warp follow each other if `apart`: then
// the warps begin in distant places. Otherwise all warps together go through the parts in order.
//
// `prepare` loads a part, `ready` waits for the peers on all threads of the block, and `store` stores the
// part. The loads of the first part are in flight while the warp waits for the peers. If `prepare` only
// loads, the loads of other parts are in flight while the warp publishes. Otherwise flags come first.
template <bool apart, class Prepare, class Ready, class Store>
MPICOMM_DEVICE void each_run(
    const Experts& x, const Turn& turn, u64 parts, bool only_loads, Prepare prepare, Ready ready, Store store) {
  const u32 of_block = blockDim.x / kLanes, warps = x.senders * of_block;
  const u32 warp = blockIdx.x * of_block + threadIdx.x / kLanes;
  const u64 each = (parts + warps - 1) / warps;
  // `together` warps share out the parts from `base` to `end`, and each takes a run of them in turn.
  const u32 together = apart ? 1 : warps, of_them = apart ? 0 : warp;
  const u64 end = apart && (warp + 1) * each < parts ? (warp + 1) * each : parts;
  u64 base = apart ? warp * each : 0, first = 0, after = 0;
  const auto begin_run = [&] {
    const u64 left = base < end ? (end - base + together - 1) / together : 0;
    const u32 run = Unpublished::run_of(x.team, left);
    first = base + static_cast<u64>(of_them) * run;
    after = first + run < end ? first + run : end;
    base += static_cast<u64>(together) * run;
    return first < after;
  };
  bool goes_on = begin_run();
  u32 i = 0;
  decltype(prepare(first)) prepared;
  if (goes_on) prepared = prepare(first);
  if (!ready()) return;
  Unpublished unpublished;
#pragma unroll 1
  while (goes_on) {
    store(prepared, i, unpublished);
    const bool ends = first + ++i == after;
    if (ends) {
      goes_on = begin_run();
      i = 0;
    }
    if (ends && !only_loads) unpublished.publish(turn);
    if (goes_on) prepared = prepare(first + i);
    if (ends && only_loads) unpublished.publish(turn);
  }
}

// Whether `peer` has published a part. __syncwarp follows.
MPICOMM_DEVICE bool has_part(const Experts& x, u64 flags, const Turn& turn, u32 peer, u32 seat, u32 part) {
  // Pairs with the release in `Unpublished::publish`. A plain load could see the flag while later loads see
  // the row of an earlier launch. The flag is equal: the peer stores a later number into this seat only
  // after this launch has ended here.
  return load_acquire(flag_in(x, flags, x.team.rank, peer, seat, part)) == turn.number;
}

// Waits until `has_come` returns true on a lane that is pending, and returns the set of these lanes. At least
// one lane is pending, and waits for `peer`. All lanes of the warp call it. If the set is empty, the
// kernel must leave.
template <class HasCome>
MPICOMM_DEVICE u32 await_any(const Experts& x, u32 operation, u64 number, u32 peer, bool pending, HasCome has_come) {
  const u32 lane = threadIdx.x % kLanes;
  const u32 waits = __ffs(__ballot_sync(kWarp, pending)) - 1;
  PeerWatch mine(x, operation, number, peer);
  Spell spell;
  for (u32 poll = 0;; ++poll) {
    const u32 come = __ballot_sync(kWarp, pending && has_come());
    if (come != 0) return come;
    if (poll < kPollsBeforeClock) continue;
    // One lane looks at the clock, because the lanes go on or leave together.
    const bool goes_on =
        lane != waits || lasts(x.team, mine.watch, spell.end([&] { return mine.leaves(); }, mine.watch));
    if (!__all_sync(kWarp, goes_on)) return 0;
  }
}

}  // namespace mpicomm
