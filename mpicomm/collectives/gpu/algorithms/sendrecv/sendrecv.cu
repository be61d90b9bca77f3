// Sends a message to one rank and receives a message from the same or another rank at the same
// time. This happens in stream order, without the host. Only the two ranks of a message take part
// in it.
//
// Channels. A message is cut into parts, one part for each channel from its sender to its receiver.
// A channel is a block of the sender and a block of the receiver. channel_words.cuh explains slots,
// epochs, flags and credit. There are two kinds of messages, and the length of a message says its
// kind. Both kinds have the same epochs, flags and credit:
// - The parts of a short message travel in LL packets, which show by themselves whether they have
//   come (packet_protocols.cuh). A part is one epoch and fits into one of the channel's
//   `kSendrecvSlots` slots for packets. The receiver waits for the packets and for the flag at the
//   same time, and the flag only names the message.
// - The parts of a long message are cut into chunks. Each chunk is an epoch, and fits into one of
//   the channel's `kSendrecvChunkSlots` slots for chunks.
//
// Matching. Messages from one rank to another match by their order on the two ranks' streams. The
// tag of a flag is made of the length and of MPI's tag, so ranks that disagree on these notice it.
//
// Credit of packets. A receiver of packets gives no credit when it has taken them, because its
// kernel would end only after the credit has crossed the link. Each kernel that receives first gives
// credit for all epochs of the kernels before. So a sender of packets waits only if the receiver has
// yet to begin the receive of the message kSendrecvSlots - 1 messages earlier.
//
// Old packets. The number of a packet's epoch has 30 bits and comes again after 2^30 epochs. A slot
// may still hold a packet with that number from the last round of numbers, at a place that later
// messages were too short to reach. So at the start of each round the receiver wipes each slot when
// it is done with the slot's first epoch of the round.
//
// Why that cannot deadlock. Some blocks send and other blocks receive, so a rank's sending never
// waits for its receiving. So a kernel ends after its peers have begun their kernels, if all of its
// blocks run at once (team.cuh). The host launches at most two blocks for each multiprocessor of
// the smallest device. One block copies while the other's release waits for its stores to arrive. A
// message that fits into the slots does not even need its receiver. The streams of several ranks
// may wait for each other in a circle, if each rank first sends a message longer than the slots.
// These ranks wait until time is up, as they would with MPI_Ssend.

#include "channel_words.cuh"
#include "packet_protocols.cuh"

namespace mpicomm {

// The host's copies of these constants and structures are in plan.py; a test compares them.
constexpr u32 kSendrecvThreads = 256;
constexpr u32 kSendrecvBlocks = 2;  // on a multiprocessor
constexpr u32 kSendrecvSlots = 4;
constexpr u64 kSendrecvPartNbytes = 4 * 1024;  // the most data of a slot for packets
constexpr u32 kSendrecvChunkSlots = 2;
constexpr u64 kSendrecvChunkNbytes = 64 * 1024;

constexpr u32 kPacketsOfSlot = kSendrecvPartNbytes / kUnitNbytes;
constexpr u64 kPacketSlotsNbytes = kSendrecvSlots * kPacketsOfSlot * kPacketNbytes;  // of a channel
constexpr u64 kChannelNbytes = kPacketSlotsNbytes + kSendrecvChunkSlots * kSendrecvChunkNbytes;

// One message, sent or received. The part of a channel lies at [channel * stride, (channel + 1) *
// stride).
struct Side {
  u8* pointer;
  u64 nbytes;
  u64 stride;
  u32 peer;
  u32 blocks;  // channels that have a part
  u32 tag;
  u32 mask;  // the bits in which the tags of sender and receiver must agree
};

struct Sendrecv {
  Team team;
  Side sent;
  Side received;
  u8* memory[kMaxRanks];  // the memory of every rank for messages, as mapped on this rank; its counts come first
  u64 credits;            // an offset in that memory, like flags and slots
  u64 flags;
  u64 slots;  // of each channel: first its slots for packets, then its slots for chunks
  u32 channels;  // from one rank to another
  u32 unused;

