// One exchange: every rank sends to every rank, and places or reduces what it receives. Each rank launches one kernel.
//
// Channels. Block b of a rank talks to block b of each other rank and to no other block: a pair of ranks and a block
// number are a channel, with `kSlots` slots in the receiver's memory, a flag for each in its arena and a word for credit in the
// sender's arena. A channel carries its part of the message in chunks, first in first out. Chunks are counted for ever,
// by epochs: chunk e lies in slot e % kSlots, its flag is {e, tag of the call}, and credit {e} says that the receiver
// is done with chunk e. Both sides of a channel keep their count of it in their own memory and the kernel advances it,
// so a captured graph can be replayed for ever, and nothing is reset or agreed on between two exchanges.
//
//     sender                                             receiver
//     while (load_acquire(credit) < e - kSlots) {}       while (load_acquire(flag) < e) {}
//     __syncthreads()                                    __syncthreads()
//     slot = chunk (all threads)                         ... = slot (all threads)
//     __syncthreads()                                    __syncthreads()
//     store_release(flag, e)                             store_release(credit, e)
//
// Steps. In step k a block waits, sends chunk k to each rank that gets one, this one too, takes chunk k - 1 from each
// other that sends one, and then raises its flags and gives its credit.
//
// Chunks. A release waits until all that was stored has arrived. That takes more than a microsecond, in which the links
// are idle, as all blocks are about as far: chunks are large, so that it comes seldom.
//
// Why that cannot deadlock. In step k a block waits for flags of chunks k - 1, which the same block of a peer raises at
// the end of its step k - 1, and for credit of chunks k - kSlots, which that gives at the end of its step
// k - kSlots + 1: not later than step k - 1, as kSlots >= 2. Of all blocks of all ranks that are not done, look at one
// with the smallest step in the earliest exchange (both are counted alike on all ranks). Its kernel has begun: on its
// rank all of earlier exchanges is done. All it waits for belongs to smaller steps or earlier exchanges, and is done:
// so it goes on. That needs all blocks of a kernel to run at once, or it might be the one that waits for a
// multiprocessor: the host launches at most as many blocks as the smallest device has multiprocessors. (Kernels of two
// communicators may still keep each other out of a small device; then time runs out and both say so.)
//
// Why `own` may be the output. Where the memory that is sent is the output of the reduction, it is as long as what
// everybody sends here, so its bytes are cut into the same channels and chunks: the block that writes a piece has sent
// it, to all, in an earlier step, and has read its own contribution in the thread that writes the result.

#include "channel_words.cuh"
#if defined(MPICOMM_DTYPE)
#include "reduce_bytes.cuh"
#endif

namespace mpicomm {

// The host's copies of these constants and structures are in arguments.py; a test compares them.
constexpr u32 kThreads = 512;
constexpr u32 kSlots = 2;

// What goes to, or comes from, one rank; all of a channel's part lies at [channel * stride, (channel + 1) * stride).
struct Link {
  u8* pointer;  // of what is received: null where it is reduced
  u64 nbytes;
  u64 stride;
  u32 tag;
  u32 unused;
};

struct Exchange {
  Team team;
  Link sends[kMaxRanks];
  Link receives[kMaxRanks];
  const u8* own;
  u8* output;
  u64 counts;  // where they begin in every arena
  u64 credits;
  u64 flags;
  u8* slots[kMaxRanks];  // every rank's, as mapped here
  u64 slot_nbytes;       // whole cache lines
  u32 channels;  // that an arena has
  u32 num_sources;
  u32 sources[kMaxRanks];  // in the order of the reduction, own among them
};

// Bytes of a message.
struct Range {
  u64 begin;
  u64 nbytes;
};

// The part of a link that one channel carries.
struct Part {
  u64 begin;
  u64 nbytes;
  u32 chunks;
  u32 epoch;  // of the last chunk before this kernel

