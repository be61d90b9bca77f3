// One exchange: every rank sends a message to every rank, and stores or reduces the messages that
// it receives. Each rank launches one kernel.
//
// Channels. Block b of a rank talks only to block b of each other rank. Two ranks, a direction and
// a block number are a channel, with `kSlots` slots. channel_words.cuh explains slots, epochs,
// flags and credit. Flags and credit lie in the ranks' arenas. The tag of a flag says to which call
// the chunk belongs. A channel carries its part of the message in chunks.
//
// Steps. In step k a block first waits. Then it sends chunk k of each message, also of the message
// to this rank. It takes chunk k-1 of each message from another rank. Then it raises its flags and
// gives its credit.
//
// Chunks. A release waits until all earlier stores have arrived. The links are idle meanwhile,
// because all blocks are at about the same point. So chunks are large, and releases are rare.
//
// Why that cannot deadlock. In step k a block waits for the flags of chunks k-1. The same block of
// a peer raises them at the end of its step k-1. It also waits for the credit of chunks k-kSlots,
// which the peer gives at the end of its step k-kSlots+1. That is step k-1 or an earlier step,
// because kSlots >= 2. Of all blocks that are not done, consider a block in the earliest exchange,
// and there in the smallest step. All ranks count the same exchanges and steps. The block's kernel has
// begun, because all earlier exchanges of its rank are done. The block waits only for smaller steps
// or earlier exchanges, which are done. So it goes on. That needs all blocks of a launch to run at
// once: see team.cuh.
//
// Why `own` may be the output. If the memory that a rank sends is also the output of its reduction,
// it is as long as each message to this rank. So it is cut into the same channels and chunks. The
// block that writes a chunk of the output has sent that chunk to all ranks in an earlier step. And
// the thread that writes a result has already read this rank's contribution to that result.

#include "channel_words.cuh"
#if defined(MPICOMM_DTYPE)
#include "element.cuh"
#include "reduce_bytes.cuh"
#endif

namespace mpicomm {

// The host's copies of these constants and structures are in arguments.py; a test compares them.
constexpr u32 kThreads = 512;
constexpr u32 kSlots = 2;

// The message to, or from, one rank. The part of a channel lies at [channel * stride, (channel + 1)
// * stride).
struct Link {
  u8* pointer;  // null for a message that this rank reduces
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
  u64 counts;  // an offset in every arena, like credits and flags
  u64 credits;
  u64 flags;
  u8* slots[kMaxRanks];  // the slots of every rank, as mapped on this rank
  u64 slot_nbytes;       // whole cache lines
  u32 channels;  // the channels for which an arena has words
  u32 num_sources;
  u32 sources[kMaxRanks];  // in the order of the reduction; this rank may be among them
};

// A range of bytes of a message.
struct Range {
  u64 begin;
  u64 nbytes;
};

// The part of a link that one channel carries.
struct Part {
  u64 begin;
  u64 nbytes;
  u32 chunks;
  u32 epoch;  // of the channel's last chunk before this kernel

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

// The strides of slots depend only on the arena. With strides that depend on the message, chunks of
// two messages could overlap.
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
// The chunks with one number, one from each source: their places, and their range of the message.
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
  // Slots are always aligned. `own` is null, hence aligned, if this rank contributes nothing.
  const bool aligned = width_of(exchange.output) == 16 && width_of(exchange.own) == 16;
  const auto source = [&](u32 place) { return chunk.of(exchange.sources[place]); };
  u8* const output = exchange.output + chunk.range.begin;
  const u64 nbytes = chunk.range.nbytes;
  reduce_bytes<Op, Element>(output, source, exchange.num_sources, nbytes, aligned, threadIdx.x, blockDim.x);
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

// Bounds the registers: see team.cuh.
extern "C" __global__ void __launch_bounds__(mpicomm::kThreads) mpicomm_exchange(const __grid_constant__ Exchange);

MPICOMM_KERNEL void mpicomm_exchange(const __grid_constant__ Exchange exchange) {
  const u32 thread = threadIdx.x, channel = blockIdx.x, rank = exchange.team.rank, size = exchange.team.size;
  __shared__ Part parts[2 * kMaxRanks];  // the parts received from each rank, then the parts sent to each rank

  // Thread r keeps the channel from rank r, thread kMaxRanks + r the channel to rank r. Only the
  // keeper waits for the words of the channel, stores them and knows its count. The count needs no
  // atomics, because a communicator runs one exchange at a time.
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

  // One thread of a warp that keeps no channel checks whether a rank has given up before. Its loads
  // are in flight while the block copies the first chunks. The block uses the result before it
  // raises the first flag.
  const bool healthy =
      thread != 32 || mpicomm::is_healthy(exchange.team, channel, mpicomm::load_health(exchange.team));
  __syncthreads();

  u32 steps = 0;
  for (const Part& part : parts) {
    if (part.chunks > steps) steps = part.chunks;
  }
  for (u32 step = 0; step <= steps; ++step) {
    // The chunk of this thread's channel in this step. Before the first chunk, the number wraps
    // around to the largest number.
    const u32 current = sender ? step : step - 1;
    const bool takes = remote && !sender && current < mine.chunks;
    const bool sends = remote && sender && current < mine.chunks;
    const u32 epoch = mine.epoch + current + 1;
    bool ok = true;
    if (takes || sends) {
      const u32 awaited = sends ? epoch - kSlots : epoch;
      const mpicomm::Team& team = exchange.team;
      const mpicomm::Watch watch{
          team.faults, team.timeout_ns, mpicomm::kExchange, awaited, channel, team.user_ranks[peer]};
      const u64* word = sends ? mpicomm::credit_of(exchange, rank, peer, channel)
                              : mpicomm::flag_of(exchange, rank, peer, channel, epoch);
      ok = mpicomm::await_epoch(team, word, watch, exchange.receives[peer].tag, takes ? ~0u : 0);
    }
    // Either all threads leave or none, because a thread that stayed would wait at the next barrier
    // for ever. The barrier also orders the accesses of the whole block to slots after the keepers'
    // acquires.
    if (!__syncthreads_and(ok)) return;

    // The next rank comes first: see team.cuh.
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
      // The message to this rank itself waits for no peer, so the block copies its chunk in the
      // same step. One step later, its last chunk would be the only work in the last step.
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

    // The barrier orders the accesses of the whole block to slots before the keepers' releases. If
    // a rank has given up, all threads leave here, before the block raises a flag.
    if (!__syncthreads_and(healthy)) return;
    if (takes || sends) {
      u64* word = sends ? mpicomm::flag_of(exchange, peer, rank, channel, epoch)
                        : mpicomm::credit_of(exchange, peer, rank, channel);
      const u32 tag = sends ? exchange.sends[peer].tag : 0;
      // A flag: pairs with the load_acquire in await_epoch, in the peer's next step, and publishes
      // the chunk. Credit: pairs with the load_acquire in await_epoch of the sender, and says that
      // the block's loads of the slot are over. channel_words.cuh says why a plain store would be
      // wrong. Both kinds of words share one instruction. A release waits for the accesses that it
      // publishes, so the warp waits only once.
      mpicomm::store_release(word, mpicomm::word_of(epoch, tag));
    }
  }
  // The next exchange reads the count. Its kernel starts after this kernel is over, on any stream.
  if (remote) *count = mine.epoch + mine.chunks;
}
