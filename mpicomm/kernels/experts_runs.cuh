// Senders of experts share out the parts of rows, and publish them in runs. Few parts need no runs.
//
// Tickets. A warp begins with one run, and then takes the next run that no warp has, because some multiprocessors reach
// the links sooner than others. Its ticket is the number of runs that warps have taken before. Each launch clears the
// tickets of the next launch. The launch before, which used the same words, is over on this rank by then.
#pragma once

#include "experts.cuh"

namespace mpicomm {

// The parts that a warp has stored and has yet to publish. Each lane keeps one flag.
struct Unpublished {
  u64* flag = nullptr;

  // The most parts between two publications.
  MPICOMM_DEVICE static u32 most(const Team& team) { return kLanes / team.size < kMost ? kLanes / team.size : kMost; }
  // Adds part number `i` since the last publication, for the ranks in the set `targets`.
  MPICOMM_DEVICE void add(const Experts& x, u64 flags, u32 i, u32 targets, u32 recv_slot, u32 part, u32 lane) {
    const u32 rank = lane % x.team.size;
    if (lane / x.team.size == i && (targets >> rank & 1) != 0) {
      flag = flag_in(x, flags, rank, x.team.rank, recv_slot, part);
    }
  }
  // All lanes of the warp call it.
  MPICOMM_DEVICE void publish(const Launch& launch) {
    // Orders the stores of all lanes before the releases.
    __syncwarp();
    // Pairs with the acquire in `has_part` of the peer, and publishes the part. A plain store could
    // arrive before the data, and the peer would take the row of an earlier launch.
    if (flag != nullptr) store_release(flag, launch.number);
    flag = nullptr;
  }
  // Publishes the parts of all warps of a block, at most one part of each warp. All threads of the block call it.
  // `flags`, in shared memory, holds a flag of each warp and rank. Few warps wait for the stores of all warps,
  // because warps of one multiprocessor that wait for their stores delay each other.
  MPICOMM_DEVICE void publish_together(const Team& team, const Launch& launch, u64** flags) const {
    const u32 lane = threadIdx.x % kLanes;
    if (lane < team.size) flags[threadIdx.x / kLanes * team.size + lane] = flag;
    // Orders the stores of all threads, and the flags in shared memory, before the releases.
    __syncthreads();
    // Pairs with the acquire in `has_part`, as in `publish`.
    const bool has_flag = threadIdx.x < blockDim.x / kLanes * team.size;
    if (has_flag && flags[threadIdx.x] != nullptr) store_release(flags[threadIdx.x], launch.number);
  }

 private:
  static constexpr u32 kMost = 8;
};

// The parts of one kind of data, in runs of neighbouring parts. If `apart`, the runs that follow each other are of
// distant sections: a section for each warp. Otherwise all runs follow each other. The first runs are long, because
// each publication takes time. The last runs are short. Otherwise some warps would end late, and much data would wait
// for the last flags.
template <bool apart>
struct Runs {
  static constexpr u32 kLong = 14;  // sixteenths of a section

  u64 parts;
  u32 section;  // the parts of a section
  u32 warps;
  u32 length;   // of a long run
  u32 longs;    // the long runs of a section

  MPICOMM_DEVICE Runs(const Team& team, u64 parts, u32 warps)
      : parts(parts), section(static_cast<u32>(quotient(parts + warps - 1, warps))), warps(warps) {
    const u32 most = Unpublished::most(team);
    length = section <= most ? section : most;
    longs = section <= most ? 1 : section * kLong / 16 / most;
  }

