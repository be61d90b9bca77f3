// The dispatch of a mixture of experts: every token goes once to each rank that has one of its
// experts, and is laid out there by expert. experts.cuh has the memory, and the reason why no rank
// waits in a circle.
//
// Senders store the routes of their tokens into the memory of all ranks, as packets of the LL
// protocol. So every rank knows the experts of all tokens. Then they push rows.
//
// Receivers lay out. The *pairs* of a token are its top_k slots. All pairs have an order: by the number
// of the token, then by source, then by slot. The places of an expert are its pairs in this order. So
// each range of pairs has pairs of all sources, and all blocks wait for the same peers. Each warp takes a
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
#include "experts_routes.cuh"
#include "experts_runs.cuh"

namespace mpicomm {

MPICOMM_DEVICE void send(const Dispatch& x, const Launch& launch, u64** flags) {
  const Experts& experts = x.experts;
  const Team& team = experts.team;
  const u32 lane = threadIdx.x % kLanes;
  Routes routes(x);
  const u64 begun = awaited(experts, launch, x.num_tokens);
  const auto wait = [&](u32 peer) { return await_begun(experts, kDispatch, launch, peer, begun); };
  const auto ready = [&] {
    if (!begin_launch(experts, kDispatches, launch, wait)) return false;
    const u32 epoch = static_cast<u32>(launch.number);
    if (blockIdx.x == 0 && threadIdx.x == 0) send_packet(experts, epoch, launch.parity(), x.num_tokens, 0);
    routes.send(launch);
    // Rows of this block leave after its routes. Otherwise the routes would wait in the links behind rows,
    // and receivers lay out nothing before they know all routes.
    __syncthreads();
    return true;
  };
  const auto prepare = [&](u64 unit) { return load_part(x, unit, lane); };
  const auto store = [&](const LoadedPart& loaded, u32 i, Unpublished& unpublished) {
    const Part range(experts, loaded.part, lane);
    const u32 peers = targets_of(x, loaded, lane) & ~(1u << team.rank);
    const u32 recv_slot = recv_slot_of(experts, launch, x.num_tokens, loaded.token);
    const auto store_row = [&](u8* row) { loaded.packets.store([&](u64 at) { return row + at; }, range); };
    each_row(experts, peers, recv_slot, store_row);
    unpublished.add(experts, experts.row_flags, i, peers, recv_slot, loaded.part, lane);
  };
  const u64 units = static_cast<u64>(x.num_tokens) * experts.parts;
  if (units <= static_cast<u64>(experts.senders) * kWarps) {
    // The first warps of all blocks come first, as in RunsOfWarp.
    const u64 unit = threadIdx.x / kLanes * experts.senders + blockIdx.x;
    send_at_most_one(team, launch, units, unit, prepare, ready, store, flags);
  } else {
    // Warps begin in distant places, so all receivers have work from the beginning.
    each_run<true>(experts, launch, units, true, prepare, ready, store);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) routes.renew(launch);
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh. Two blocks fit on a multiprocessor, so every device has room
// for a sender and a receiver.
extern "C" __global__ void __launch_bounds__(mpicomm::kDispatchThreads, 2)
    mpicomm_experts_dispatch(const __grid_constant__ mpicomm::Dispatch);

MPICOMM_KERNEL void mpicomm_experts_dispatch(const __grid_constant__ mpicomm::Dispatch x) {
  __shared__ mpicomm::Layout layout;
  __shared__ mpicomm::u64* flags[mpicomm::kWarps * mpicomm::kMaxRanks];
  const mpicomm::Launch launch = mpicomm::this_launch(x.experts.team, mpicomm::kDispatches);
  if (blockIdx.x < x.experts.senders) {
    mpicomm::send(x, launch, flags);
  } else if (mpicomm::begin_launch(x.experts, mpicomm::kDispatches, launch)) {
    mpicomm::Receiver{{x, launch, layout}}.run();
  }
}
