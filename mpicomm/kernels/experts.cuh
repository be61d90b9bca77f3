// Mixture of experts: the memory of an Experts object, its launches and its waits. The kernels are
// in experts_dispatch.cu, experts_dispatch_few.cu and experts_combine.cu. Each launch has two kinds of
// blocks: senders, which store into the memory of peers, and receivers, which take data from the
// memory of this rank.
//
// Memory. The arena of a rank has these parts after its header. A source is a rank with tokens. The
// part of a source or of a peer in an arena has the number `index_in`.
//
//     routes       of each source: headers with the number of its tokens, for even and odd launches in turns, then
//                  a packet with the expert and the weight of each slot of each token
//     row flags    of each peer: a word for each part of each token
//     rows         of each peer: its tokens; only the tokens of this rank's experts
//     sum flags    of each peer: a word for each part of each token of this rank
//     sums         of each peer: its sums for the tokens of this rank
//     values       a number for each slot of each token of this rank, from the rank of its expert
//     histogram flags  of each receiver block: a flag for its histogram; then the count of renewals, and the
//                  tickets of even and of odd launches
//     histograms   of each receiver block: its pairs of each expert, and its rows on each rank
//
// The last two are private to the rank.
//
// A token has the same receive slot in `routes`, in `rows` and in `sums`, which depends only on its number and on
// the number of tokens of its source. So a rank pushes rows before it knows the tokens of the others. There
// are three groups of receive slots. A rank with few tokens takes the first group in even launches, and the
// second in odd ones. A rank with more takes the third group.
//
// Parts. A row travels in parts, of up to kPartPackets packets for each lane of a warp. A warp stores
// some parts into the memory of peers, and then a flag for each part and peer. A release waits until
// all earlier stores of the warp have arrived, so a warp with many parts stores several of them
// before it. Warps release at different times, so the links stay busy. If each warp of a dispatch has at
// most one part, the warps of a block release their parts together. Between ranks that never have many
// tokens, in the layout by token, rows and sums travel without flags: see experts_packets.cuh. All ranks
// agree on this when they make the Experts object.
//
// Launches. The launches of an Experts object, dispatches and combines, have numbers, the same on all
// ranks (team.cuh). The flags of a launch are its number.
//
// Why a receive slot is free. A dispatch stores into routes and rows, which only dispatches read. A combine
// stores into sums and values, which only combines read. Launch n of one kind may store into receive slots of a peer
// after the last launch of that kind with these receive slots has ended there. For few tokens, and if launch
// n - 1 was of the other kind, that is launch n - 2 or an earlier one, which the peer has ended when it
// announces n - 1. Otherwise the peer has ended launch n - 1 when it announces n. So a rank waits for
// the announcement of n - 1 in most cases, and only if the peer is late.
//
// Why no ranks wait in a circle. A sender waits only for announcements, which each launch makes
// first. A receiver waits for senders of the same launch, and for receivers of its rank that wait
// for senders. All blocks of a launch run at once (team.cuh).
#pragma once

#include "channel_words.cuh"
#include "ll_protocol.cuh"

namespace mpicomm {

// The host's copies of these constants and of Experts are in experts.py; a test compares them.
constexpr u32 kMaxExperts = 512;
constexpr u32 kMaxTopK = kLanes;
constexpr u32 kFewTokens = 256;
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
  u64 histogram_flags;
  u64 histograms;
  u64 row_nbytes;   // of a dispatch or of a combine, whole packets, as `part_nbytes`
  u64 part_nbytes;  // at most kPartPackets * kWarpNbytes
  u32 parts;        // of a row; the last part may be shorter
  u32 max_tokens;
  u32 few_tokens;
  u32 recv_slots;
  u32 top_k;
  u32 senders;  // the first blocks of a launch; the others are receivers
  u32 unused;
  u32 first_experts[kMaxRanks + 1];  // the first expert of each rank, then the number of experts
};

enum Kind : u32 { kDispatches = 0, kCombines = 1 };