  MPICOMM_DEVICE u64 line(u32 peer, u32 channel) const { return static_cast<u64>(peer) * channels + channel; }
  MPICOMM_DEVICE u32* count(bool sends, u32 peer, u32 channel) const {
    return reinterpret_cast<u32*>(memory[team.rank]) + line(sends ? team.size + peer : peer, channel);
  }
  MPICOMM_DEVICE u64* credit(u32 owner, u32 receiver, u32 channel) const {
    return reinterpret_cast<u64*>(memory[owner] + credits + line(receiver, channel) * kLineNbytes);
  }
  MPICOMM_DEVICE u64* flag(u32 owner, u32 sender, u32 channel, u32 epoch) const {
    return reinterpret_cast<u64*>(memory[owner] + flags + line(sender, channel) * kLineNbytes) + epoch % kSendrecvSlots;
  }
  // The strides of slots depend only on the memory. With strides that depend on the message, slots
  // of two messages could overlap.
  MPICOMM_DEVICE u8* channel_slots(u32 owner, u32 sender, u32 channel) const {
    return memory[owner] + slots + line(sender, channel) * kChannelNbytes;
  }
  MPICOMM_DEVICE Pair* packets(u32 owner, u32 sender, u32 channel, u32 epoch) const {
    return reinterpret_cast<Pair*>(channel_slots(owner, sender, channel)) + epoch % kSendrecvSlots * kPacketsOfSlot;
  }
  MPICOMM_DEVICE u8* chunk(u32 owner, u32 sender, u32 channel, u32 epoch) const {
    const u64 at = epoch % kSendrecvChunkSlots * kSendrecvChunkNbytes;
    return channel_slots(owner, sender, channel) + kPacketSlotsNbytes + at;
  }
};

// The part of a message in the channel of this block.
struct Part {
  const Sendrecv& x;
  const Side& side;
  bool sends;
  u32 channel;
  u8* data;
  u64 nbytes;
  u32 rank = x.team.rank;
  u32 peer = side.peer;
  u32 thread = threadIdx.x;

  // Both ranks know the length, and have equally many channels.
  MPICOMM_DEVICE bool is_short() const { return side.nbytes <= x.channels * kSendrecvPartNbytes; }

  MPICOMM_DEVICE u64* flag(u32 epoch) const {
    return sends ? x.flag(peer, rank, channel, epoch) : x.flag(rank, peer, channel, epoch);
  }
  MPICOMM_DEVICE u64* credit() const { return sends ? x.credit(rank, peer, channel) : x.credit(peer, rank, channel); }
  MPICOMM_DEVICE Pair* packets(u32 epoch) const {
    return sends ? x.packets(peer, rank, channel, epoch) : x.packets(rank, peer, channel, epoch);
  }
  MPICOMM_DEVICE u8* chunk(u32 epoch) const {
    return sends ? x.chunk(peer, rank, channel, epoch) : x.chunk(rank, peer, channel, epoch);
  }
  MPICOMM_DEVICE Watch watch(u32 awaited) const {
    return {x.team.faults, x.team.timeout_ns, kMessage, awaited, blockIdx.x, x.team.user_ranks[peer]};
  }

  // One thread of a warp that waits for no word checks whether a rank has given up before.
  MPICOMM_DEVICE bool is_healthy_rank() const {
    return thread != kLanes || is_healthy(x.team, blockIdx.x, load_health(x.team));
  }

  MPICOMM_DEVICE bool await_credit(u32 epoch) const {
    return await_epoch(x.team, credit(), watch(epoch), side.tag, 0);
  }

  // Calls `each(i, offset)` for the next kAtOnce units of this thread, from its unit at `at`.
  static constexpr u32 kAtOnce = 2;
  template <class Each>
  MPICOMM_DEVICE void for_units(u64 at, Each each) const {
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u64 place = at + i * blockDim.x * kUnitNbytes;
      if (place < nbytes) each(i, place);
    }
  }

  MPICOMM_DEVICE void send_packets(u32 epoch, u32* count) const {
    const u32 width = width_of(data);
    const u64 first = thread * kUnitNbytes, step = kAtOnce * blockDim.x * kUnitNbytes;
    Packet units[kAtOnce];
    const auto load = [&](u32 i, u64 at) { units[i] = load_unit(data, width, at, nbytes); };
    for_units(first, load);  // in flight beside the loads of the words
    const bool ok = thread == 0 ? await_credit(epoch - kSendrecvSlots) : is_healthy_rank();
    // All threads leave or none, because a rank that has given up must store nothing to a peer. All
    // have read the count.
    if (!__syncthreads_and(ok)) return;
    if (thread == 0) {
      // Pairs with the load in `take_packets`. The store is relaxed, because it publishes no data.
      store_relaxed(flag(epoch), word_of(epoch, side.tag));
      *count = epoch;
    }
    Pair* const slot = packets(epoch);
    for (u64 at = first; at < nbytes; at += step) {
      if (at != first) for_units(at, load);
      for_units(at, [&](u32 i, u64 place) {
        store_volatile(slot + place / kUnitNbytes, Protocol::packet(units[i], Protocol::flag(epoch)));
      });
    }
  }