  MPICOMM_DEVICE Range chunk(u32 number, u64 slot_nbytes) const {
    const u64 at = number * slot_nbytes;
    return {begin + at, nbytes - at < slot_nbytes ? nbytes - at : slot_nbytes};
  }
};

MPICOMM_DEVICE Part part_of(const Link& link, u32 channel, u64 slot_nbytes) {
  const u64 begin = channel * link.stride;
  if (begin >= link.nbytes) return {0, 0, 0, 0};
  const u64 nbytes = link.nbytes - begin < link.stride ? link.nbytes - begin : link.stride;
  return {begin, nbytes, static_cast<u32>((nbytes + slot_nbytes - 1) / slot_nbytes), 0};
}

// Strides depend on the arena alone: were they those of the message, chunks of two messages could overlap.
MPICOMM_DEVICE u8* slot_of(const Exchange& exchange, u32 owner, u32 sender, u32 channel, u32 epoch) {
  const u64 number = (static_cast<u64>(sender) * exchange.channels + channel) * kSlots + epoch % kSlots;
  return exchange.slots[owner] + number * exchange.slot_nbytes;
}
MPICOMM_DEVICE u64* flag_of(const Exchange& exchange, u32 owner, u32 sender, u32 channel, u32 epoch) {
  const u64 line = static_cast<u64>(sender) * exchange.channels + channel;
  return reinterpret_cast<u64*>(exchange.team.arenas[owner] + exchange.flags + line * kLineNbytes) + epoch % kSlots;
}
MPICOMM_DEVICE u64* credit_of(const Exchange& exchange, u32 owner, u32 receiver, u32 channel) {
  const u64 line = static_cast<u64>(receiver) * exchange.channels + channel;
  return reinterpret_cast<u64*>(exchange.team.arenas[owner] + exchange.credits + line * kLineNbytes);
}

#if defined(MPICOMM_DTYPE)
// Where a chunk of each source lies, and how much of it there is.
struct Chunk {
  const Exchange& exchange;
  const Part* parts;
  u32 number;
  Range range;

  MPICOMM_DEVICE const u8* of(u32 source) const {
    if (source == exchange.team.rank) return exchange.own + range.begin;
    return slot_of(exchange, exchange.team.rank, source, blockIdx.x, parts[source].epoch + number + 1);
  }
};

MPICOMM_DEVICE void reduce_chunk(const Chunk& chunk) {
  const Exchange& exchange = chunk.exchange;
  // Slots are always aligned; own is a null pointer, hence aligned, where this rank contributes nothing.
  const bool aligned = width_of(exchange.output) == 16 && width_of(exchange.own) == 16;
  const auto source = [&](u32 place) { return chunk.of(exchange.sources[place]); };
  u8* const output = exchange.output + chunk.range.begin;
  reduce_bytes(output, source, exchange.num_sources, chunk.range.nbytes, aligned, threadIdx.x, blockDim.x);
}
#endif

}  // namespace mpicomm

using mpicomm::Exchange;
using mpicomm::kMaxRanks;
using mpicomm::kSlots;
using mpicomm::Link;
using mpicomm::Part;
using mpicomm::Range;
using mpicomm::u32;
using mpicomm::u64;
using mpicomm::u8;

// Bounds the registers, so that a block always fits: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kThreads) mpicomm_exchange(const __grid_constant__ Exchange);

