// The functions by which a CUDA thread uses the block that runs it. cuda.hpp gives them their CUDA names.
#pragma once

namespace cpu {

struct Index {
  unsigned x, y, z;
};

struct Place {
  Index thread, block, threads, blocks;
};

// The number of threads that came to a barrier of the block, and the number that agreed.
struct Tally {
  unsigned arrived, agreed;
};

// The words that lanes of a warp brought to an exchange, and the lanes whose word is not 0.
struct Words {
  unsigned long long of[32];
  unsigned set;
};

// Returns the place of the calling thread. The answer never changes for a thread, hence `const`: the compiler may call
// it once.
__attribute__((const)) const Place& place();

// Lets other threads of the block run. All code that may wait for memory to change has to call it.
void yield();

// Returns the time of the kernels: see Clock in launch.hpp.
unsigned long long clock_ns();

// Waits until all threads of the block that have not returned have called it.
Tally meet_block(bool agrees);

// Waits until `threads` threads have called it with the same number, from 1 to 15. Unlike above, a thread that has
// returned does not count as one that has come. Returns whether all of them agreed.
bool meet_some(unsigned number, unsigned threads, bool agrees);

// Waits until all threads of the warp that are in `mask` have called it with the same mask.
void meet_warp(unsigned mask);

// Does so, too, and returns the words that these lanes brought. Unlike above, a thread need not see what the others
// have written before.
const Words& exchange(unsigned mask, unsigned long long word);

// Returns the lanes of the thread's warp that have not returned.
unsigned live_lanes();

// The number of the mistake that kernels make, 0 for none: see `Change` in build.py.
extern unsigned mistake;

}  // namespace cpu
