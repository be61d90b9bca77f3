// Headers of a dispatch of few tokens: each header has the number of tokens of a source, and a bitmap of those of
// kHeaderTokens tokens that come to the receiver. So a rank knows the rows of all tokens in the layout by token before
// it has counted anything.
#pragma once

#include "experts_layout.cuh"

namespace mpicomm {

// In the shared memory of a block.
struct Headers {
  u32 bitmaps[kMaxRanks][kMaxHeaders];  // a bit for each token: to each rank, later from each source

  MPICOMM_DEVICE static u32 count(const Dispatch& x) {
    return (x.experts.max_tokens + kHeaderTokens - 1) / kHeaderTokens;
  }
  MPICOMM_DEVICE static Pair* packet_in(const Dispatch& x, const Launch& launch, u32 owner, u32 source, u32 header) {
    return routes_of(x.experts, owner, source) + 2 * header + launch.parity();
  }

  // Makes the headers of this sender block: each header whose number has the number of the block as remainder. All
  // threads of the block call it. A barrier follows before `send`.
  MPICOMM_DEVICE void make(const Dispatch& x) {
    const u32 headers = count(x), top_k = x.experts.top_k, pairs = x.num_tokens * top_k;
    if (blockIdx.x >= headers) return;
    if (threadIdx.x < kMaxRanks * kMaxHeaders) bitmaps[threadIdx.x / kMaxHeaders][threadIdx.x % kMaxHeaders] = 0;
    __syncthreads();
    for (u32 header = blockIdx.x; header < headers; header += x.experts.senders) {
      const u32 first = header * kHeaderTokens * top_k;
      for (u32 pair = threadIdx.x; pair < kHeaderTokens * top_k && first + pair < pairs; pair += blockDim.x) {
        const u32 owner = owner_of(x, expert_of(x, id_of(x, first + pair)));
        if (owner != kMaxRanks) atomicOr(&bitmaps[owner][header], 1u << pair / top_k);
      }
    }
  }

  // Sends the headers of this block, one on each thread. Pairs with the loads in `receive`.
  MPICOMM_DEVICE void send(const Dispatch& x, const Launch& launch) const {
    const Team& team = x.experts.team;
    const u32 header = threadIdx.x / team.size, to = threadIdx.x - header * team.size;
    if (header >= count(x) || header % x.experts.senders != blockIdx.x) return;
    const Packet unit{{x.num_tokens, bitmaps[to][header], 0, 0}};
    const Pair packet = LLProtocol::packet(unit, static_cast<u32>(launch.number));
    store_volatile(packet_in(x, launch, to, team.rank, header), packet);
  }

  // Waits for the headers of all sources, and stores their numbers of tokens in `tokens`. All threads of the block call
  // it. If the result is false, all threads must leave.
  MPICOMM_DEVICE bool receive(const Dispatch& x, const Launch& launch, u32* tokens) {
    const Team& team = x.experts.team;
    const u32 headers = count(x), source = threadIdx.x / headers, header = threadIdx.x - source * headers;
    bool ok = true;
    if (source < team.size) {
      Packet unit{};
      ok = await_packet(x.experts, launch, source, packet_in(x, launch, team.rank, source, header), unit);
      bitmaps[source][header] = unit.words[1];
      if (header == 0) tokens[source] = unit.words[0];
    }
    return __syncthreads_and(ok);
  }

  // The row of a token in the layout by token: the number of tokens that come before it. The result is -1 if the token
  // does not come, or if there is no room for it. In the second case the blocks that give places report a fault.
  MPICOMM_DEVICE i64 row_of(const Dispatch& x, u32 source, u32 token) const {
    const u32 header = token / kHeaderTokens, bit = 1u << token % kHeaderTokens;
    if ((bitmaps[source][header] & bit) == 0) return -1;
    u32 row = 0;
#pragma unroll 1
    for (u32 other = 0; other < x.experts.team.size; ++other) {
      for (u32 before = 0; before < header; ++before) row += __popc(bitmaps[other][before]);
      row += __popc(bitmaps[other][header] & (bit - 1 | (other < source ? bit : 0)));
    }
    return row < x.capacity ? static_cast<i64>(row) : -1;
  }
};
static_assert(kMaxRanks * kMaxHeaders <= kWarps * kLanes, "each header has a thread");

}  // namespace mpicomm
