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

// Returns the place of the calling thread. The answer never changes for a thread, hence `const`: the compiler may call
// it once.
__attribute__((const)) const Place& place();

// Lets other threads of the block run. All code that may wait for memory to change has to call it.
void yield();

// Waits until all threads of the block that have not returned have called it.
Tally meet_block(bool agrees);

// Waits until `threads` threads have called it with the same number, from 1 to 15. Unlike above, a thread that has
// returned does not count as one that has come. Returns whether all of them agreed.
bool meet_some(unsigned number, unsigned threads, bool agrees);

// Waits until all threads of the warp that are in `mask` have called it with the same mask. Only if `orders` is set, a
// thread sees afterwards the writes of the others before the call.
void meet_warp(unsigned mask, bool orders);

// Returns one word for each lane of the thread's warp, through which the lanes exchange values.
unsigned long long* warp_words();
// Returns the lanes of the thread's warp that have not returned.
unsigned live_lanes();

}  // namespace cpu
