// The receivers of a dispatch count pairs and rows, and so find the first place of each warp. The top of
// experts_dispatch.cu explains the layout.
#pragma once

#include "experts_layout.cuh"

namespace mpicomm {

// Up to so many pairs each receiver block counts all pairs, which takes less time than a wait for other blocks.
constexpr u64 kFewPairs = 8192;
static_assert(kFewPairs * kMaxBlocks * kWarps < 1ull << 32, "see Counts::count");

// Gives up because of a fault in the routes. Returns false.
MPICOMM_DEVICE_CALL bool report_bad_routes(const Team& team, u32 operation, u64 number, u32 of) {
  const Watch watch{team.faults, 0, operation, number, blockIdx.x, team.user_ranks[of]};
  report_fault(watch, 0);
  raise_abort(team, watch);
  return false;
}

struct Counts {
  const Dispatch& x;
  const Launch& launch;
  Layout& layout;
  u32 thread = threadIdx.x;
  u32 lane = threadIdx.x % kLanes;
  u32 warp = threadIdx.x / kLanes;
  u32 block = blockIdx.x - x.experts.senders;
  u32 blocks = gridDim.x - x.experts.senders;
  // A step of a warp is the pairs of so many tokens, one on each lane.
  u32 of_step = kLanes / x.experts.top_k;
  u32 in_step = lane / x.experts.top_k;  // the number of this lane's token in a step
  u32 slot = lane - in_step * x.experts.top_k;
  Shares shares{};

  MPICOMM_DEVICE u32 rank() const { return x.experts.team.rank; }
  MPICOMM_DEVICE u32 size() const { return x.experts.team.size; }
  MPICOMM_DEVICE bool by_token() const { return x.token_rows != nullptr; }
  MPICOMM_DEVICE u32 columns() const { return num_experts(x.experts) + (by_token() ? size() : 0); }
  MPICOMM_DEVICE u32* histogram(u32 of) const {
    u8* const start = x.experts.team.arenas[rank()] + x.experts.histograms;
    return reinterpret_cast<u32*>(start) + static_cast<u64>(of) * columns();
  }
  MPICOMM_DEVICE u64* histogram_flag(u32 of) const {
    return reinterpret_cast<u64*>(x.experts.team.arenas[rank()] + x.experts.histogram_flags) + of;
  }
  // The first token of a warp of this block.
  MPICOMM_DEVICE u32 first_token(u32 of_warp) const {
    const u64 number = static_cast<u64>(block) * kWarps + of_warp;
    return static_cast<u32>(quotient(number * shares.all, blocks * kWarps));
  }
  // The largest number of tokens of a source.
  MPICOMM_DEVICE u32 most_tokens() const {
    u32 most = 0;
#pragma unroll 1
    for (u32 source = 0; source < size(); ++source) most = layout.tokens[source] > most ? layout.tokens[source] : most;
    return most;
  }
  // `most` is a result of `most_tokens`.
  MPICOMM_DEVICE void share_tokens(u32 most) {
    shares.all = most * size();
    shares.begin = first_token(warp);
    shares.end = first_token(warp + 1);
    shares.block_begin = first_token(0);
    shares.block_end = first_token(kWarps);
  }
  MPICOMM_DEVICE Route token_of(u32 number) const { return {number % size(), number / size(), 0}; }
  MPICOMM_DEVICE bool exists(const Route& route) const { return route.token < layout.tokens[route.source]; }
  MPICOMM_DEVICE u64 token_at(const Route& route) const {
    return static_cast<u64>(route.source) * x.experts.max_tokens + route.token;
  }
  MPICOMM_DEVICE u32 recv_slot(const Route& route) const {
    return recv_slot_of(x.experts, launch, layout.tokens[route.source], route.token);
  }
  MPICOMM_DEVICE u64 pair_of(const Route& route) const { return token_at(route) * x.experts.top_k + route.slot; }

  MPICOMM_DEVICE bool give_up(u32 operation, u64 number, u32 of) const {
    return report_bad_routes(x.experts.team, operation, number, of);
  }

