// Fences for threads that have no time for a fence. A fence takes microseconds, in which its warp
// stores nothing. So the worker threads, which move data, only publish how many turns they have done.
// The overseer warp of the block moves no data and executes a fence for them. The workers check
// some turns later whether the fence is over. Usually it is.
//
//     worker                                   overseer
//     ... = data                               while (load_acquire_in_block(done) < turns) {}
//     store_release_in_block(done, turns)      fence_slots()
//     (turns that need no fence)               store_release_in_block(fenced, turns)
//     while (load_acquire_in_block(fenced) < turns) {}
//     peer's memory = ...
//
// The fence is cumulative. The overseer acquires `done`, so its fence covers the worker's stores
// before the release of `done`. The worker acquires `fenced`, so its later stores come after the
// fence. With a plain access to `done`, the fence could miss resets of slots. With a plain access
// to `fenced`, the worker's next packets could overtake the fence. See the top of packets.cu.
//
// fence_slots (memory_order.cuh) explains the scope of the fence. Neither wait needs a time limit.
// A late worker waits for its peers, and that wait has a limit. A worker that breaks off publishes
// that it has left.
#pragma once

#include "memory_order.cuh"

namespace mpicomm {

// The words of one block with a warp of overseers. Only the block uses them. Still they lie in the
// arena, because racecheck reports words of shared memory that order other accesses as races.
struct Fences {
  static constexpr u32 kMostWorkers = 736;
  static constexpr u32 kLeft = ~0u;

  u32 done[kMostWorkers];  // the turns that each worker has done, by its last word
  u32 fenced[kLanes];      // the turns before each overseer's last fence; worker w has overseer w % kLanes

  // Every thread calls this before a barrier of the block. Without it the threads would take the
  // words of the previous launch for turns of this launch.
  MPICOMM_DEVICE void begin(u32 thread, u32 workers) {
    if (thread < workers) {
      done[thread] = 0;
    } else {
      fenced[thread - workers] = 0;
    }
  }

  // A worker publishes that it has done `turns` turns, or that it has left (`kLeft`). Pairs with the
  // load in `serve`.
  MPICOMM_DEVICE void publish(u32 worker, u32 turns) { store_release_in_block(&done[worker], turns); }

  // A worker waits for a fence after its first `turns` turns. Pairs with the store of `fenced` in
  // `serve`.
  MPICOMM_DEVICE void await(u32 worker, u32 turns) const {
    while (load_acquire_in_block(&fenced[worker % kLanes]) < turns) {
    }
  }

  // An overseer executes a fence whenever its workers have done another `period` turns, up to turn
  // `last`.
  MPICOMM_DEVICE void serve(u32 overseer, u32 workers, u32 period, u32 last) {
    for (u32 turns = period; turns <= last; turns += period) {
      for (u32 worker = overseer; worker < workers; worker += kLanes) {
        while (load_acquire_in_block(&done[worker]) < turns) pause();  // because constant polls slow the workers down
      }
      __syncwarp(kWarp);  // the lanes fence at once; without this each lane would execute a separate fence
      fence_slots();
      store_release_in_block(&fenced[overseer], turns);
    }
  }
};

}  // namespace mpicomm
