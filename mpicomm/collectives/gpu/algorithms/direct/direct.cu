// Stores messages straight to their places in symmetric memory of the peers. Without messages it is
// a barrier. Each rank launches one kernel. All ranks launch the same number of blocks. A barrier has
// a kernel of its own (MPICOMM_BARRIER), which compiles in half the time, because most of the code
// copies memory of any alignment.
//
// A rank stores to a peer after the peer has announced this launch (team.cuh). All work that the
// peer enqueued before is over then, so other ranks may write its memory. The message to a peer is
// cut into one part for each block. Block b stores its part, and then stores an arrival for block b
// of the peer. The kernel of a rank is over when its blocks have seen the arrivals of all parts for
// this rank.
//
// Why that cannot deadlock: a rank waits for nothing before it announces a launch. It waits only
// for the announcements of its peers before it stores parts and arrivals. Blocks of one rank do not
// wait for each other.

#include "ll_protocol.cuh"
#include "team.cuh"

namespace mpicomm {

// The host's copies of these constants and of Direct are in arguments.py; a test compares them.
constexpr u32 kDirectThreads = 512;  // the most threads of a block

// A message from one rank to another, cut into parts. Both ranks make the same cut, because it depends
// only on the length, and not on the place of the data. The host divides, because divisions are
// slow in the kernel.
struct Cut {
  u64 nbytes;
  u64 part;  // bytes of each block

  // The part of this block. The block has no part if `begin` is not before `end`.
  MPICOMM_DEVICE u64 begin() const { return blockIdx.x * part; }
  MPICOMM_DEVICE u64 end() const { return begin() + part < nbytes ? begin() + part : nbytes; }
  MPICOMM_DEVICE bool has_part() const { return begin() < end(); }
};

struct Direct {
  Team team;
  const u8* sends[kMaxRanks];  // the message to each rank, also to this rank
  u8* targets[kMaxRanks];      // the place of each message, as mapped on this rank
  Cut going[kMaxRanks];        // to each rank
  Cut coming[kMaxRanks];       // from each rank
  u64 arrivals;                // the offset of arrival words in every arena
  LLInboxes ll;
};

// The arrival word of this block in the arena of `owner`. `sender` stores the count of the launch
// there when its part is in the memory of `owner`. The count has 64 bits, because it also counts
// launches of other kernels, which do not write the word. A count of 32 bits could wrap around to
// an old count that is still in the word.
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
  // The previous kernel may still write memory that this kernel reads. And the announcement below
  // says that the previous kernel is over.
  wait_for_predecessor();
  let_successor_start();

  const u64 count = launches_of(team)[blockIdx.x] + 1;
  const u32 launch = static_cast<u32>(count);
  const bool has_peer = thread < team.size && thread != rank;
  Announcements ours{};
  if (has_peer) ours = load_sent_announcements(team, thread);
  // This load comes before the first use of a load above, because the whole warp waits there.
  Health health;
  if (thread == kMaxRanks) health = load_health(team);
  begin_round_of_flags(x.ll, launch);
  if (blockIdx.x == 0 && has_peer) announce_all_before(team, thread, launch);
  // After this barrier all threads have read the number of the launch, so count_launch may advance
  // it. Its stores arrive while the block waits for its peers. Before the announcement they would
  // delay its release, and later they would delay the end of the kernel.
  __syncthreads();
  count_launch(team, count, thread, blockDim.x);
  bool ok = true;
  if (has_peer) {
    // Pairs with the peer's release in announce_all_before: all work that the peer enqueued before
    // is over. Without the wait this rank could store to the peer's memory while an earlier kernel
    // there still reads it.
    Announcements theirs{};
    const auto absent = [&] {
      theirs = acquire_announcements(team, thread);
      return static_cast<i32>(theirs.last_launch() - launch) < 0 ? 1u << thread : 0u;
    };
    ok = await_ranks(team, launch, absent);
    if (ok && theirs.differ_from(ours, launch - 1)) ok = report_mismatch(team, thread, launch - 1);
    if (ok && compare_announcement(team, thread, launch, theirs.of(launch)) == kDifferent) {
      ok = report_mismatch(team, thread, launch);
    }
  }
  if (thread == kMaxRanks) ok = is_healthy(team, blockIdx.x, health);
  // Either all threads leave or none, because no thread may wait at a barrier for a thread that has
  // left.
  if (!__syncthreads_and(ok)) return;

#if !defined(MPICOMM_BARRIER)
  // The next rank comes first: see team.cuh. This rank itself comes last.
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
    // Pairs with the load_acquire of await_arrival in the same block of the peer. It publishes the
    // part, because the barrier above orders the stores of the whole block before this thread's
    // release. A plain store could arrive before the data, and the peer's next kernel would read
    // old memory. It has system scope, because the peer is another device.
    store_release(arrival_of(x, thread, rank), count);
  }
  if (x.coming[thread].has_part()) await_arrival(x, count, thread);
#endif
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh.
extern "C" __global__ void __launch_bounds__(mpicomm::kDirectThreads, 1)
    mpicomm_direct(const __grid_constant__ mpicomm::Direct);

MPICOMM_KERNEL void mpicomm_direct(const __grid_constant__ mpicomm::Direct direct) { mpicomm::run(direct); }