  MPICOMM_DEVICE u32 epoch() const { return static_cast<u32>(launch.number); }
  MPICOMM_DEVICE const Pair* packet_of(const Route& route) const {
    const Pair* const packets = routes_of(x.experts, rank(), route.source) + kHeaders;
    return packets + static_cast<u64>(recv_slot(route)) * x.experts.top_k + route.slot;
  }

  // Receives the number of tokens of each source, on all threads of the block.
  MPICOMM_DEVICE bool count_tokens() {
    // Most often all ranks have as many tokens as this rank. Then the divisions of the shares end before the
    // numbers come.
    share_tokens(x.num_tokens);
    bool ok = true;
    if (thread < size()) {
      Packet unit{};
      ok = await_packet(x.experts, launch, thread, routes_of(x.experts, rank(), thread) + launch.parity(), unit);
      layout.tokens[thread] = unit.words[0];
      if (ok && block == 0) x.tokens[thread] = unit.words[0];
    }
    if (!__syncthreads_and(ok)) return false;
    const u32 most = most_tokens();
    if (most != x.num_tokens) share_tokens(most);
    return true;
  }

  // The pair of this lane in a step that begins at token `first`.
  MPICOMM_DEVICE LanePair pair_at(u32 first) const {
    const u32 number = first + in_step;
    LanePair pair;
    if (in_step >= of_step || number >= shares.end) return pair;
    pair.route = token_of(number);
    pair.route.slot = slot;
    pair.exists = exists(pair.route);
    return pair;
  }

  // Takes the packet of a pair, which has perhaps come in `packet`. Returns false if it does not come, or
  // has an id that is no expert.
  MPICOMM_DEVICE bool take(LanePair& pair, const Pair& packet) const {
    if (!pair.exists) return true;
    Packet unit = LLProtocol::unit(packet);
    const bool has_arrived = LLProtocol::has_arrived(packet, epoch());
    if (!has_arrived && !await_packet(x.experts, launch, pair.route.source, packet_of(pair.route), unit)) return false;
    pair.expert = unit.words[0];
    pair.weight = unit.words[1];
    if (pair.expert == kWrongExpert) return give_up(kRoutes, pair.route.token, pair.route.source);
    if (pair.expert == kNoExpert) return true;
    pair.is_new = (pair.expert & kNewRank) != 0;
    pair.expert &= ~kNewRank;
    pair.owner = rank_of(x.experts, pair.expert);
    return true;
  }
  MPICOMM_DEVICE Pair packet_now(const LanePair& pair) const {
    return pair.exists ? load_volatile(packet_of(pair.route)) : Pair{0, 0};
  }

  // The lanes before this lane, and before the first lane of its token.
  MPICOMM_DEVICE u32 lower_lanes() const { return (1u << lane) - 1; }
  MPICOMM_DEVICE u32 earlier_tokens() const { return (1u << (lane - slot)) - 1; }

  // The set of lanes with the first pair of a token on `of`. All lanes of the warp call it. Each of these
  // lanes stands for a row.
  MPICOMM_DEVICE u32 row_lanes(const LanePair& pair, u32 of) const {
    return __ballot_sync(kWarp, pair.is_new && pair.owner == of);
  }

  // The packet of this lane in the first step of its warp, which has perhaps come.
  MPICOMM_DEVICE Pair first_packet_now() const { return packet_now(pair_at(shares.begin)); }

  // Calls `act` for each step of the warp, on all lanes: with the pair of the lane, and the lanes whose
  // pairs have the same expert. Returns false if a packet does not come, or has an id that is no expert.
  // `packet` is a result of `first_packet_now`.
  template <class Act>
  MPICOMM_DEVICE bool each_step(Pair packet, Act act) const {
#pragma unroll 1
    for (u32 first = shares.begin; first < shares.end; first += of_step) {
      LanePair pair = pair_at(first);
      const bool ok = take(pair, packet);
      if (!__all_sync(kWarp, ok)) return false;
      packet = packet_now(pair_at(first + of_step));
      act(pair, __match_any_sync(kWarp, pair.expert));
    }
    return true;
  }

