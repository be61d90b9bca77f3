// The receivers of a dispatch: they lay out rows by expert. The top of experts_dispatch.cu explains the
// layout.
#pragma once

#include "experts_dispatch.cuh"

namespace mpicomm {

// Up to so many pairs each receiver block counts the pairs of all blocks. That takes less time than
// to wait for the counts of the other blocks.
constexpr u64 kFewPairs = 8192;

// A pair by its number among all pairs of all sources.
struct Route {
  u32 source;
  u32 token;
  u32 slot;
};

struct Layout {
  u32 histograms[kWarps][kMostExperts];  // the pairs of a warp, later its next place
  u32 before[kMostExperts];  // the pairs of earlier blocks
  u32 totals[kMostExperts];
  u32 offsets[kMostExperts + 1];  // of all experts of all ranks, one after the other
  u32 tokens[kMaxRanks];          // of each source
};

struct Receiver {
  const Dispatch& x;
  const Turn& turn;
  Layout& layout;
  u32 thread = threadIdx.x;
  u32 lane = threadIdx.x % kLanes;
  u32 warp = threadIdx.x / kLanes;
  u32 block = blockIdx.x - x.experts.senders;
  u32 blocks = gridDim.x - x.experts.senders;

  MPICOMM_DEVICE u32 rank() const { return x.experts.team.rank; }
  MPICOMM_DEVICE u32 size() const { return x.experts.team.size; }
  MPICOMM_DEVICE u32* histogram(u32 of) const {
    u8* const start = x.experts.team.arenas[rank()] + x.experts.histograms;
    return reinterpret_cast<u32*>(start) + static_cast<u64>(of) * num_experts(x.experts);
  }
  MPICOMM_DEVICE u64* counted(u32 of) const {
    return reinterpret_cast<u64*>(x.experts.team.arenas[rank()] + x.experts.counted) + of;
  }
  // Tokens have numbers in their order. Numbers that sources with fewer tokens leave out stand for none.
  MPICOMM_DEVICE u32 all_tokens() const {
    u32 most = 0;
    for (u32 source = 0; source < size(); ++source) most = layout.tokens[source] > most ? layout.tokens[source] : most;
    return most * size();
  }
  // The first token of a warp of a block.
  MPICOMM_DEVICE u32 first_token(u32 of_warp) const {
    const u64 number = static_cast<u64>(block) * kWarps + of_warp;
    return static_cast<u32>(number * all_tokens() / (static_cast<u64>(blocks) * kWarps));
  }
  MPICOMM_DEVICE Route token_of(u32 number) const { return {number % size(), number / size(), 0}; }
  MPICOMM_DEVICE bool exists(const Route& route) const { return route.token < layout.tokens[route.source]; }
  MPICOMM_DEVICE u64 pair_of(const Route& route) const {
    const Experts& experts = x.experts;
    return (static_cast<u64>(route.source) * experts.max_tokens + route.token) * experts.top_k + route.slot;
  }

  // Gives up because of a fault in the routes. Returns false.
  MPICOMM_DEVICE_CALL bool give_up(u32 operation, u64 number, u32 of) const {
    const Team& team = x.experts.team;
    const Watch watch{team.faults, 0, operation, number, blockIdx.x, team.names[of]};
    report_fault(watch, 0);
    raise_abort(team, watch);
    return false;
  }

  MPICOMM_DEVICE u32 epoch() const { return static_cast<u32>(turn.number); }
  MPICOMM_DEVICE Route route_of(u32 pair) const {
    Route route = token_of(pair / x.experts.top_k);
    route.slot = pair % x.experts.top_k;
    return route;
  }
  MPICOMM_DEVICE const Pair* packet_of(const Route& route) const {
    return routes_of(x.experts, rank(), route.source) + 1 + static_cast<u64>(route.token) * x.experts.top_k + route.slot;
  }

  // Waits for a packet of a source. Packets need no order: see packet_protocols.cuh.
  MPICOMM_DEVICE bool await_packet(u32 source, const Pair* place, Packet& unit) const {
    Pair packet{};
    const auto reached = [&] {
      packet = load_volatile(place);
      return FlagProtocol::has_come(packet, epoch());
    };
    if (!await_peer(x.experts, kDispatch, turn.number, source, reached)) return false;
    unit = FlagProtocol::unit(packet);
    return true;
  }

