// Runs a block of CUDA threads on one thread of the operating system. Each CUDA thread is a fiber with its own stack.
// At every barrier, and at every access that orders memory, the block draws at random which fiber runs next.
//
// This file is compiled without ThreadSanitizer, which would otherwise watch the scheduler instead of the kernels. The
// file tells ThreadSanitizer of the fibers. A release and an acquire tell it of each order that CUDA promises: a
// barrier, and the end of a kernel before the next kernel. A mere change of fibers orders nothing.

#include "block.hpp"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "launch.hpp"

#if !defined(__x86_64__)
#error "switch_stacks is written only for x86-64"
#endif

// These functions exist only if ThreadSanitizer is linked.
extern "C" {
__attribute__((weak)) void* __tsan_create_fiber(unsigned);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void __tsan_switch_to_fiber(void*, unsigned);
__attribute__((weak)) void __tsan_acquire(void*);
__attribute__((weak)) void __tsan_release(void*);
}

// Pushes the registers that a call preserves, saves the stack pointer in *from, and goes on from the saved `to`.
extern "C" void switch_stacks(void** from, void* to);
asm(R"(
.text
.globl switch_stacks
.type switch_stacks, @function
switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size switch_stacks, .-switch_stacks
)");

namespace cpu {

unsigned mistake = 0;

namespace {

constexpr unsigned kWarp = 32;
// Kernels take less than 8 KiB. ThreadSanitizer takes more when it finds a race.
constexpr size_t kStackNbytes = 16 * 1024 + 5 * 64, kTsanStackNbytes = 128 * 1024 + 4096 + 5 * 64;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kGuardNbytes = 4096;
constexpr size_t kCacheLine = 64;
constexpr unsigned kSavedRegisters = 6;
constexpr unsigned kWithoutOrder = 1;  // a flag of __tsan_switch_to_fiber
constexpr unsigned kPatience = 1000;   // polls of each thread after which the block sleeps between further ones

thread_local Block* current = nullptr;

void acquire(char& word) {
  if (__tsan_acquire) __tsan_acquire(&word);
}
void release(char& word) {
  if (__tsan_release) __tsan_release(&word);
}

[[noreturn]] void die(const Block& block, const char* what) {
  fprintf(stderr, "rank %u, block %u: %s\n", block.rank, block.index, what);
  _exit(3);
}

}  // namespace

void sleep_us(unsigned us) {
  const timespec time{us / 1000000, static_cast<long>(us % 1000000) * 1000};
  nanosleep(&time, nullptr);
}

namespace {

std::vector<void*> made;  // fibers of ThreadSanitizer; they end with the process
std::atomic<size_t> taken{0};

void* tsan_fiber() {
  const size_t number = taken++;
  return number < made.size() ? made[number] : __tsan_create_fiber(0);
}

}  // namespace

void make_fibers(size_t count) {
  while (__tsan_create_fiber && made.size() < count) made.push_back(__tsan_create_fiber(0));
}

struct alignas(kCacheLine) Fiber {
  Place place;
  void* stack_pointer;  // in one line of the cache with the place
  void* tsan;
  bool at_block_barrier;
  unsigned meeting;  // the barrier of some threads at which it waits, 0 for none
  unsigned mask;  // of the lanes for which it waits
  unsigned long long word;  // that it brings to an exchange
  Words words;  // of the lanes at the last exchange
};

struct Warp {
  unsigned live, waiting;  // the lanes that have not returned, and the lanes that wait for others
  char sync;
};

Block::Block(unsigned rank, unsigned index, unsigned most_threads, char* launches, const Jitter& jitter, Clock& clock)
    : rank(rank),
      index(index),
      launches_(launches),
      jitter_(jitter),
      clock_(clock),
      next_turn_(clock.next_turn(rank, index)),
      random_((jitter.seed * 1000003ull + rank) * 1000003ull + index + 1),
      fibers_(most_threads),
      warps_((most_threads + kWarp - 1) / kWarp) {
  // One mapping for all stacks, as each mapping and each protected page takes the system long. The compiler refuses
  // functions with large frames (build.py), hence only endless recursion leaves a stack, and comes to the page below.
  stack_nbytes_ = __tsan_create_fiber ? kTsanStackNbytes : kStackNbytes;
  mapped_nbytes_ = (most_threads * stack_nbytes_ + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  mapped_ = mmap(nullptr, mapped_nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped_ == MAP_FAILED) die(*this, "no memory for stacks");
  const size_t first = (reinterpret_cast<size_t>(mapped_) + kGuardNbytes + kHugePage - 1) / kHugePage * kHugePage;
  stacks_ = reinterpret_cast<char*>(first);
  if (mprotect(stacks_ - kGuardNbytes, kGuardNbytes, PROT_NONE) != 0) die(*this, "no memory for stacks");
  // The block goes from stack to stack, and a processor has no room for the addresses of that many small pages.
  if (!__tsan_create_fiber) madvise(stacks_, mapped_nbytes_ - kHugePage, MADV_HUGEPAGE);
}

Block::~Block() { munmap(mapped_, mapped_nbytes_); }

void Block::run(const Launch& launch) {
  if (index >= launch.blocks) {
    ++launched_;
    return;
  }
  current = this;
  launch_ = &launch;
  if (one_in(16)) sleep_us(draw() % (jitter_.us + 1));
  for (Warp& warp : warps_) warp.live = warp.waiting = 0;
  live_ = launch.threads;
  for (unsigned thread = 0; thread < launch.threads; ++thread) prepare(thread);
  Fiber main{};
  main.tsan = __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr;
  main_ = running_ = &main;
  // Shared memory is created at the first access by a thread of the operating system. That must be this thread:
  // ThreadSanitizer would ascribe the memory to a fiber.
  launch.entry(nullptr);
  // Kernels of a rank follow each other: all threads of this kernel see the writes of the last one. Launches use two
  // words in turns, so that a late block learns nothing from a block of this kernel that has ended.
  acquire(launches_[launched_ % 2]);
  release(started_);
  leave();
  acquire(ended_);
  release(launches_[++launched_ % 2]);
}

void Block::prepare(unsigned thread) {
  const Launch& launch = *launch_;
  Fiber& fiber = fibers_[thread];
  if (__tsan_create_fiber && !fiber.tsan) fiber.tsan = tsan_fiber();
  fiber.place = {{thread, 0, 0}, {index, 0, 0}, {launch.threads, 1, 1}, {launch.blocks, 1, 1}};
  warps_[thread / kWarp].live |= 1u << thread % kWarp;
  // switch_stacks pops registers, whose values mean nothing here, and the address of the fiber's next instruction. A
  // function begins with its stack 8 bytes off a multiple of 16, as a call leaves it.
  void** const top = reinterpret_cast<void**>(stacks_ + (thread + 1) * stack_nbytes_);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&Block::begin);
  fiber.stack_pointer = top - 2 - kSavedRegisters;
  ready_.push_back(&fiber);
}

void Block::begin() {
  Block& block = *current;
  acquire(block.started_);
  block.launch_->entry(block.launch_->parameters.data());
  release(block.ended_);
  block.end();
}

void Block::end() {
  const unsigned thread = running_->place.thread.x, first = thread / kWarp * kWarp;
  Warp& warp = warp_of(*running_);
  warp.live &= ~(1u << thread % kWarp);
  --live_;
  idle_ = 0;
  release_block();
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (warp.waiting >> lane & 1) release_lanes(warp, first, fibers_[first + lane].mask);
  }
  leave();
}