  // Whether there are so few pairs that this block counts all of them.
  MPICOMM_DEVICE bool counts_alone() const {
    return static_cast<u64>(shares.all) * x.experts.top_k <= kFewPairs;
  }

  // Clears all counts. A barrier follows.
  MPICOMM_DEVICE void clear_counts() const {
    for (u32 column = thread; column < columns(); column += blockDim.x) {
      layout.before[column] = layout.totals[column] = 0;
      for (u32 each = 0; each < kWarps; ++each) layout.histograms[each][column] = 0;
    }
  }

  // Counts the pairs of each warp of this block.
  MPICOMM_DEVICE bool count_pairs() const {
    u32* const mine = layout.histograms[warp];
    const bool ok = each_step(first_packet_now(), [&](const LanePair& pair, u32 same_expert) {
      // The first lane of an expert counts for all lanes of the expert.
      if (pair.expert != kNoExpert && (same_expert & lower_lanes()) == 0) mine[pair.expert] += __popc(same_expert);
      for (u32 of = 0; by_token() && of < size(); ++of) {
        const u32 rows = row_lanes(pair, of);
        if (lane == 0) mine[num_experts(x.experts) + of] += __popc(rows);
      }
      __syncwarp();
    });
    return __syncthreads_and(ok);
  }

  // Publishes the counts of this block to the receiver blocks of this rank.
  MPICOMM_DEVICE void publish_counts() const {
    u32* const published = histogram(block);
    for (u32 column = thread; column < columns(); column += blockDim.x) {
      u32 count = 0;
      for (u32 each = 0; each < kWarps; ++each) count += layout.histograms[each][column];
      published[column] = count;
    }
    // Orders the stores of all threads before the release, which publishes the counts. Pairs with
    // the acquire in `add_counts`. A plain store could be visible before the counts.
    __syncthreads();
    if (thread == 0) store_release_on_device(histogram_flag(block), launch.number);
  }