  // Learns the number of tokens of each source, on all threads of the block.
  MPICOMM_DEVICE bool count_tokens() const {
    bool ok = true;
    if (thread < size()) {
      Packet unit{};
      ok = await_packet(thread, routes_of(x.experts, rank(), thread), unit);
      layout.tokens[thread] = unit.words[0];
      if (ok && block == 0) x.tokens[thread] = unit.words[0];
    }
    return __syncthreads_and(ok);
  }

  // Calls `act` for each 32 pairs of the warp, on all lanes: with the pair of the lane, its expert,
  // its weight, and the lanes whose pairs have the same expert. The expert is kNoExpert on lanes
  // without a pair. Returns false if a packet does not come, or has an id that is no expert.
  template <class Act>
  MPICOMM_DEVICE bool each_pair(Act act) const {
    const u32 top_k = x.experts.top_k;
    const u64 end = static_cast<u64>(first_token(warp + 1)) * top_k;
    for (u64 base = static_cast<u64>(first_token(warp)) * top_k; base < end; base += kLanes) {
      Route route{};
      Packet unit{{kNoExpert, 0, 0, 0}};
      bool is_pair = false;
      const bool ok = base + lane >= end || take_pair(base + lane, route, unit, is_pair);
      if (!__all_sync(kWarp, ok)) return false;
      const u32 expert = unit.words[0];
      act(route, is_pair, expert, unit.words[1], __match_any_sync(kWarp, expert));
    }
    return true;
  }

  // Waits for the packet of a pair. Returns false if it does not come, or has an id that is no expert.
  MPICOMM_DEVICE bool take_pair(u64 number, Route& route, Packet& unit, bool& is_pair) const {
    route = route_of(static_cast<u32>(number));
    is_pair = exists(route);
    if (!is_pair) return true;
    if (!await_packet(route.source, packet_of(route), unit)) return false;
    return unit.words[0] != kWrongExpert || give_up(kRoutes, route.token, route.source);
  }

  // Whether there are so few pairs that this block counts all of them.
  MPICOMM_DEVICE bool counts_alone() const {
    return static_cast<u64>(all_tokens()) * x.experts.top_k <= kFewPairs;
  }

  // Clears all counts, on all threads of the block.
  MPICOMM_DEVICE void clear_counts() const {
    for (u32 expert = thread; expert < num_experts(x.experts); expert += blockDim.x) {
      layout.before[expert] = layout.totals[expert] = 0;
      for (u32 each = 0; each < kWarps; ++each) layout.histograms[each][expert] = 0;
    }
    __syncthreads();
  }

  // Counts the pairs of each warp of this block.
  MPICOMM_DEVICE bool count_pairs() const {
    u32* const mine = layout.histograms[warp];
    const bool ok = each_pair([&](const Route&, bool, u32 expert, u32, u32 alike) {
      // The first lane of an expert counts for all lanes of the expert.
      if (expert != kNoExpert && (alike & ((1u << lane) - 1)) == 0) mine[expert] += __popc(alike);
      __syncwarp();
    });
    return __syncthreads_and(ok);
  }

  // Publishes the counts of this block to the receiver blocks of this rank.
  MPICOMM_DEVICE void publish_counts() const {
    const u32 experts = num_experts(x.experts);
    u32* const published = histogram(block);
    for (u32 expert = thread; expert < experts; expert += blockDim.x) {
      u32 count = 0;
      for (u32 each = 0; each < kWarps; ++each) count += layout.histograms[each][expert];
      published[expert] = count;
    }
    // Orders the stores of all threads before the release, which publishes the counts. Pairs with
    // the acquire in `add_counts`. A plain store could be visible before the counts.
    __syncthreads();
    if (thread == 0) store_release_on_device(counted(block), turn.number);
  }

