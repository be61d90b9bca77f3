// The senders of experts_dispatch.cu and experts_dispatch_few.cu share these steps. A sender stores the routes of its
// rank's tokens into the memory of all ranks. It loads the parts of the tokens' rows.
#pragma once

#include "experts_dispatch.cuh"

namespace mpicomm {

MPICOMM_DEVICE void send_packet(const Experts& x, u32 epoch, u64 slot, u32 first, u32 second) {
  const Pair packet = LLProtocol::packet({{first, second, 0, 0}}, epoch);
  // The next rank comes first: see team.cuh. This rank is the last one.
  for (u32 i = 1; i <= x.team.size; ++i) {
    const u32 next = x.team.rank + i, to = next < x.team.size ? next : next - x.team.size;
    store_volatile(routes_of(x, to, x.team.rank) + slot, packet);
  }
}

// Senders of routes share out the pairs. A step of a warp is the pairs of some tokens, one on each lane. The loads of
// the first steps are in flight while the warp waits for the peers.
struct Routes {
  const Dispatch& x;
  u32 lane = threadIdx.x % kLanes;
  u32 tokens;  // of a step
  u32 steps;
  u32 first;   // the steps of a block lie apart, so each block sends as many
  i64 ids[2];
  float weights[2];

  MPICOMM_DEVICE explicit Routes(const Dispatch& x)
      : x(x),
        tokens(kLanes / x.experts.top_k),
        steps((x.num_tokens + tokens - 1) / tokens),
        first(threadIdx.x / kLanes * x.experts.senders + blockIdx.x) {
    load(first);
  }
  MPICOMM_DEVICE u32 warps() const { return x.experts.senders * kWarps; }
  MPICOMM_DEVICE u64 pairs() const { return static_cast<u64>(x.num_tokens) * x.experts.top_k; }
  MPICOMM_DEVICE u64 pair_of(u32 step) const { return static_cast<u64>(step) * tokens * x.experts.top_k + lane; }
  MPICOMM_DEVICE bool has(u32 step) const {
    return step < steps && lane < tokens * x.experts.top_k && pair_of(step) < pairs();
  }
  MPICOMM_DEVICE void load(u32 step) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i, step += warps()) {
      if (!has(step)) continue;
      ids[i] = id_of(x, pair_of(step));
      weights[i] = x.weights == nullptr ? 1 : x.weights[pair_of(step)];
    }
  }
  // Sends the routes of a step. All lanes of the warp call it.
  MPICOMM_DEVICE void send_step(const Launch& launch, u32 step, i64 id, float weight) const {
    const bool exists = has(step);
    const u32 expert = exists ? expert_of(x, id) : kNoExpert, owner = owner_of(x, expert);
    // Lanes of one token with experts of one rank have the same key. The first of them has a new rank. Only the
    // layout by token needs to know.
    const u32 key = owner == kMaxRanks ? ~0u : lane / x.experts.top_k * kMaxRanks + owner;
    const bool is_new = (__match_any_sync(kWarp, key) & ((1u << lane) - 1)) == 0;
    const u32 in_packet = x.token_rows != nullptr && owner != kMaxRanks && is_new ? expert | kNewRank : expert;
    if (!exists) return;
    const u64 slot = start(launch) + pair_of(step);
    send_packet(x.experts, static_cast<u32>(launch.number), slot, in_packet, bits_of(weight));
  }
  // The number of the first packet.
  MPICOMM_DEVICE u64 start(const Launch& launch) const {
    return kHeaders + static_cast<u64>(recv_slot_of(x.experts, launch, x.num_tokens, 0)) * x.experts.top_k;
  }
  MPICOMM_DEVICE void send(const Launch& launch) {
    for (u32 step = first; step < steps; step += 2 * warps()) {
      if (step != first) load(step);
      send_step(launch, step, ids[0], weights[0]);
      if (step + warps() < steps) send_step(launch, step + warps(), ids[1], weights[1]);
    }
  }
  // Epochs have 32 bits, so an epoch comes again after 2^32 launches. Each dispatch renews one packet
  // that it does not use, in turn. So no packet still holds the epoch of so long ago. One thread calls it.
  MPICOMM_DEVICE void renew(const Launch& launch) const {
    const Experts& experts = x.experts;
    // The packet may be of the receive slots of the launch before.
    for (u32 peer = 0; peer < experts.team.size; ++peer) {
      if (peer != experts.team.rank && !await_begun(experts, kDispatch, launch, peer, launch.number)) return;
    }
    u64* const renewals = renewals_of(experts);
    const u64 renewed = (*renewals)++ % (static_cast<u64>(experts.recv_slots) * experts.top_k) + kHeaders;
    if (renewed >= start(launch) && renewed < start(launch) + pairs()) return;
    send_packet(experts, static_cast<u32>(launch.number), renewed, kNoExpert, 0);
  }
};

// A part of a token, and the id of the lane's slot.
struct LoadedPart {
  u32 token;
  u32 part;
  i64 id;
  Packets packets;
};

// Only loads: nothing waits for the content.
MPICOMM_DEVICE LoadedPart load_part(const Dispatch& x, u64 unit, u32 lane) {
  const Experts& experts = x.experts;
  LoadedPart loaded;
  loaded.token = static_cast<u32>(quotient(unit, experts.parts));
  loaded.part = static_cast<u32>(unit - static_cast<u64>(loaded.token) * experts.parts);
  const u32 token = loaded.token;
  loaded.packets.load([&](u64 at) { return x.x.at(token, at); }, Part(experts, loaded.part, lane));
  loaded.id = lane < experts.top_k ? id_of(x, static_cast<u64>(token) * experts.top_k + lane) : -1;
  return loaded;
}

// The ranks with experts of a token. Stores them in the result of the dispatch, too.
MPICOMM_DEVICE u32 targets_of(const Dispatch& x, const LoadedPart& loaded, u32 lane) {
  const Team& team = x.experts.team;
  const u32 owner = owner_of(x, expert_of(x, loaded.id));
  u32 targets = 0;
  for (u32 rank = 0; rank < team.size; ++rank) targets |= (__ballot_sync(kWarp, owner == rank) != 0 ? 1u : 0u) << rank;
  const u32 slots = __ballot_sync(kWarp, owner < team.size);
  if (loaded.part == 0 && lane == 0) x.targets[loaded.token] = {targets, slots};
  return targets;
}

// Calls `store` with the address of a row of this rank in the memory of each of `peers`.
template <class Store>
MPICOMM_DEVICE void each_row(const Experts& x, u32 peers, u32 recv_slot, Store store) {
  for (u32 distance = 1; distance < x.team.size; ++distance) {
    const u32 next = x.team.rank + distance, to = next < x.team.size ? next : next - x.team.size;
    if ((peers >> to & 1) != 0) store(row_in(x, x.rows, to, x.team.rank, recv_slot));
  }
}

}  // namespace mpicomm
