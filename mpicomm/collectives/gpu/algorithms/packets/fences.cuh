// Fences for threads that have no time for one: it takes two microseconds, in which its warp stores nothing. So threads
// that move data ("workers") say how far they are, a warp that moves none ("overseers") has a fence for them, and only
// turns later do they look whether that is over: as a rule it is.
//
//     worker                                   overseer
//     ... = data                               while (load_acquire_in_block(done) < turns) {}
//     store_release_in_block(done, turns)      fence_slots()
//     (turns that need no fence)               store_release_in_block(fenced, turns)
//     while (load_acquire_in_block(fenced) < turns) {}
//     peer's memory = ...
//
// The fence is cumulative: what the overseer has seen a worker do comes before all that is done by who has seen that the
// fence is over. Its scope is told by where slots lie, see packets.cu. Neither wait needs a bound: workers that do not
// come wait for their peers, which has one, and then say that they have left.
#pragma once

#include "memory_order.cuh"

namespace mpicomm {

// Of a block with a warp of overseers. In the arena, though it is the block's alone: a racecheck takes words of shared
// memory that order others for a race themselves.
struct Fences {
  static constexpr u32 kMostWorkers = 736;
  static constexpr u32 kLeft = ~0u;

  u32 done[kMostWorkers];  // turns of each worker, as it last said
  u32 fenced[kLanes];  // turns that each overseer has had a fence for: those of workers with its number modulo kLanes

  // By every thread, before a barrier of the block: what the last launch left here would else be taken for turns of this.
  MPICOMM_DEVICE void begin(u32 thread, u32 workers) {
    if (thread < workers) {
      done[thread] = 0;
    } else {
      fenced[thread - workers] = 0;
    }
  }

  // By a worker, which has done so many turns, or `kLeft`.
  MPICOMM_DEVICE void say(u32 worker, u32 turns) { store_release_in_block(&done[worker], turns); }

  // By a worker: returns when a fence has followed all that it did in so many turns.
  MPICOMM_DEVICE void await(u32 worker, u32 turns) const {
    while (load_acquire_in_block(&fenced[worker % kLanes]) < turns) {
    }
  }

  // By each overseer: a fence whenever its workers have done another `period` turns, up to `last`.
  MPICOMM_DEVICE void serve(u32 overseer, u32 workers, u32 period, u32 last) {
    for (u32 turns = period; turns <= last; turns += period) {
      for (u32 worker = overseer; worker < workers; worker += kLanes) {
        while (load_acquire_in_block(&done[worker]) < turns) pause();  // what looks on and on slows the workers down
      }
      __syncwarp(kWarp);  // one fence for all: overseers that come one by one would have one after the other
      fence_slots();
      store_release_in_block(&fenced[overseer], turns);
    }
  }
};

}  // namespace mpicomm