// The number of a launch, and whether the launch before was of the same kind.
struct Launch {
  u64 number;
  bool same_kind;

  MPICOMM_DEVICE u32 parity() const { return number & 1; }
};

// Returns this launch. The count of a block is {number of the last launch, its kind:1}.
MPICOMM_DEVICE Launch this_launch(const Team& team, Kind kind) {
  const u64 last = launches_of(team)[blockIdx.x];
  const u64 number = (last >> 1) + 1;
  return {number, (last & 1) == kind};
}

// Most numbers have 32 bits. A division of 64 bits takes long, and much code, so it is out of line.
MPICOMM_DEVICE_CALL u64 long_quotient(u64 number, u32 divisor) { return number / divisor; }
MPICOMM_DEVICE u64 quotient(u64 number, u32 divisor) {
  return number >> 32 == 0 ? static_cast<u32>(number) / divisor : long_quotient(number, divisor);
}

// The receive slot of a token of a rank with `tokens` tokens.
MPICOMM_DEVICE u32 recv_slot_of(const Experts& x, const Launch& launch, u32 tokens, u32 token) {
  return token + x.few_tokens * (tokens <= x.few_tokens ? launch.parity() : 2);
}

// The launch that a peer must have begun before this rank stores into the receive slots of a rank with `tokens`
// tokens there.
MPICOMM_DEVICE u64 awaited(const Experts& x, const Launch& launch, u32 tokens) {
  return launch.same_kind && tokens > x.few_tokens ? launch.number : launch.number - 1;
}

// The number of the part of `peer` in the arena of `owner`. The owner itself comes last, because
// only `routes` has a part for it.
MPICOMM_DEVICE u32 index_in(const Team& team, u32 owner, u32 peer) {
  return peer > owner ? peer - owner - 1 : peer + team.size - owner - 1;
}

// The headers of a source. A launch of experts_dispatch.cu has one. In experts_dispatch_few.cu each header stands for
// kHeaderTokens tokens: see experts_headers.cuh.
constexpr u32 kHeaderTokens = 32;
constexpr u32 kMaxHeaders = kFewTokens / kHeaderTokens;
constexpr u32 kHeaders = 2 * kMaxHeaders;
MPICOMM_DEVICE Pair* routes_of(const Experts& x, u32 owner, u32 source) {
  const u64 each = static_cast<u64>(x.recv_slots) * x.top_k + kHeaders;
  return reinterpret_cast<Pair*>(x.team.arenas[owner] + x.routes) + index_in(x.team, owner, source) * each;
}
MPICOMM_DEVICE u64 recv_slot_in(const Experts& x, u32 owner, u32 peer, u32 recv_slot) {
  return static_cast<u64>(index_in(x.team, owner, peer)) * x.recv_slots + recv_slot;
}
MPICOMM_DEVICE u64* flag_in(const Experts& x, u64 flags, u32 owner, u32 peer, u32 recv_slot, u32 part) {
  u64* const all = reinterpret_cast<u64*>(x.team.arenas[owner] + flags);
  return all + recv_slot_in(x, owner, peer, recv_slot) * x.parts + part;
}
MPICOMM_DEVICE float* values_in(const Experts& x, u32 owner, u32 recv_slot) {
  return reinterpret_cast<float*>(x.team.arenas[owner] + x.values) + static_cast<u64>(recv_slot) * x.top_k;
}
MPICOMM_DEVICE u8* row_in(const Experts& x, u64 rows, u32 owner, u32 peer, u32 recv_slot) {
  return x.team.arenas[owner] + rows + recv_slot_in(x, owner, peer, recv_slot) * x.row_nbytes;
}

// The number of packets that earlier dispatches have renewed.
MPICOMM_DEVICE u64* renewals_of(const Experts& x) {
  return reinterpret_cast<u64*>(x.team.arenas[x.team.rank] + x.histogram_flags) + kMaxBlocks;
}