  MPICOMM_DEVICE u32 shorter() const { return (length + 3) / 4; }
  MPICOMM_DEVICE u32 count() const {
    return section == 0 ? 0 : (longs + (section - longs * length + shorter() - 1) / shorter()) * warps;
  }
  MPICOMM_DEVICE u64 first(u32 number) const {
    const u32 nth = number / warps;
    const bool is_long = nth < longs;
    const u32 before = is_long ? nth * length : longs * length + (nth - longs) * shorter();
    const u64 in_turn = number - nth * warps;
    return apart ? in_turn * section + before : static_cast<u64>(before) * warps + in_turn * (is_long ? length : shorter());
  }
  // The number of parts of a run that begins with part `first`. It may be 0.
  MPICOMM_DEVICE u32 length_of(u32 number, u64 first) const {
    const u64 of_section = apart ? (number % warps + 1) * static_cast<u64>(section) : parts;
    const u64 end = of_section < parts ? of_section : parts;
    const u32 run = number < longs * warps ? length : shorter();
    return first >= end ? 0 : first + run < end ? run : static_cast<u32>(end - first);
  }
};

// The runs of a warp of a sender block.
template <bool apart>
struct RunsOfWarp {
  const Experts& x;
  const Launch& launch;
  const Runs<apart> runs;
  u32 number;      // of the next run; on lane 0, while a run lasts, without the first runs
  u32 length = 0;  // of this run
  u64 first = 0;

  // The first warps of all blocks come first, so few parts go to all multiprocessors.
  MPICOMM_DEVICE RunsOfWarp(const Experts& x, const Launch& launch, u64 parts)
      : x(x),
        launch(launch),
        runs(x.team, parts, x.senders * (blockDim.x / kLanes)),
        number(threadIdx.x / kLanes * x.senders + blockIdx.x) {}

  // Begins the next run that has parts. Returns false after the last run. All lanes of the warp call it.
  MPICOMM_DEVICE bool begin() {
    const u32 count = runs.count();
    while (number < count) {
      first = runs.first(number);
      length = runs.length_of(number, first);
      if (count <= runs.warps) {
        number = count;
      } else if (threadIdx.x % kLanes == 0) {
        // The result comes while the warp moves this run.
        number = atomicAdd(tickets(x, launch.parity(), kOfSenders), 1);
      }
      if (length != 0) return true;
      find_next();
    }
    return false;
  }
  MPICOMM_DEVICE bool begin_next() {
    find_next();
    return begin();
  }

 private:
  MPICOMM_DEVICE void find_next() {
    if (runs.count() > runs.warps) number = runs.warps + __shfl_sync(kWarp, number, 0);
  }
};

// Sends the parts of one kind of data by the warps of the sender blocks. Each warp publishes each of its runs.
//
// `prepare` loads a part, `ready` waits for the peers on all threads of the block, and `store` stores the
// part. The loads of the first part are in flight while the warp waits for the peers. If `prepare` only
// loads, the loads of other parts are in flight while the warp publishes. Otherwise flags come first.
template <bool apart, class Prepare, class Ready, class Store>
MPICOMM_DEVICE void each_run(
    const Experts& x, const Launch& launch, u64 parts, bool only_loads, Prepare prepare, Ready ready, Store store) {
  RunsOfWarp<apart> mine(x, launch, parts);
  bool goes_on = mine.begin();
  decltype(prepare(mine.first)) prepared;
  if (goes_on) prepared = prepare(mine.first);
  if (!ready()) return;
  Unpublished unpublished;
  u32 i = 0;
#pragma unroll 1
  while (goes_on) {
    store(prepared, i, unpublished);
    const bool ends = ++i == mine.length;
    if (ends) {
      goes_on = mine.begin_next();
      i = 0;
    }
    if (ends && !only_loads) unpublished.publish(launch);
    if (goes_on) prepared = prepare(mine.first + i);
    if (ends && only_loads) unpublished.publish(launch);
  }
}

// Sends part `unit`, if there is such a part, by each warp of the sender blocks. All threads of a block call it. It has
// the functions of `each_run`, and takes less time than runs of one part: a short launch waits for its code.
template <class Prepare, class Ready, class Store>
MPICOMM_DEVICE void send_at_most_one(
    const Team& team,
    const Launch& launch,
    u64 parts,
    u64 unit,
    Prepare prepare,
    Ready ready,
    Store store,
    u64** flags) {
  decltype(prepare(unit)) prepared;
  if (unit < parts) prepared = prepare(unit);
  if (!ready()) return;
  Unpublished unpublished;
  if (unit < parts) store(prepared, 0, unpublished);
  unpublished.publish_together(team, launch, flags);
}

}  // namespace mpicomm
