// The dispatch of a mixture of experts: every token goes once to each rank that has one of its
// experts, and is laid out there by expert. experts.cuh has the memory, and the reason why no rank
// waits in a circle.
//
// Senders store the routes of their tokens into the memory of all ranks, as packets of the LL
// protocol. So every rank knows the experts of all tokens. Then they push rows.
//
// Receivers lay out. The *pairs* of a token are its top_k slots. All pairs have an order: by the number
// of the token, then by source, then by slot. The places of an expert are its pairs in this order. So
// each range of pairs has pairs of all sources, and all blocks wait for peers alike. Each warp takes a
// range of tokens, counts its pairs of each expert, and waits for the counts of the other receiver
// blocks. Then it knows the place of each of its pairs. So the layout depends only on the routes.
// Last, it copies each row that has come.
//
// In the layout by expert each place has a row, and a token has a row for each of its pairs here. In
// the layout by token a token has one row, in the order of all tokens. Each place has the number of
// that row. The counts of a block have its rows on each rank, too, so a warp knows its first row.
//
// Faults in routes. Every rank sees all routes. So all ranks find an id that is no expert, and a
// rank whose memory has not enough rows. No block writes a row before all blocks have counted.

#include "experts_receiver.cuh"

namespace mpicomm {

// The expert of a slot, kNoExpert or kWrongExpert.
MPICOMM_DEVICE u32 expert_of(const Dispatch& x, u64 pair) {
  const i64 id = x.wide_ids ? static_cast<const i64*>(x.ids)[pair] : static_cast<const i32*>(x.ids)[pair];
  if (id == -1) return kNoExpert;
  return id >= 0 && id < static_cast<i64>(num_experts(x.experts)) ? static_cast<u32>(id) : kWrongExpert;
}

MPICOMM_DEVICE void send_packet(const Experts& x, u32 epoch, u64 slot, u32 first, u32 second) {
  const Pair packet = FlagProtocol::packet({{first, second, 0, 0}}, epoch);
  // The next rank comes first: see team.cuh. This rank is the last one.
  for (u32 i = 1; i <= x.team.size; ++i) {
    store_volatile(routes_of(x, (x.team.rank + i) % x.team.size, x.team.rank) + slot, packet);
  }
}

// Senders of routes share out the pairs. Each block sends as many, and each thread loads its first route
// before the wait for the peers.
struct Routes {
  const Dispatch& x;
  u64 pairs;
  u64 first;
  u64 end;
  u32 expert = kNoExpert;
  u32 weight = 0;

  MPICOMM_DEVICE explicit Routes(const Dispatch& x) : x(x) {
    pairs = static_cast<u64>(x.num_tokens) * x.experts.top_k;
    const u64 each = (pairs + x.experts.senders - 1) / x.experts.senders, last = (blockIdx.x + 1) * each;
    first = blockIdx.x * each + threadIdx.x;
    end = last < pairs ? last : pairs;
    load(first);
  }
  MPICOMM_DEVICE void load(u64 pair) {
    if (pair >= end) return;
    expert = expert_of(x, pair);
    weight = bits_of(x.weights == nullptr ? 1.0f : x.weights[pair]);
  }
  MPICOMM_DEVICE void send(const Turn& turn) {
    const Experts& experts = x.experts;
    const u32 epoch = static_cast<u32>(turn.number);
    const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
    if (is_first) send_packet(experts, epoch, 0, x.num_tokens, 0);
    for (u64 pair = first; pair < end; pair += blockDim.x) {
      send_packet(experts, epoch, 1 + pair, expert, weight);
      load(pair + blockDim.x);
    }
    // Epochs have 32 bits, so an epoch comes again after 2^32 launches. Each dispatch renews one packet
    // that it does not use, in turn. So no packet still holds the epoch of so long ago.
    if (is_first) {
      u64* const renewals = renewals_of(experts);
      const u64 renewed = (*renewals)++ % (static_cast<u64>(experts.max_tokens) * experts.top_k);
      if (renewed >= pairs) send_packet(experts, epoch, 1 + renewed, kNoExpert, 0);
    }
  }
};

// A part of a token, and the peers that need the token.
struct LoadedPart {
  u32 token;
  u32 part;
  u32 peers;
  Packets packets;
};

MPICOMM_DEVICE LoadedPart load_part(const Dispatch& x, u64 unit, u32 lane) {
  const Experts& experts = x.experts;
  LoadedPart loaded;
  loaded.token = static_cast<u32>(unit / experts.parts);
  loaded.part = static_cast<u32>(unit % experts.parts);
  const u32 token = loaded.token;
  loaded.packets.load([&](u64 at) { return x.x.at(token, at); }, Part(experts, loaded.part, lane));
  const u32 expert = lane < experts.top_k ? expert_of(x, static_cast<u64>(token) * experts.top_k + lane) : kNoExpert;
  const u32 owner = expert >= kWrongExpert ? kMaxRanks : rank_of(experts, expert);
  u32 targets = 0;
  for (u32 rank = 0; rank < experts.team.size; ++rank) {
    targets |= (__ballot_sync(kWarp, owner == rank) != 0 ? 1u : 0u) << rank;
  }
  const u32 slots = __ballot_sync(kWarp, owner < experts.team.size);
  if (loaded.part == 0 && lane == 0) x.targets[token] = {targets, slots};
  loaded.peers = targets & ~(1u << experts.team.rank);
  return loaded;
}

MPICOMM_DEVICE void send(const Dispatch& x, const Turn& turn) {
  const Experts& experts = x.experts;
  const Team& team = experts.team;
  const u32 lane = threadIdx.x % kLanes;
  Routes routes(x);
  const auto prepare = [&](u64 unit) { return load_part(x, unit, lane); };
  const auto ready = [&] {
    if (!peers_are_ready(experts, kDispatch, turn)) return false;
    routes.send(turn);
    // Rows of this block leave after its routes. Otherwise the routes would wait in the links behind rows,
    // and receivers lay out nothing before they know all routes.
    __syncthreads();
    return true;
  };
  const auto store = [&](const LoadedPart& loaded, u32 i, Unpublished& unpublished) {
    const Part range(experts, loaded.part, lane);
    for (u32 distance = 1; distance < team.size; ++distance) {
      const u32 to = (team.rank + distance) % team.size;
      if ((loaded.peers >> to & 1) == 0) continue;
      u8* const row = row_in(experts, experts.rows, to, team.rank, loaded.token);
      loaded.packets.store([&](u64 at) { return row + at; }, range);
    }
    unpublished.note(experts, experts.row_flags, i, loaded.peers, loaded.token, loaded.part, lane);
  };
  // Warps begin in distant places, so all receivers have work from the beginning.
  each_run<true>(experts, turn, static_cast<u64>(x.num_tokens) * experts.parts, prepare, ready, store);
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh. Two blocks fit on a multiprocessor, so every device has room
// for a sender and a receiver.
extern "C" __global__ void __launch_bounds__(mpicomm::kDispatchThreads, 2)
    mpicomm_experts_dispatch(const __grid_constant__ mpicomm::Dispatch);

MPICOMM_KERNEL void mpicomm_experts_dispatch(const __grid_constant__ mpicomm::Dispatch x) {
  __shared__ mpicomm::Layout layout;
  const mpicomm::Turn turn = mpicomm::turn_of(x.experts.team, mpicomm::kDispatches);
  if (!mpicomm::begin_launch(x.experts, mpicomm::kDispatches, turn)) return;
  if (blockIdx.x < x.experts.senders) {
    mpicomm::send(x, turn);
  } else {
    mpicomm::Receiver{{x, turn, layout}}.run();
  }
}