  // Counts the pairs of earlier and of later blocks, which have published them.
  MPICOMM_DEVICE bool add_counts() const {
    bool ok = true;
    for (u32 other = thread; other < blocks && ok; other += blockDim.x) {
      const u64* const flag = histogram_flag(other);
      ok = await_block(x.experts, launch.number, [&] { return load_acquire_on_device(flag) == launch.number; });
    }
    // Orders the loads of all threads after the acquires.
    if (!__syncthreads_and(ok)) return false;
    // Groups of threads add the counts of some blocks each. Many loads of a thread are in flight together.
    constexpr u32 kAtOnce = 16;
    const u32 all = (columns() + kLanes - 1) / kLanes * kLanes;
    const u32 groups = blockDim.x > all ? blockDim.x / all : 1, group = thread / all % groups;
    if (thread >= groups * all && groups > 1) return true;
    for (u32 column = groups > 1 ? thread % all : thread; column < columns(); column += groups > 1 ? all : blockDim.x) {
      u32 before = 0, after = 0;
      for (u32 first = group; first < blocks; first += kAtOnce * groups) {
        u32 counts[kAtOnce];
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          const u32 other = first + i * groups;
          counts[i] = other < blocks ? histogram(other)[column] : 0;
        }
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          before += first + i * groups < block ? counts[i] : 0;
          after += first + i * groups > block ? counts[i] : 0;
        }
      }
      atomicAdd(&layout.before[column], before);
      atomicAdd(&layout.totals[column], after);
    }
    return true;
  }

  // The warp of this block with a token: the inverse of `first_token`.
  MPICOMM_DEVICE u32 warp_of(u32 token) const { return ((token + 1) * (blocks * kWarps) - 1) / shares.all % kWarps; }

  // The number of pairs of a source whose tokens come before token `number` of all sources.
  MPICOMM_DEVICE u32 pairs_before(u32 source, u32 number) const {
    return (number + size() - 1 - source) / size() * x.experts.top_k;
  }

  // Counts the pairs of earlier blocks, of later blocks, and of each warp of this block. Each source has as many
  // threads, which share out its packets. The packets of a source follow each other, so a thread computes few numbers
  // for a packet.
  MPICOMM_DEVICE bool count_all_pairs() const {
    constexpr u32 kAtOnce = 4;
    const u32 threads = blockDim.x / size(), top_k = x.experts.top_k, source = thread / threads;
    if (source >= size()) return true;
    const Pair* const packets = packet_of({source, 0, 0});
    const u32 pairs = layout.tokens[source] * top_k;
    const u32 begin = pairs_before(source, shares.block_begin), end = pairs_before(source, shares.block_end);
#pragma unroll 1
    for (u32 first = thread - source * threads; first < pairs; first += kAtOnce * threads) {
      u32 words[kAtOnce];  // the experts
      u32 missing = 0;
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) missing |= (first + i * threads < pairs ? 1u : 0u) << i;
      const u32 all = missing;
      const auto reached = [&] {
        // The loads of all missing packets are in flight together.
        Pair loaded[kAtOnce];
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          if ((missing >> i & 1) != 0) loaded[i] = load_volatile(packets + first + i * threads);
        }
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          if ((missing >> i & 1) == 0 || !LLProtocol::has_arrived(loaded[i], epoch())) continue;
          words[i] = LLProtocol::unit(loaded[i]).words[0];
          missing &= ~(1u << i);
        }
        return missing == 0;
      };
      if (!await_peer(x.experts, kDispatch, launch.number, source, reached)) return false;
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 pair = first + i * threads;
        if ((all >> i & 1) == 0 || words[i] == kNoExpert) continue;
        if (words[i] == kWrongExpert) return give_up(kRoutes, pair / top_k, source);
        const u32 expert = words[i] & ~kNewRank;
        u32* counts = pair < begin ? layout.before : layout.totals;
        if (pair >= begin && pair < end) counts = layout.histograms[warp_of(pair / top_k * size() + source)];
        atomicAdd(&counts[expert], 1);
        if (words[i] != expert) atomicAdd(&counts[num_experts(x.experts) + rank_of(x.experts, expert)], 1);
      }
    }
    return true;
  }

  MPICOMM_DEVICE void scan_offsets() const {
    const u32 experts = num_experts(x.experts);
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

  // The rows of a rank.
  MPICOMM_DEVICE u32 rows_of(u32 of) const {
    if (by_token()) return layout.totals[num_experts(x.experts) + of];
    return layout.offsets[x.experts.first_experts[of + 1]] - layout.offsets[x.experts.first_experts[of]];
  }

  // Counts pairs, and finds the place of each expert on each rank, and the first places of each warp. `packet`
  // becomes a result of `first_packet_now`.
  MPICOMM_DEVICE bool place_experts(Pair& packet) const {
    bool ok;
    if (counts_alone()) {
      ok = count_all_pairs();
    } else {
      if (!count_pairs()) return false;
      publish_counts();
      ok = add_counts();
    }
    packet = first_packet_now();
    if (!__syncthreads_and(ok)) return false;
    for (u32 column = thread; column < columns(); column += blockDim.x) {
      u32 counts[kWarps];
#pragma unroll
      for (u32 each = 0; each < kWarps; ++each) counts[each] = layout.histograms[each][column];
      u32 next = layout.before[column];
#pragma unroll
      for (u32 each = 0; each < kWarps; ++each) {
        layout.histograms[each][column] = next;
        next += counts[each];
      }
      layout.totals[column] += next;
    }
    __syncthreads();
    if (warp == 0) scan_offsets();
    __syncthreads();
    if (thread < size()) {
      const u32 rows = rows_of(thread);
      if (rows > x.capacity) ok = give_up(kRoom, rows, thread);
    }
    return __syncthreads_and(ok);
  }
};

}  // namespace mpicomm
