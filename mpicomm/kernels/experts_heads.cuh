// Heads of a dispatch of few tokens: each head has the number of tokens of a source, and says which of kHeadTokens of
// them come to the receiver. So a rank knows the rows of all tokens in the layout by token before it has counted anything.
#pragma once

#include "experts_layout.cuh"

namespace mpicomm {

// In the shared memory of a block.
struct Heads {
  u32 coming[kMaxRanks][kMostHeads];  // a bit for each token: to each rank, later from each source

  MPICOMM_DEVICE static u32 count(const Dispatch& x) { return (x.experts.max_tokens + kHeadTokens - 1) / kHeadTokens; }
  MPICOMM_DEVICE static Pair* place(const Dispatch& x, const Turn& turn, u32 owner, u32 source, u32 head) {
    return routes_of(x.experts, owner, source) + 2 * head + turn.parity();
  }

  // Makes the heads of this sender block: each head whose number has the number of the block as remainder. All threads
  // of the block call it. A barrier follows before `send`.
  MPICOMM_DEVICE void make(const Dispatch& x) {
    const u32 heads = count(x), top_k = x.experts.top_k, pairs = x.num_tokens * top_k;
    if (blockIdx.x >= heads) return;
    if (threadIdx.x < kMaxRanks * kMostHeads) coming[threadIdx.x / kMostHeads][threadIdx.x % kMostHeads] = 0;
    __syncthreads();
    for (u32 head = blockIdx.x; head < heads; head += x.experts.senders) {
      const u32 first = head * kHeadTokens * top_k;
      for (u32 pair = threadIdx.x; pair < kHeadTokens * top_k && first + pair < pairs; pair += blockDim.x) {
        const u32 owner = owner_of(x, expert_of(x, id_of(x, first + pair)));
        if (owner != kMaxRanks) atomicOr(&coming[owner][head], 1u << pair / top_k);
      }
    }
  }

  // Sends the heads of this block, one on each thread. Pairs with the loads in `learn`.
  MPICOMM_DEVICE void send(const Dispatch& x, const Turn& turn) const {
    const Team& team = x.experts.team;
    const u32 head = threadIdx.x / team.size, to = threadIdx.x - head * team.size;
    if (head >= count(x) || head % x.experts.senders != blockIdx.x) return;
    const Packet unit{{x.num_tokens, coming[to][head], 0, 0}};
    store_volatile(place(x, turn, to, team.rank, head), FlagProtocol::packet(unit, static_cast<u32>(turn.number)));
  }

  // Waits for the heads of all sources, and notes their numbers of tokens in `tokens`. All threads of the block call it.
  // If the result is false, all threads must leave.
  MPICOMM_DEVICE bool learn(const Dispatch& x, const Turn& turn, u32* tokens) {
    const Team& team = x.experts.team;
    const u32 heads = count(x), source = threadIdx.x / heads, head = threadIdx.x - source * heads;
    bool ok = true;
    if (source < team.size) {
      Packet unit{};
      ok = await_packet(x.experts, turn, source, place(x, turn, team.rank, source, head), unit);
      coming[source][head] = unit.words[1];
      if (head == 0) tokens[source] = unit.words[0];
    }
    return __syncthreads_and(ok);
  }

  // The row of a token in the layout by token: the number of tokens that come before it. The result is -1 if the token
  // does not come, or if there is no room for it. In the second case the blocks that give places report a fault.
  MPICOMM_DEVICE i64 row_of(const Dispatch& x, u32 source, u32 token) const {
    const u32 head = token / kHeadTokens, bit = 1u << token % kHeadTokens;
    if ((coming[source][head] & bit) == 0) return -1;
    u32 row = 0;
#pragma unroll 1
    for (u32 other = 0; other < x.experts.team.size; ++other) {
      for (u32 before = 0; before < head; ++before) row += __popc(coming[other][before]);
      row += __popc(coming[other][head] & (bit - 1 | (other < source ? bit : 0)));
    }
    return row < x.capacity ? static_cast<i64>(row) : -1;
  }
};
static_assert(kMaxRanks * kMostHeads <= kWarps * kLanes, "each head has a thread");

}  // namespace mpicomm
