// Moves data straight to where it belongs in the memory of the peers, which is symmetric, and is a barrier where there
// is no data. Each rank launches one kernel, with as many blocks as the others.
//
// A rank stores to a peer once that has announced this launch: what it enqueued before is over then, so that its memory
// may be written. What goes to a peer is cut into a part for each block. Block b stores its part and tells block b of the
// peer that it has. The kernel of a rank is over when all of its blocks have been told of all that comes.
//
// Why that cannot deadlock: announcements wait for nothing, and arrivals for announcements alone. Blocks of one rank do
// not wait for each other.

#include "ll_flags.cuh"
#include "team.cuh"

namespace mpicomm {

// The host's copies of these constants and of Direct are in arguments.py; a test compares them.
constexpr u32 kDirectThreads = 512;  // of a block, at most

// What goes one way between two ranks, as both of them cut it: it depends on nothing else, not on where the data lies.
// The host divides, which would take the kernel a microsecond.
struct Cut {
  u64 nbytes;
  u64 part;  // of a block

  // That of this block; where it does not begin before it ends there is none.
  MPICOMM_DEVICE u64 begin() const { return blockIdx.x * part; }
  MPICOMM_DEVICE u64 end() const { return begin() + part < nbytes ? begin() + part : nbytes; }
  MPICOMM_DEVICE bool has_part() const { return begin() < end(); }
};

struct Direct {
  Team team;
  const u8* sends[kMaxRanks];  // what goes to each rank, and what this one keeps
  u8* targets[kMaxRanks];      // where it goes, as mapped here
  Cut going[kMaxRanks];
  Cut coming[kMaxRanks];  // from each rank
  u64 arrivals;           // where they begin in every arena
  FlaggedInboxes flagged;
};

// What `sender` says to `owner` of a part that it has stored there: the count of the launch, whole. Other launches are
// counted too and say nothing here, so that numbers of 32 bits could come again while the word stays as it is.
MPICOMM_DEVICE u64* arrival_of(const Direct& x, u32 owner, u32 sender) {
  return reinterpret_cast<u64*>(x.team.arenas[owner] + x.arrivals) + sender * kMaxBlocks + blockIdx.x;
}

MPICOMM_DEVICE bool await_arrival(const Direct& x, u64 count, u32 sender) {
  const auto absent = [&] { return load_acquire(arrival_of(x, x.team.rank, sender)) >= count ? 0u : 1u << sender; };
  return await_ranks(x.team, static_cast<u32>(count), absent);
}

MPICOMM_DEVICE void run(const Direct& x) {
  const Team& team = x.team;
  const u32 rank = team.rank, thread = threadIdx.x;
  // Everything before may lie in memory that the kernel ahead still writes, and is not over until that is.
  wait_for_predecessor();
  let_successor_start();

  const u64 count = launches_of(team)[blockIdx.x] + 1;
  const u32 launch = static_cast<u32>(count);
  const bool has_peer = thread < team.size && thread != rank;
  Announcements ours{};
  if (has_peer) ours = load_said(team, thread);
  // Before anything depends on one of the loads above, which a warp waits for as a whole.
  Health health;
  if (thread == kMaxRanks) health = load_health(team);
  begin_round_of_flags(x.flagged, launch);
  if (blockIdx.x == 0 && has_peer) announce_all_before(team, thread, launch);
  bool ok = true;
  if (has_peer) {
    // All that was enqueued there before is over. Without it the peer's memory would be written while a kernel ahead
    // still reads it.
    Announcements theirs{};
    const auto absent = [&] {
      theirs = acquire_announcements(team, thread);
      return static_cast<i32>(theirs.last_launch() - launch) < 0 ? 1u << thread : 0u;
    };
    ok = await_ranks(team, launch, absent);
    if (ok && theirs.differ_from(ours, launch - 1)) ok = refuse(team, thread, launch - 1);
    if (ok && judge(team, thread, launch, theirs.of(launch)) == kDifferent) ok = refuse(team, thread, launch);
  }
  if (thread == kMaxRanks) ok = is_healthy(team, blockIdx.x, health);
  // All leave or none: and all have read their number before it is advanced.
  if (!__syncthreads_and(ok)) return;
  count_launch(team, count, thread, blockDim.x);

  // Each rank begins with the one after it, so that at any time each is written to by one.
  for (u32 distance = 1; distance <= team.size; ++distance) {
    const u32 to = (rank + distance) % team.size;
    const Cut& cut = x.going[to];
    if (!cut.has_part()) continue;
    const u64 begin = cut.begin();
    copy_bytes(x.targets[to] + begin, x.sends[to] + begin, cut.end() - begin, thread, blockDim.x);
  }
  __syncthreads();
  if (!has_peer) return;
  if (x.going[thread].has_part()) {
    // Pairs with the load_acquire of await_arrival in the same block of the peer, and publishes what this block has
    // stored there, which this thread has seen stored at the barrier. A plain store could arrive before the data, and
    // the peer's next kernel read what was there before. System scope, the peer being another device.
    store_release(arrival_of(x, thread, rank), count);
  }
  if (x.coming[thread].has_part()) await_arrival(x, count, thread);
}

}  // namespace mpicomm

// Bounds the registers, so that a block always fits: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kDirectThreads, 1)
    mpicomm_direct(const __grid_constant__ mpicomm::Direct);

MPICOMM_KERNEL void mpicomm_direct(const __grid_constant__ mpicomm::Direct direct) { mpicomm::run(direct); }