// Runs another thread. Returns when a thread has chosen this one again.
void Block::leave() {
  Fiber* const self = running_;
  if (ready_.empty()) {
    if (live_ > 0) die(*this, "threads wait at barriers that others do not come to");
    running_ = main_;
  } else {
    const size_t chosen = next_ < ready_.size() ? next_ : draw() % ready_.size();
    running_ = ready_[chosen];
    ready_[chosen] = ready_.back();
    ready_.pop_back();
  }
  // The next thread is drawn ahead, so that its stack comes to the cache while this one runs. A thread that yields is
  // the last of those that are ready, and may go on.
  next_ = draw() % (ready_.size() + 1);
  if (next_ < ready_.size()) {
    const char* const stack = static_cast<const char*>(ready_[next_]->stack_pointer);
    for (unsigned line = 0; line < 3; ++line) __builtin_prefetch(stack + line * kCacheLine);
  }
  if (running_ == self) return;
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(running_->tsan, kWithoutOrder);
  switch_stacks(&self->stack_pointer, running_->stack_pointer);
}

void Block::yield() {
  // Every thread has polled once more, so the block may wait for another one: sched_yield lets that run. After many such
  // rounds the block sleeps, because a kernel that hangs by a deliberate mistake would take the processor from others.
  if (++idle_ % live_ == 0) {
    if (idle_ < kPatience * live_) {
      sched_yield();
    } else {
      sleep_us(kTickUs);
    }
  }
  if (one_in(4096)) sleep_us(draw() % (jitter_.us + 1));
  if (++yields_ >= live_) {
    yields_ = 0;
    have_turn();
  }
  ready_.push_back(running_);
  leave();
}

void Block::have_turn() {
  const unsigned long long tick = clock_.ticks;
  if (next_turn_ > tick) return;
  next_turn_ = tick + 1;
  end_tick(tick);
}

void Block::stay_away() {
  const unsigned long long tick = clock_.ticks;
  next_turn_ = kAway;
  end_tick(tick);
}

