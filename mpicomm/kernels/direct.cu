// Moves data straight to where it belongs in the memory of the peers, which is symmetric, and is a barrier where there
// is no data. Each rank launches one kernel, with as many blocks as the others.
//
// A rank stores to a peer once that has announced this launch: what it enqueued before is over then, so that its memory
// may be written. What goes to a peer is cut into a part for each block, and that into chunks. Block b stores its chunk
// and tells block b of the peer that it has, which may send it on: relays. The kernel of a rank is over when all of its
// blocks have been told of all that comes.
//
// Why that cannot deadlock: announcements wait for nothing, arrivals of a rank's own data for announcements alone, and
// what is sent on for an arrival, whose sender does not wait for relays: who relays to a rank takes nothing from it.
// Blocks of one rank do not wait for each other.

#include "team.cuh"

namespace mpicomm {

// The host's copies of these constants and of Direct are in direct.py; a test compares them.
constexpr u32 kDirectThreads = 512;  // of a block, at most

// What goes one way between two ranks, as both of them cut it: it depends on nothing else, not on where the data lies.
// The host divides, which would take the kernel a microsecond.
struct Cut {
  u64 nbytes;
  u64 part;   // of a block
  u64 chunk;  // of a part
};

struct Direct {
  Team team;
  const u8* sends[kMaxRanks];  // what goes to each rank, and what this one keeps
  u8* targets[kMaxRanks];      // where it goes, as mapped here
  Cut going[kMaxRanks];
  Cut coming[kMaxRanks];  // from each rank
  u64 arrivals;           // where they begin in every arena
  u32 chunks;             // of a part, at most
  u32 source;             // of what is sent on: who stores it here
  u32 relays;             // to whom it is sent on, bit r for rank r; their `sends` say where it comes to lie
  u32 unused;
};

// What is said of a chunk that has been stored: {launch, how many have been}. `sender` says it to `owner`.
MPICOMM_DEVICE u64* arrival_of(const Direct& x, u32 owner, u32 sender) {
  return reinterpret_cast<u64*>(x.team.arenas[owner] + x.arrivals) + sender * kMaxBlocks + blockIdx.x;
}

// A chunk of this block's part; where it does not begin before it ends there is none.
struct Chunk {
  u64 begin;
  u64 end;

  MPICOMM_DEVICE Chunk(const Cut& cut, u32 number) {
    const u64 part_end = (blockIdx.x + 1) * cut.part, limit = part_end < cut.nbytes ? part_end : cut.nbytes;
    begin = blockIdx.x * cut.part + number * cut.chunk;
    end = begin + cut.chunk < limit ? begin + cut.chunk : limit;
  }
  MPICOMM_DEVICE bool exists() const { return begin < end; }
};

MPICOMM_DEVICE bool await_arrival(const Direct& x, u32 launch, u32 sender, u32 number) {
  const auto absent = [&] {
    const u64 word = load_acquire(arrival_of(x, x.team.rank, sender));
    const i32 ahead = static_cast<i32>(static_cast<u32>(word >> 32) - launch);  // signed, as numbers wrap
    return ahead > 0 || (ahead == 0 && static_cast<u32>(word) > number) ? 0u : 1u << sender;
  };
  return await_ranks(x.team, launch, absent);
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
  if (has_peer) ours = load_announcements(team, rank);
  // Before anything depends on one of the loads above, which a warp waits for as a whole.
  Health health;
  if (thread == kMaxRanks) health = load_health(team);
  if (blockIdx.x == 0 && thread < team.size) announce_all_before(team, thread, launch);
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
    if (ok && look_at(team, thread, launch) == kDifferent) ok = refuse(team, thread, launch);
  }
  if (thread == kMaxRanks) ok = is_healthy(team, blockIdx.x, health);
  // All leave or none: and all have read their number before it is advanced.
  if (!__syncthreads_and(ok)) return;
  count_launch(team, count, thread, blockDim.x);

  for (u32 number = 0; number < x.chunks; ++number) {
    // Each rank begins with the one after it, so that at any time each is written to by one.
    for (u32 distance = 1; distance <= team.size; ++distance) {
      const u32 to = (rank + distance) % team.size;
      const Chunk chunk(x.going[to], number);
      if (!chunk.exists() || x.relays >> to & 1) continue;
      copy_bytes(x.targets[to] + chunk.begin, x.sends[to] + chunk.begin, chunk.end - chunk.begin, thread, blockDim.x);
    }
    const Chunk relayed(x.coming[x.source], number);
    if (relayed.exists() && x.relays != 0) {
      // Pairs with the store_release below at the source. The other threads are ordered after this one by the barrier.
      const bool arrived = thread != 0 || await_arrival(x, launch, x.source, number);
      if (!__syncthreads_and(arrived)) return;
      for (u32 distance = 1; distance < team.size; ++distance) {
        const u32 to = (rank + distance) % team.size;
        if (!(x.relays >> to & 1)) continue;
        copy_bytes(x.targets[to] + relayed.begin, x.sends[to] + relayed.begin, relayed.end - relayed.begin, thread,
                   blockDim.x);
      }
    }
    __syncthreads();
    if (has_peer && Chunk(x.going[thread], number).exists()) {
      // Pairs with the load_acquire of await_arrival in the same block of the peer, and publishes what this block has
      // stored there, which this thread has seen stored at the barrier. A plain store could arrive before the data, and
      // the peer would send on, or its next kernel read, what was there before. System scope, the peer being another
      // device.
      store_release(arrival_of(x, thread, rank), static_cast<u64>(launch) << 32 | (number + 1));
    }
  }
  if (has_peer) {
    u32 coming = 0;
    while (coming < x.chunks && Chunk(x.coming[thread], coming).exists()) ++coming;
    if (coming > 0) await_arrival(x, launch, thread, coming - 1);
  }
}

}  // namespace mpicomm

// Bounds the registers, so that a block always fits: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kDirectThreads, 1)
    mpicomm_direct(const __grid_constant__ mpicomm::Direct);

MPICOMM_KERNEL void mpicomm_direct(const __grid_constant__ mpicomm::Direct direct) { mpicomm::run(direct); }
