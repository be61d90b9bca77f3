// What a CUDA thread asks of the block that runs it. cuda.hpp gives these the names they have in CUDA.
#pragma once

namespace cpu {

struct Index {
  unsigned x, y, z;
};

struct Place {
  Index thread, block, threads, blocks;
};

// What came together at a barrier of the block.
struct Tally {
  unsigned arrived, agreed;
};

// For the thread that asks always the same, hence const: the compiler need not ask twice.
__attribute__((const)) const Place& place();

// Lets other threads of the block run. Everything that may wait for memory to change has to call it.
void yield();

// Waits until all threads of the block that have not returned are here.
Tally meet_block(bool agrees);

// Waits until all threads of the warp that are in `mask` are here with the same mask.
void meet_warp(unsigned mask);

// One for each lane of the thread's warp, for what a warp exchanges.
unsigned long long* warp_words();
// The lanes of the thread's warp that have not returned.
unsigned live_lanes();

}  // namespace cpu
