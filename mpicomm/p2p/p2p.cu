// The kernels of `python -m mpicomm.p2p`: one holds a stream, one copies, and two time single
// stores and loads.
//
// Every spin ends after a limit, because the GPU or the rank at the other side may never come.

#include "bytes.cuh"

namespace mpicomm {

// The host's copies of these structures and constants are in kernels.py; a test compares them.
constexpr u32 kCopyThreads = 512;
constexpr u32 kOver = ~0u;  // in place of the number of a round: there is no further round

struct Gate {
  const u32* released;
  u64 limit_ns;
};

struct Copying {
  u8* target;
  const u8* source;
  u64 nbytes;
};

// A word goes to and fro between two kernels, of two GPUs or of one. Both words are 0 at first.
struct PingPong {
  const u32* mine;  // the other kernel stores here
  u32* theirs;      // this kernel stores here
  u64* result;      // nanoseconds and rounds, stored by the kernel that serves; two zeros if no answer comes
  u64 budget_ns;    // the time that all rounds may take, about
  u64 limit_ns;     // the time that a kernel waits for the other one
  u32 rounds;
  u32 serves;
};

// Loads in a chain: each load waits for the one before.
struct PointerChase {
  const u64* word;  // 0
  u64* result;      // nanoseconds and loads
  u32 loads;
};

// Returns the first value of a word that is not `before`, or `before` when time is up.
//
// The accesses are relaxed, because the two kernels exchange no other data than the word itself.
MPICOMM_DEVICE u32 next_value(const u32* word, u32 before, u64 limit_ns) {
  const u64 begin = clock_ns();
  for (u32 polls = 1;; ++polls) {
    const u32 value = load_relaxed(word);
    // A read of the clock takes longer than a poll, so most polls do without it.
    if (value != before || (polls % 1024 == 0 && clock_ns() - begin > limit_ns)) return value;
  }
}

MPICOMM_DEVICE void serve(const PingPong& x) {
  u64 begin = 0, now = 0;
  u32 round = 0;  // round 0 is not timed, because the kernels meet in it
  for (;; ++round) {
    store_relaxed(x.theirs, round + 1);
    if (next_value(x.mine, round, x.limit_ns) == round) {
      now = begin;
      round = 0;
      break;
    }
    if (round == 0) begin = clock_ns();
    // A read of the clock in each round would add to its time.
    if (round == x.rounds || round % 32 == 31) now = clock_ns();
    if (round == x.rounds || (round % 32 == 31 && now - begin > x.budget_ns)) break;
  }
  // This store follows a failure, too, so that a late kernel ends as soon as it comes.
  store_relaxed(x.theirs, kOver);
  x.result[0] = now - begin;
  x.result[1] = round;
}

MPICOMM_DEVICE void answer(const PingPong& x) {
  for (u32 last = 0;;) {
    const u32 value = next_value(x.mine, last, x.limit_ns);
    if (value == last || value == kOver) return;
    store_relaxed(x.theirs, value);
    last = value;
  }
}

}  // namespace mpicomm

// Holds its stream until the host has enqueued all later work. So the timed work contains
// no time of the host.
MPICOMM_KERNEL void mpicomm_p2p_gate(const __grid_constant__ mpicomm::Gate x) {
  const mpicomm::u64 begin = mpicomm::clock_ns();
  while (mpicomm::load_volatile(x.released) == 0 && mpicomm::clock_ns() - begin < x.limit_ns) mpicomm::pause();
}

extern "C" __global__ void __launch_bounds__(mpicomm::kCopyThreads)
    mpicomm_p2p_copy(const __grid_constant__ mpicomm::Copying);

MPICOMM_KERNEL void mpicomm_p2p_copy(const __grid_constant__ mpicomm::Copying x) {
  const mpicomm::u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  mpicomm::copy_bytes(x.target, x.source, x.nbytes, thread, gridDim.x * blockDim.x);
}

MPICOMM_KERNEL void mpicomm_p2p_ping_pong(const __grid_constant__ mpicomm::PingPong x) {
  if (x.serves) {
    mpicomm::serve(x);
  } else {
    mpicomm::answer(x);
  }
}

MPICOMM_KERNEL void mpicomm_p2p_pointer_chase(const __grid_constant__ mpicomm::PointerChase x) {
  const mpicomm::u64* at = x.word + mpicomm::load_volatile(x.word);  // the first load may have to fetch a translation
  const mpicomm::u64 begin = mpicomm::clock_ns();
  // Each load gives the address of the next load: the same address, which the compiler cannot know.
  for (mpicomm::u32 load = 0; load < x.loads; ++load) at += mpicomm::load_volatile(at);
  x.result[0] = mpicomm::clock_ns() - begin + (at - x.word);
  x.result[1] = x.loads;
}