MPICOMM_KERNEL void mpicomm_exchange(const __grid_constant__ Exchange exchange) {
  const u32 thread = threadIdx.x, channel = blockIdx.x, rank = exchange.team.rank, size = exchange.team.size;
  __shared__ Part parts[2 * kMaxRanks];  // what this channel receives from each rank, then what it sends

  // Thread r keeps the channel from rank r, thread kMaxRanks + r the one to it: it alone waits for its words, writes
  // them and knows its count, which needs no atomics as one exchange of a communicator runs at a time.
  const bool keeper = thread < 2 * kMaxRanks;
  const bool sender = thread >= kMaxRanks;
  const u32 peer = thread % kMaxRanks;
  const bool remote = keeper && peer < size && peer != rank;
  u32* count = nullptr;
  Part mine{0, 0, 0, 0};
  if (keeper && peer < size) {
    mine = mpicomm::part_of(sender ? exchange.sends[peer] : exchange.receives[peer], channel, exchange.slot_nbytes);
    const u64 number = (static_cast<u64>(sender ? size + peer : peer)) * exchange.channels + channel;
    count = reinterpret_cast<u32*>(exchange.team.arenas[rank] + exchange.counts) + number;
    mine.epoch = *count;
  }
  if (keeper) parts[thread] = mine;

  // One thread, of a warp that keeps no channel, looks whether somebody has given up before. The loads are under way
  // while the first chunks are copied; their results count before the first flag is raised.
  const bool healthy =
      thread != 32 || mpicomm::is_healthy(exchange.team, channel, mpicomm::load_health(exchange.team));
  __syncthreads();

  u32 steps = 0;
  for (const Part& part : parts) {
    if (part.chunks > steps) steps = part.chunks;
  }
  for (u32 step = 0; step <= steps; ++step) {
    // The chunk of this thread's channel in this step; before the first it is larger than all numbers.
    const u32 current = sender ? step : step - 1;
    const bool takes = remote && !sender && current < mine.chunks;
    const bool sends = remote && sender && current < mine.chunks;
    const u32 epoch = mine.epoch + current + 1;
    bool ok = true;
    if (takes || sends) {
      const u32 awaited = sends ? epoch - kSlots : epoch;
      const mpicomm::Team& team = exchange.team;
      const mpicomm::Watch watch{
          team.faults, team.timeout_ns, mpicomm::kExchange, awaited, channel, team.names[peer]};
      const u64* word = sends ? mpicomm::credit_of(exchange, rank, peer, channel)
                              : mpicomm::flag_of(exchange, rank, peer, channel, epoch);
      ok = mpicomm::await_epoch(team, word, watch, exchange.receives[peer].tag, takes ? ~0u : 0);
    }
    // All leave or none: a thread that went on alone would wait at the next barrier for ever.
    if (!__syncthreads_and(ok)) return;

    // Each rank begins with the one after it, so that at any time each is written to by one.
    for (u32 i = 1; i < size; ++i) {
      const u32 to = (rank + i) % size;
      const Part part = parts[kMaxRanks + to];
      if (step >= part.chunks) continue;
      const Range chunk = part.chunk(step, exchange.slot_nbytes);
      u8* const slot = mpicomm::slot_of(exchange, to, rank, channel, part.epoch + step + 1);
      mpicomm::copy_bytes(slot, exchange.sends[to].pointer + chunk.begin, chunk.nbytes, thread, blockDim.x);
    }
    const u32 taken = step - 1;  // as `current`
    for (u32 from = 0; from < size; ++from) {
      const Part part = parts[from];
      u8* const target = exchange.receives[from].pointer;
      // What this rank sends itself waits for nobody: a step later, the last of it would be all that is left to do.
      const u32 number = from == rank ? step : taken;
      if (target == nullptr || number >= part.chunks) continue;
      const Range chunk = part.chunk(number, exchange.slot_nbytes);
      const u8* const source = from == rank
                                   ? exchange.sends[rank].pointer + chunk.begin
                                   : mpicomm::slot_of(exchange, rank, from, channel, part.epoch + number + 1);
      mpicomm::copy_bytes(target + chunk.begin, source, chunk.nbytes, thread, blockDim.x);
    }
#if defined(MPICOMM_DTYPE)
    if (exchange.num_sources > 0 && taken < parts[exchange.sources[0]].chunks) {
      const Range range = parts[exchange.sources[0]].chunk(taken, exchange.slot_nbytes);
      mpicomm::reduce_chunk({exchange, parts, taken, range});
    }
#endif

    if (!__syncthreads_and(healthy)) return;
    if (takes || sends) {
      u64* word = sends ? mpicomm::flag_of(exchange, peer, rank, channel, epoch)
                        : mpicomm::credit_of(exchange, peer, rank, channel);
      const u32 tag = sends ? exchange.sends[peer].tag : 0;
      // A flag: pairs with the load_acquire of it in the peer's next step and publishes the chunk, which this thread
      // has seen written by the whole block at the barrier. A plain store could arrive before the data.
      // A credit: pairs with the load_acquire of it at the sender and says that the block's reads of the slot, before
      // the barrier, are over. A plain store could overtake them, and the sender would write what is still being read.
      // System scope, the other side being another device. One instruction for both kinds: a release waits for what
      // it publishes, and so the warp waits once.
      mpicomm::store_release(word, mpicomm::word_of(epoch, tag));
    }
  }
  // Read by the next exchange: that kernel starts when this one is over, on whichever stream the host puts it.
  if (remote) *count = mine.epoch + mine.chunks;
}