// Ends the tick if no block has a turn left in it.
void Block::end_tick(unsigned long long tick) {
  for (unsigned long long each = 0; each < clock_.ranks * clock_.blocks; ++each) {
    if (clock_.next_turns[each] <= tick) return;
  }
  if (clock_.ticks.compare_exchange_strong(tick, tick + 1) && tick >= clock_.most_ticks) die(*this, "hang: not over in time");
}

Tally Block::meet_block(bool agrees) {
  const unsigned turn = round_ % 2;
  release(syncs_[turn]);
  running_->at_block_barrier = true;
  ++tallies_[turn].arrived;
  tallies_[turn].agreed += agrees;
  release_block();
  leave();
  acquire(syncs_[turn]);
  return tallies_[turn];
}

// A thread that has returned counts as one that has come, as in PTX.
void Block::release_block() {
  const unsigned turn = round_ % 2;
  if (tallies_[turn].arrived == 0 || tallies_[turn].arrived < live_) return;
  ++round_;
  idle_ = 0;
  tallies_[round_ % 2] = {0, 0};
  for (unsigned thread = 0; thread < launch_->threads; ++thread) {
    Fiber& fiber = fibers_[thread];
    if (!fiber.at_block_barrier) continue;
    fiber.at_block_barrier = false;
    ready_.push_back(&fiber);
  }
}

bool Block::meet_some(unsigned number, unsigned threads, bool agrees) {
  if (number == 0 || number >= 16 || threads % kWarp != 0) die(*this, "there is no such barrier");
  Meeting& meeting = meetings_[number];
  const unsigned turn = meeting.round % 2;
  release(meeting.syncs[turn]);
  meeting.agreed[turn] = meeting.agreed[turn] && agrees;
  running_->meeting = number;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    meeting.agreed[++meeting.round % 2] = true;
    idle_ = 0;
    for (unsigned thread = 0; thread < launch_->threads; ++thread) {
      Fiber& fiber = fibers_[thread];
      if (fiber.meeting != number) continue;
      fiber.meeting = 0;
      ready_.push_back(&fiber);
    }
  }
  leave();
  acquire(meeting.syncs[turn]);
  return meeting.agreed[turn];
}

void Block::meet_warp(unsigned mask) {
  char& sync = warp_of(*running_).sync;
  release(sync);
  await_lanes(mask);
  acquire(sync);
}

const Words& Block::exchange(unsigned mask, unsigned long long word) {
  running_->word = word;
  await_lanes(mask);
  return running_->words;
}

void Block::await_lanes(unsigned mask) {
  const unsigned thread = running_->place.thread.x, lane = thread % kWarp;
  Warp& warp = warp_of(*running_);
  if ((mask >> lane & 1) == 0) die(*this, "a thread is not in its own mask");
  warp.waiting |= 1u << lane;
  running_->mask = mask;
  release_lanes(warp, thread - lane, mask);
  leave();
}

// Lets these lanes of a warp go on if all of them wait with this mask. A lane that has returned while others wait counts
// as one that has come. Each lane gets a copy of all words, because others may bring new words before it runs.
void Block::release_lanes(Warp& warp, unsigned first, unsigned mask) {
  const auto lanes = [&](auto act) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (mask >> lane & 1) act(lane, fibers_[first + lane]);
    }
  };
  mask &= warp.live;
  if ((mask & ~warp.waiting) != 0) return;
  bool complete = true;
  Words words{};
  lanes([&](unsigned lane, const Fiber& fiber) {
    complete = complete && (fiber.mask & warp.live) == mask;
    words.of[lane] = fiber.word;
    words.set |= static_cast<unsigned>(fiber.word != 0) << lane;
  });
  if (!complete) return;
  warp.waiting &= ~mask;
  lanes([&](unsigned, Fiber& fiber) {
    fiber.words = words;
    ready_.push_back(&fiber);
  });
}

Warp& Block::warp_of(const Fiber& fiber) { return warps_[fiber.place.thread.x / kWarp]; }

unsigned Block::draw() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return static_cast<unsigned>(random_ >> 16);
}

bool Block::one_in(unsigned chances) { return jitter_.us > 0 && draw() % chances == 0; }

const Place& place() { return current->running_->place; }
void yield() { current->yield(); }
unsigned long long clock_ns() { return current->clock_.ticks * kTickUs * 1000; }
Tally meet_block(bool agrees) { return current->meet_block(agrees); }
bool meet_some(unsigned number, unsigned threads, bool agrees) { return current->meet_some(number, threads, agrees); }
void meet_warp(unsigned mask) { current->meet_warp(mask); }
const Words& exchange(unsigned mask, unsigned long long word) { return current->exchange(mask, word); }
unsigned live_lanes() { return current->warp_of(*current->running_).live; }

}  // namespace cpu