  // Counts the pairs of earlier blocks and of all blocks, which have published them.
  MPICOMM_DEVICE bool add_counts() const {
    const u32 experts = num_experts(x.experts);
    bool ok = true;
    for (u32 other = thread; other < blocks && ok; other += blockDim.x) {
      const u64* const flag = counted(other);
      ok = await_block(x.experts, turn.number, [&] { return load_acquire_on_device(flag) == turn.number; });
    }
    // Orders the loads of all threads after the acquires.
    if (!__syncthreads_and(ok)) return false;
    // Each warp adds the counts of some blocks. The loads of a lane are in flight together.
    constexpr u32 kAtOnce = 4;
    for (u32 expert = lane; expert < experts; expert += kLanes) {
      u32 before = 0, total = 0;
      for (u32 first = warp; first < blocks; first += kAtOnce * kWarps) {
        u32 counts[kAtOnce];
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          const u32 other = first + i * kWarps;
          counts[i] = other < blocks ? histogram(other)[expert] : 0;
        }
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          before += first + i * kWarps < block ? counts[i] : 0;
          total += counts[i];
        }
      }
      atomicAdd(&layout.before[expert], before);
      atomicAdd(&layout.totals[expert], total);
    }
    return true;
  }

  // Counts the pairs of earlier blocks, of all blocks, and of each warp of this block.
  MPICOMM_DEVICE bool count_all_pairs() const {
    constexpr u32 kAtOnce = 4;
    const u32 top_k = x.experts.top_k, first = first_token(0), tokens = all_tokens(), pairs = tokens * top_k;
    for (u32 begin = thread; begin < pairs; begin += kAtOnce * blockDim.x) {
      // The first loads of some packets are in flight together. Most packets have come.
      Pair packets[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 number = begin + i * blockDim.x;
        const Route route = route_of(number);
        packets[i] = {0, 0};
        if (number < pairs && exists(route)) packets[i] = load_volatile(packet_of(route));
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 number = begin + i * blockDim.x;
        const Route route = route_of(number);
        if (number >= pairs || !exists(route)) continue;
        Packet unit = FlagProtocol::unit(packets[i]);
        if (!FlagProtocol::has_come(packets[i], epoch()) && !await_packet(route.source, packet_of(route), unit)) return false;
        const u32 expert = unit.words[0], token = number / top_k;
        if (expert == kWrongExpert) return give_up(kRoutes, route.token, route.source);
        if (expert == kNoExpert) continue;
        atomicAdd(&layout.totals[expert], 1);
        if (token < first) atomicAdd(&layout.before[expert], 1);
        // The warp of this block with the token: the inverse of `first_token`.
        const u64 all = static_cast<u64>(blocks) * kWarps;
        const u64 of_all = (static_cast<u64>(token + 1) * all - 1) / tokens;
        if (of_all / kWarps == block) atomicAdd(&layout.histograms[of_all % kWarps][expert], 1);
      }
    }
    return true;
  }

  // Counts pairs, and finds the place of each expert on each rank and the first place of each warp.
  MPICOMM_DEVICE bool place_experts() const {
    const u32 experts = num_experts(x.experts);
    clear_counts();
    bool ok;
    if (counts_alone()) {
      ok = count_all_pairs();
    } else {
      if (!count_pairs()) return false;
      publish_counts();
      ok = add_counts();
    }
    if (!__syncthreads_and(ok)) return false;
    for (u32 expert = thread; expert < experts; expert += blockDim.x) {
      u32 before = layout.before[expert];
      for (u32 each = 0; each < kWarps; ++each) {
        const u32 count = layout.histograms[each][expert];
        layout.histograms[each][expert] = before;
        before += count;
      }
    }
    if (warp == 0) scan_offsets(experts);
    __syncthreads();
    if (thread < size()) {
      const u32 rows = layout.offsets[x.experts.firsts[thread + 1]] - layout.offsets[x.experts.firsts[thread]];
      if (rows > x.capacity) ok = give_up(kRoom, rows, thread);
    }
    return __syncthreads_and(ok);
  }

  MPICOMM_DEVICE void scan_offsets(u32 experts) const {
    u32 carried = 0;
    for (u32 base = 0; base < experts; base += kLanes) {
      const u32 expert = base + lane;
      const u32 total = expert < experts ? layout.totals[expert] : 0;
      const u32 rows = (total + x.alignment - 1) / x.alignment * x.alignment;
      u32 sum = rows;
      for (u32 distance = 1; distance < kLanes; distance *= 2) {
        const u32 lower = __shfl_up_sync(kWarp, sum, distance);
        if (lane >= distance) sum += lower;
      }
      if (expert < experts) layout.offsets[expert] = carried + sum - rows;
      carried += __shfl_sync(kWarp, sum, kLanes - 1);
    }
    if (lane == 0) layout.offsets[experts] = carried;
  }

  // Gives each pair of this block a place, and describes the rows.
  MPICOMM_DEVICE bool place_pairs() const {
    const u32 first = x.experts.firsts[rank()], end = x.experts.firsts[rank() + 1];
    const u32 start = layout.offsets[first];
    u32* const next = layout.histograms[warp];
    return each_pair([&](const Route& route, bool is_pair, u32 expert, u32 weight, u32 alike) {
      const bool here = is_pair && expert >= first && expert < end;
      const u32 lower = __popc(alike & ((1u << lane) - 1));
      i32 place = -1;
      if (here) place = static_cast<i32>(layout.offsets[expert] - start + next[expert] + lower);
      __syncwarp();
      if (here && lower == 0) next[expert] += __popc(alike);
      __syncwarp();
      if (is_pair) x.places[pair_of(route)] = place;
      if (here) describe(place, route.source, route.token, route.slot, float_of(weight));
    });
  }

  MPICOMM_DEVICE void describe(u64 place, i32 source, i32 token, i32 slot, float weight) const {
    x.sources[3 * place] = source;
    x.sources[3 * place + 1] = token;
    x.sources[3 * place + 2] = slot;
    x.row_weights[place] = weight;
  }

  MPICOMM_DEVICE void clear(u8* memory, u64 nbytes) const {
    for (u64 at = thread * kPacketNbytes; at < nbytes; at += blockDim.x * kPacketNbytes) store_aligned(memory + at, {});
  }

  // Fills the rows that no pair has. Rows before the next expert become zero, because products of
  // whole groups read them.
  MPICOMM_DEVICE void fill_gaps() const {
    const u32 first = x.experts.firsts[rank()], end = x.experts.firsts[rank() + 1];
    const u32 start = layout.offsets[first];
    for (u32 expert = first + block; expert < end; expert += blocks) {
      const u64 begin = layout.offsets[expert] - start, used = begin + layout.totals[expert];
      const u64 following = layout.offsets[expert + 1] - start;
      if (thread == 0) {
        x.counts[expert - first] = static_cast<i32>(layout.totals[expert]);
        x.offsets[expert - first] = static_cast<i32>(begin);
      }
      for (u64 place = used + thread; place < following; place += blockDim.x) describe(place, -1, -1, -1, 0);
      clear(x.rows.first + used * x.rows.first_nbytes, (following - used) * x.rows.first_nbytes);
      clear(x.rows.second + used * x.rows.second_nbytes, (following - used) * x.rows.second_nbytes);
    }
    const u64 used = layout.offsets[end] - start;
    if (block == 0 && thread == 0) x.offsets[end - first] = static_cast<i32>(used);
    for (u64 place = used + block * blockDim.x + thread; place < x.capacity; place += blocks * blockDim.x) {
      describe(place, -1, -1, -1, 0);
    }
  }

  // Copies the rows of this block's tokens to their places. First come the tokens of this rank, while
  // the others are on their way.
  MPICOMM_DEVICE void lay_out() const {
    const u32 parts = x.experts.parts;
    const u32 first = first_token(0), tokens = first_token(kWarps) - first;
    for (u32 pass = 0; pass < 2; ++pass) {
      for (u64 unit = warp; unit < static_cast<u64>(tokens) * parts; unit += kWarps) {
        const Route route = token_of(first + static_cast<u32>(unit / parts));
        if ((route.source == rank()) != (pass == 0) || !exists(route)) continue;
        if (!copy_part(route, static_cast<u32>(unit % parts))) return;
      }
    }
  }

  MPICOMM_DEVICE bool copy_part(const Route& route, u32 part) const {
    const Experts& experts = x.experts;
    const i32 place = lane < experts.top_k ? x.places[pair_of(route) + lane] : -1;
    const u32 placed = __ballot_sync(kWarp, place >= 0);
    if (placed == 0) return true;
    const Part range(experts, part, lane);
    Packets packets;
    if (route.source == rank()) {
      packets.load([&](u64 at) { return x.x.at(route.token, at); }, range);
    } else {
      const bool ok =
          lane != 0 || await_part(experts, experts.row_flags, kDispatch, turn, route.source, route.token, part);
      // Orders the loads of all lanes after the acquire.
      __syncwarp();
      if (!__all_sync(kWarp, ok)) return false;
      const u8* const row = row_in(experts, experts.rows, rank(), route.source, route.token);
      packets.load([&](u64 at) { return row + at; }, range);
    }
    for (u32 left = placed; left != 0; left &= left - 1) {
      const u64 row = static_cast<u64>(__shfl_sync(kWarp, place, __ffs(left) - 1));
      packets.store([&](u64 at) { return x.rows.at(row, at); }, range);
    }
    return true;
  }

  MPICOMM_DEVICE void run() const {
    if (!count_tokens() || !place_experts()) return;
    // All threads of the block go on or leave together. The barrier also orders the places of all
    // warps before the loads in `lay_out`.
    if (!__syncthreads_and(place_pairs())) return;
    lay_out();
    fill_gaps();
  }
};

}  // namespace mpicomm