// The tickets of a launch: the numbers of runs that sender warps have taken after their first runs, and of parts
// that receiver warps have taken so. Odd and even launches have their own.
enum Ticket : u32 { kOfSenders = 0, kOfReceivers = 1 };
MPICOMM_DEVICE u32* tickets(const Experts& x, u32 parity, Ticket of) {
  return reinterpret_cast<u32*>(renewals_of(x) + 1) + 2 * parity + of;
}

MPICOMM_DEVICE u32 num_experts(const Experts& x) { return x.first_experts[x.team.size]; }

// The rank of an expert. Ranks without experts have the same first expert as the next rank.
MPICOMM_DEVICE u32 rank_of(const Experts& x, u32 expert) {
  u32 rank = 0;
#pragma unroll 1
  for (u32 next = 1; next < x.team.size; ++next) rank += expert >= x.first_experts[next];
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
MPICOMM_DEVICE_CALL u32 rank_to_blame(const Team& team, u32 peer, u32 launch) {
  if (peer != team.rank && check_announcement(team, peer, launch) == kAbsent) return peer;
  for (u32 rank = 0; rank < team.size; ++rank) {
    if (rank != team.rank && check_announcement(team, rank, launch) == kAbsent) return rank;
  }
  return peer;
}

// A thread that waits for a peer checks its watch now and then. `leaves` returns true if the peer makes another
// call, or if a rank has given up. Then the kernel must leave.
struct PeerWatch {
  const Team& team;
  u32 peer;
  Watch watch;

  MPICOMM_DEVICE PeerWatch(const Experts& x, u32 operation, u64 number, u32 peer)
      : team(x.team),
        peer(peer),
        watch{x.team.faults, x.team.timeout_ns, operation, number, blockIdx.x, x.team.user_ranks[peer]} {}

  MPICOMM_DEVICE_CALL bool leaves() {
    const u32 launch = static_cast<u32>(watch.sequence);
    if (is_aborted(team) || load_relaxed(team.faults.failed) != kClear) return true;
    watch.peer = team.user_ranks[rank_to_blame(team, peer, launch)];
    if (peer == team.rank || check_announcement(team, peer, launch) != kDifferent) return false;
    return !report_mismatch(team, peer, launch);
  }
};

// Waits for `peer`. If the result is false, the kernel must leave: time is up, the peer makes
// another call, or a rank has given up.
template <class Reached>
MPICOMM_DEVICE bool await_peer(const Experts& x, u32 operation, u64 number, u32 peer, Reached reached) {
  PeerWatch mine(x, operation, number, peer);
  return end_wait(x.team, mine.watch, spin(reached, [&] { return mine.leaves(); }, mine.watch));
}

// Waits for other blocks of this rank. The wait has no limit. The other blocks wait for peers with a
// limit, and then every rank is aborted. With a limit this block could name the wrong rank.
template <class Reached>
MPICOMM_DEVICE bool await_block(const Experts& x, u64 number, Reached reached) {
  const Team& team = x.team;
  const Watch watch{team.faults, ~0ull, kDispatch, number, blockIdx.x, team.user_ranks[team.rank]};
  const auto leaves = [&] { return is_aborted(team) || load_relaxed(team.faults.failed) != kClear; };
  return end_wait(team, watch, spin(reached, leaves, watch));
}

// Begins a launch on all threads of a block: announces the launch, and counts it. Meanwhile a thread for each
// peer calls `wait` with the peer. If the result is false, all threads must leave.
template <class Wait>
MPICOMM_DEVICE bool begin_launch(const Experts& x, Kind kind, const Launch& launch, Wait wait) {
  const Team& team = x.team;
  const u32 thread = threadIdx.x;
  bool ok = true;
  // Threads of different warps, because each waits for a load.
  if (thread == blockDim.x - 1) {
    ok = is_healthy(team, blockIdx.x, load_health(team));
  } else if (thread < team.size && thread != team.rank) {
    ok = wait(thread);
  }
  // Orders the loads of the count by all threads before `count_launch`, and the stores of all threads after the
  // acquires of the waits.
  if (!__syncthreads_and(ok)) return false;
  // A release, because the peer may next overwrite memory that earlier launches of this rank read.
  // Pairs with the acquire in `await_begun`.
  // A receiver announces, because a release takes long, and a sender has routes to send.
  if (blockIdx.x == gridDim.x - 1 && thread < team.size && thread != team.rank) {
    announce_all_before(team, thread, static_cast<u32>(launch.number));
  }
  count_launch(team, launch.number << 1 | kind, thread, blockDim.x);
  // The launch before this one, which counted there, is over on this rank.
  if (blockIdx.x == 0 && thread < 2) *tickets(x, 1 - launch.parity(), static_cast<Ticket>(thread)) = 0;
  return true;
}

// Waits until `peer` has begun launch `begun`, which lets this rank store into the receive slots of its memory. If the
// result is false, the kernel must leave.
MPICOMM_DEVICE bool await_begun(const Experts& x, u32 operation, const Launch& launch, u32 peer, u64 begun) {
  const auto reached = [&] {
    // Pairs with the release in `begin_launch` of the peer. Without the acquire the stores of this
    // launch could overtake it, and overwrite data that the peer still reads.
    const u32 last = acquire_announcements(x.team, peer).last_launch();
    return static_cast<i32>(last - static_cast<u32>(begun)) >= 0;
  };
  return await_peer(x, operation, launch.number, peer, reached);
}

MPICOMM_DEVICE bool begin_launch(const Experts& x, Kind kind, const Launch& launch) {
  return begin_launch(x, kind, launch, [](u32) { return true; });
}

// Waits on all threads of a sender block until all peers let this launch store into their memory: into
// receive slots of a rank with `tokens_at(peer)` tokens. If the result is false, all threads must leave.
template <class TokensAt>
MPICOMM_DEVICE bool peers_are_ready(const Experts& x, u32 operation, const Launch& launch, TokensAt tokens_at) {
  const u32 peer = threadIdx.x;
  bool ok = true;
  if (peer < x.team.size && peer != x.team.rank) {
    ok = await_begun(x, operation, launch, peer, awaited(x, launch, tokens_at(peer)));
  }
  // Orders the stores of all threads of the block after the acquires.
  return __syncthreads_and(ok);
}

// Whether `peer` has published a part. __syncwarp follows.
MPICOMM_DEVICE bool has_part(const Experts& x, u64 flags, const Launch& launch, u32 peer, u32 recv_slot, u32 part) {
  // Pairs with the releases in `Unpublished`. A plain load could see the flag while later loads see
  // the row of an earlier launch. The flag is equal: the peer stores a later number into this receive slot only
  // after this launch has ended here.
  return load_acquire(flag_in(x, flags, x.team.rank, peer, recv_slot, part)) == launch.number;
}

// Waits until `has_arrived` returns true on a lane that is pending, and returns the set of these lanes. At least
// one lane is pending, and waits for `peer`. All lanes of the warp call it. If the set is empty, the
// kernel must leave.
template <class HasCome>
MPICOMM_DEVICE u32 await_any(const Experts& x, u32 operation, u64 number, u32 peer, bool pending, HasCome has_arrived) {
  const u32 lane = threadIdx.x % kLanes;
  const u32 waits = __ffs(__ballot_sync(kWarp, pending)) - 1;
  PeerWatch mine(x, operation, number, peer);
  SpinTimer timer;
  for (u32 poll = 0;; ++poll) {
    const u32 come = __ballot_sync(kWarp, pending && has_arrived());
    if (come != 0) return come;
    if (poll < kPollsBeforeClock) continue;
    // One lane reads the clock, because the lanes go on or leave together.
    const bool goes_on =
        lane != waits || end_wait(x.team, mine.watch, timer.check([&] { return mine.leaves(); }, mine.watch));
    if (!__all_sync(kWarp, goes_on)) return 0;
  }
}

}  // namespace mpicomm
