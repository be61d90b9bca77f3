// The dispatch of few tokens in the layout by token, for Experts whose ranks never have more than kFewTokens tokens. It
// does what experts_dispatch.cu does, in less time.
//
// Rows travel as packets (experts_packets.cuh). Counting takes longer than few rows travel, so headers tell the rows
// (experts_headers.cuh). Some receiver blocks give places, as in experts_dispatch.cu, while the others only copy the
// rows of peers. Senders store the rows of this rank, which they have loaded for the peers.
//
// Why no ranks wait in a circle. A sender waits for headers, too. It has stored its headers, its routes and its first
// part before. So the rest of experts.cuh holds.
//
// Faults in routes are as in experts_dispatch.cu, but rows for which there is room may have been written.

#include "experts_headers.cuh"
#include "experts_packets.cuh"
#include "experts_receiver.cuh"
#include "experts_routes.cuh"

namespace mpicomm {

constexpr u32 kPlacers = 8;  // the most receiver blocks that give places

MPICOMM_DEVICE void send(const Dispatch& x, const Launch& launch, Layout& layout, Headers& headers) {
  const Experts& experts = x.experts;
  const u32 rank = experts.team.rank, lane = threadIdx.x % kLanes, warps = experts.senders * kWarps;
  const u32 units = x.num_tokens * experts.parts;
  // The first warps of all blocks come first, so few parts go to all multiprocessors.
  u32 unit = threadIdx.x / kLanes * experts.senders + blockIdx.x;
  LoadedPart loaded;
  u32 targets = 0;
  const auto push = [&] {
    targets = targets_of(x, loaded, lane);
    const u32 recv_slot = recv_slot_of(experts, launch, x.num_tokens, loaded.token);
    const Part range(experts, loaded.part, lane);
    each_row(experts, targets & ~(1u << rank), recv_slot, [&](u8* row) { push_part(loaded.packets, row, range); });
  };
  Routes routes(x);
  headers.make(x);
  // The loads are in flight while the block waits for the peers.
  if (unit < units) loaded = load_part(x, unit, lane);
  const u64 begun = awaited(experts, launch, x.num_tokens);
  const auto wait = [&](u32 peer) { return await_begun(experts, kDispatch, launch, peer, begun); };
  if (!begin_launch(experts, kDispatches, launch, wait)) return;
  headers.send(x, launch);
  routes.send(launch);
  // Rows of this block leave after its routes, as in experts_dispatch.cu. And `receive` overwrites the headers that
  // are sent.
  __syncthreads();
  if (unit < units) push();
  if (!headers.receive(x, launch, layout.tokens)) return;
  while (unit < units) {
    const i64 row = headers.row_of(x, rank, loaded.token);
    if (row >= 0) loaded.packets.store([&](u64 at) { return x.rows.at(row, at); }, Part(experts, loaded.part, lane));
    unit += warps;
    if (unit >= units) break;
    loaded = load_part(x, unit, lane);
    push();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) routes.renew(launch);
}

struct FewReceiver : Receiver {
  Headers& headers;

  // Copies the rows of peers, by `copiers` blocks, of which this block is number `copier`.
  MPICOMM_DEVICE void copy_rows(u32 copier, u32 copiers) const {
    const Experts& experts = x.experts;
    const u32 peers = size() - 1, parts = experts.parts, units = most_tokens() * peers * parts;
    for (u32 unit = warp * copiers + copier; unit < units; unit += copiers * kWarps) {
      const u32 number = unit / parts, part = unit - number * parts;
      const u32 token = number / peers, next = rank() + 1 + number - token * peers;
      const u32 source = next < size() ? next : next - size();
      const i64 row = headers.row_of(x, source, token);
      if (row < 0) continue;
      const Part range(experts, part, lane);
      Packets packets;
      u8* const from = row_in(experts, experts.rows, rank(), source, recv_slot({source, token, 0}));
      if (!take_part(experts, kDispatch, launch, source, from, range, packets)) return;
      packets.store([&](u64 at) { return x.rows.at(row, at); }, range);
    }
  }

  MPICOMM_DEVICE void run() {
    clear_counts();
    if (!headers.receive(x, launch, layout.tokens)) return;
    if (block == 0 && thread < size()) x.tokens[thread] = layout.tokens[thread];
    // A block that is alone first gives places, and then copies.
    const u32 placers = blocks / 2 < kPlacers ? blocks / 2 : kPlacers, number = block, copiers = blocks - placers;
    if (number < placers || placers == 0) {
      blocks = placers == 0 ? 1 : placers;
      share_tokens(most_tokens());
      if (!give_places()) return;
    }
    if (number >= placers) copy_rows(number - placers, copiers);
  }
};

}  // namespace mpicomm

// Bounds the registers: see team.cuh and experts_dispatch.cu.
extern "C" __global__ void __launch_bounds__(mpicomm::kDispatchThreads, 2)
    mpicomm_experts_dispatch_few(const __grid_constant__ mpicomm::Dispatch);

MPICOMM_KERNEL void mpicomm_experts_dispatch_few(const __grid_constant__ mpicomm::Dispatch x) {
  __shared__ mpicomm::Layout layout;
  __shared__ mpicomm::Headers headers;
  const mpicomm::Launch launch = mpicomm::this_launch(x.experts.team, mpicomm::kDispatches);
  if (blockIdx.x < x.experts.senders) {
    mpicomm::send(x, launch, layout, headers);
  } else if (mpicomm::begin_launch(x.experts, mpicomm::kDispatches, launch)) {
    mpicomm::FewReceiver{{{x, launch, layout}}, headers}.run();
  }
}