  MPICOMM_DEVICE void take_packets(u32 epoch, u32* count) const {
    const u32 width = width_of(data);
    const u64 first = thread * kUnitNbytes, step = kAtOnce * blockDim.x * kUnitNbytes;
    const Pair* const slot = packets(epoch);
    bool ok = is_healthy_rank();
    // Thread 0 also waits for the flag, which may name another message. Then packets may be missing.
    u64 word = 0;
    const auto differs = [&] { return has_reached(word, epoch) && !is_same(word, side.tag, side.mask); };
    for (u64 at = first; ok && at < nbytes; at += step) {
      Pair held[kAtOnce];
      const auto come = [&] {
        bool all = true;
        // Pairs with the stores in `send_packets`, as does the load of the flag.
        for_units(at, [&](u32 i, u64 place) { held[i] = load_volatile(slot + place / kUnitNbytes); });
        if (thread == 0) word = load_relaxed(flag(epoch));
        for_units(at, [&](u32 i, u64) { all &= Protocol::has_arrived(held[i], Protocol::flag(epoch)); });
        return thread == 0 ? has_reached(word, epoch) && (all || differs()) : all;
      };
      ok = end_wait(x.team, watch(epoch), spin(come, [&] { return is_aborted(x.team); }, watch(epoch)));
      if (ok && thread == 0 && differs()) ok = report_tag_mismatch(x.team, watch(epoch));
      if (!ok) break;
      for_units(at, [&](u32 i, u64 place) { store_unit(data, width, place, nbytes, Protocol::unit(held[i])); });
    }
    // All threads have taken their packets and read the count.
    if (!__syncthreads_and(ok)) return;
    wipe(epoch);
    if (thread == 0) *count = epoch;
  }

  // Wipes the epoch's slot for packets at the start of a round of numbers: see the top of this file.
  // Credit for the epoch comes later. Without the wipe the receiver could take a packet of the last
  // round.
  MPICOMM_DEVICE void wipe(u32 epoch) const {
    if ((epoch & kFlagMask) >= kSendrecvSlots) return;
    Pair* const slot = packets(epoch);
    for (u32 at = thread; at < kPacketsOfSlot; at += blockDim.x) store_volatile(slot + at, {0, 0});
  }

  MPICOMM_DEVICE void carry_chunks(u32 last, u32* count) const {
    const u32 chunks = static_cast<u32>((nbytes + kSendrecvChunkNbytes - 1) / kSendrecvChunkNbytes);
    bool ok = is_healthy_rank();
    for (u32 number = 0; number < chunks; ++number) {
      const u32 epoch = last + number + 1;
      if (thread == 0) {
        ok = sends ? await_credit(epoch - kSendrecvChunkSlots)
                   : await_epoch(x.team, flag(epoch), watch(epoch), side.tag, side.mask);
      }
      // Either all threads leave or none, because a thread that stayed would wait at the next barrier
      // for ever. The barrier also orders the accesses of the whole block to the slot after the
      // acquire of thread 0.
      if (!__syncthreads_and(ok)) return;

      const u64 at = number * kSendrecvChunkNbytes;
      const u64 some = nbytes - at < kSendrecvChunkNbytes ? nbytes - at : kSendrecvChunkNbytes;
      u8* const slot = chunk(epoch);
      copy_bytes(sends ? slot : data + at, sends ? data + at : slot, some, thread, blockDim.x);
      if (!sends) wipe(epoch);
      __syncthreads();
      // A flag: pairs with the load_acquire in await_epoch of the receiver, and publishes the chunk.
      // Credit: pairs with the load_acquire in await_epoch of the sender, and says that the block's
      // loads of the slot are over. channel_words.cuh says why a plain store would be wrong.
      if (thread == 0) store_release(sends ? flag(epoch) : credit(), word_of(epoch, side.tag));
    }
    if (thread == 0) *count = last + chunks;
  }
};

MPICOMM_DEVICE void carry(const Sendrecv& x) {
  // The previous kernel may still write memory that this kernel reads.
  wait_for_predecessor();
  // Blocks of the next kernel keep no block of this kernel from running, because all of its blocks
  // run by then.
  let_successor_start();
  const bool sends = blockIdx.x < x.sent.blocks;
  const Side& side = sends ? x.sent : x.received;
  const u32 channel = sends ? blockIdx.x : blockIdx.x - x.sent.blocks;
  const u64 begin = channel * side.stride, rest = side.nbytes - begin;
  const Part part{x, side, sends, channel, side.pointer + begin, rest < side.stride ? rest : side.stride};
  // The last epoch of the channel before this kernel. It needs no atomics, because a communicator
  // runs one of these kernels at a time. All threads have read it at the first barrier, before
  // thread 0 writes it.
  u32* const count = x.count(sends, side.peer, channel);
  const u32 last = *count;
  // Pairs with the load_acquire in await_epoch of the sender. It says that the kernels before have
  // taken their packets and chunks, and have wiped slots. The store is relaxed, because these kernels
  // have ended: see "The end of a kernel" in device_protocol.md.
  if (!sends && threadIdx.x == 0) store_relaxed(part.credit(), word_of(last, 0));
  if (!part.is_short()) part.carry_chunks(last, count);
  else if (sends) part.send_packets(last + 1, count);
  else part.take_packets(last + 1, count);
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh.
extern "C" __global__ void __launch_bounds__(mpicomm::kSendrecvThreads, mpicomm::kSendrecvBlocks)
    mpicomm_sendrecv(const __grid_constant__ mpicomm::Sendrecv);

MPICOMM_KERNEL void mpicomm_sendrecv(const __grid_constant__ mpicomm::Sendrecv x) { mpicomm::carry(x); }
