// Kernels to launch, and the blocks that run them: the interface between launcher.cpp and block.cpp.
#pragma once

#include <atomic>
#include <vector>

#include "block.hpp"

namespace cpu {

struct Launch {
  void (*entry)(void* const* parameters);  // made by CPU_ENTRY in cuda.hpp
  std::vector<void*> parameters;           // their addresses
  unsigned blocks, threads;
  unsigned nap_us;  // the rank sleeps so long before it begins the kernel, so that it is late
};

// Random waits: now and then at the start of a block, rarely at a memory access. None if `us` is 0.
struct Jitter {
  unsigned long long seed;
  unsigned us;  // the longest
};

void sleep_us(unsigned us);

// Makes fibers of ThreadSanitizer for the blocks of this process and of its children, until there are so many.
void make_fibers(size_t count);

// The time of the kernels of all ranks, in memory that they share (machine.py has this layout). A tick is over when each
// block at work has had a turn, in which each of its threads has come to a memory access. A block that waits for another
// one polls once a turn. Hence a rank that gets no processor stops the time of all ranks, as one that sleeps does, and a
// limit in this time does not depend on the load of the machine.
struct Clock {
  std::atomic<unsigned long long> ticks, most_ticks, ranks, blocks;  // `blocks` of each rank, or fewer
  std::atomic<unsigned long long> next_turns[];  // the tick of the next turn of each block, or kAway

  std::atomic<unsigned long long>& next_turn(unsigned rank, unsigned block) { return next_turns[block * ranks + rank]; }
};
constexpr unsigned long long kAway = ~0ull;  // the block has no kernel to run, and the time does not wait for it
constexpr unsigned kTickUs = 200;  // as long as a block that has waited for long sleeps in a turn

struct Fiber;
struct Warp;

// A barrier of some threads of a block. As with the barrier of all, two rounds take turns.
struct Meeting {
  unsigned arrived = 0, round = 0;
  bool agreed[2]{true, true};
  char syncs[2]{};  // for ThreadSanitizer
};

// Runs block number `index` of each kernel that a rank launches.
class Block {
 public:
  // No kernel has more than `most_threads`. `launches` are two bytes that all blocks of the rank share. Their addresses
  // tell ThreadSanitizer of the order of kernels.
  Block(unsigned rank, unsigned index, unsigned most_threads, char* launches, const Jitter& jitter, Clock& clock);
  ~Block();
  Block(const Block&) = delete;

  // Returns when all threads of the block have returned, or at once if the kernel has fewer blocks.
  void run(const Launch& launch);

  // Lets the time go on without the block, which has no kernel.
  void stay_away();

  const unsigned rank, index;

 private:
  static void begin();
  void prepare(unsigned thread);
  void end();
  void leave();
  void yield();
  void have_turn();
  void end_tick(unsigned long long tick);
  Tally meet_block(bool agrees);
  bool meet_some(unsigned number, unsigned threads, bool agrees);
  void meet_warp(unsigned mask);
  const Words& exchange(unsigned mask, unsigned long long word);
  void await_lanes(unsigned mask);
  void release_block();
  void release_lanes(Warp& warp, unsigned first, unsigned mask);
  Warp& warp_of(const Fiber& fiber);
  unsigned draw();
  bool one_in(unsigned chances);

  friend const Place& place();
  friend void yield();
  friend unsigned long long clock_ns();
  friend Tally meet_block(bool);
  friend bool meet_some(unsigned, unsigned, bool);
  friend void meet_warp(unsigned);
  friend const Words& exchange(unsigned, unsigned long long);
  friend unsigned live_lanes();

  char* const launches_;
  const Jitter jitter_;
  Clock& clock_;
  std::atomic<unsigned long long>& next_turn_;
  unsigned long long random_;
  unsigned launched_ = 0;
  const Launch* launch_ = nullptr;
  std::vector<Fiber> fibers_;  // they stay from kernel to kernel; a kernel uses the first `threads`
  std::vector<Warp> warps_;
  void* mapped_;
  size_t mapped_nbytes_, stack_nbytes_;
  char* stacks_;  // of all fibers, one after the other
  std::vector<Fiber*> ready_;
  size_t next_ = 0;  // of those that are ready, or their number: see `leave`
  Fiber* running_ = nullptr;
  Fiber* main_ = nullptr;  // the caller of `run`
  unsigned live_ = 0;
  unsigned yields_ = 0;  // of this turn
  unsigned idle_ = 0;  // yields since the last barrier or the last return of a thread
  unsigned round_ = 0;  // of the block's barrier
  Tally tallies_[2]{};  // used in turns: the next round may begin before all threads have left this one
  char syncs_[2]{};     // likewise, for ThreadSanitizer
  Meeting meetings_[16];
  char started_ = 0, ended_ = 0;  // for ThreadSanitizer: all threads begin after the first, and end before the second
};

}  // namespace cpu
