// Sends a message to one rank and receives a message from the same or another rank at the same
// time. This happens in stream order, without the host. Only the two ranks of a message take part
// in it.
//
// Channels. A message is cut into parts, one part for each channel from its sender to its receiver.
// A part is cut into chunks. A channel is a block of the sender and a block of the receiver, with
// `kSendrecvSlots` slots. channel_words.cuh explains slots, epochs, flags and credit.
//
// Matching. Messages from one rank to another match by their order on the two ranks' streams. The
// tag of a flag is made of the length and of MPI's tag, so ranks that disagree on these notice it.
//
// Why that cannot deadlock. Some blocks send and other blocks receive, so a rank's sending never
// waits for its receiving. So a kernel ends after its peers have begun their kernels, if all of its
// blocks run at once (team.cuh). The host launches at most two blocks for each multiprocessor of
// the smallest device. One block copies while the other's release waits for its stores to arrive. A
// message that fits into the slots does not even need its receiver. The streams of several ranks
// may wait for each other in a circle, if each rank first sends a message longer than the slots.
// These ranks wait until time is up, as they would with MPI_Ssend.

#include "bytes.cuh"
#include "channel_words.cuh"

namespace mpicomm {

// The host's copies of these constants and structures are in plan.py; a test compares them.
constexpr u32 kSendrecvThreads = 256;
constexpr u32 kSendrecvBlocks = 2;  // on a multiprocessor
constexpr u32 kSendrecvSlots = 2;
constexpr u64 kSendrecvSlotNbytes = 64 * 1024;

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
  u64 slots;
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
  // The strides of slots depend only on the memory. With strides that depend on the message, chunks
  // of two messages could overlap.
  MPICOMM_DEVICE u8* slot(u32 owner, u32 sender, u32 channel, u32 epoch) const {
    const u64 number = line(sender, channel) * kSendrecvSlots + epoch % kSendrecvSlots;
    return memory[owner] + slots + number * kSendrecvSlotNbytes;
  }
};

MPICOMM_DEVICE void carry(const Sendrecv& x) {
  const bool sends = blockIdx.x < x.sent.blocks;
  const Side& side = sends ? x.sent : x.received;
  const u32 thread = threadIdx.x, rank = x.team.rank, peer = side.peer;
  const u32 channel = sends ? blockIdx.x : blockIdx.x - x.sent.blocks;
  const u64 begin = channel * side.stride;
  const u64 nbytes = side.nbytes - begin < side.stride ? side.nbytes - begin : side.stride;
  const u32 chunks = static_cast<u32>((nbytes + kSendrecvSlotNbytes - 1) / kSendrecvSlotNbytes);
  // The epoch of the channel's last chunk before this kernel. It needs no atomics, because a
  // communicator runs one of these kernels at a time. All threads have read it at the first
  // barrier, before thread 0 writes it at the end.
  u32* const count = x.count(sends, peer, channel);
  const u32 last = *count;
  // One thread of a warp that waits for no word checks whether a rank has given up before.
  bool ok = thread != 32 || is_healthy(x.team, blockIdx.x, load_health(x.team));

  for (u32 chunk = 0; chunk < chunks; ++chunk) {
    const u32 epoch = last + chunk + 1;
    if (thread == 0) {
      const u32 awaited = sends ? epoch - kSendrecvSlots : epoch;
      const Watch watch{x.team.faults, x.team.timeout_ns, kMessage, awaited, blockIdx.x, x.team.names[peer]};
      const u64* const word = sends ? x.credit(rank, peer, channel) : x.flag(rank, peer, channel, epoch);
      ok = await_epoch(x.team, word, watch, side.tag, sends ? 0 : side.mask);
    }
    // Either all threads leave or none, because a thread that stayed would wait at the next barrier
    // for ever. The barrier also orders the accesses of the whole block to the slot after the
    // acquire of thread 0.
    if (!__syncthreads_and(ok)) return;

    const u64 at = chunk * kSendrecvSlotNbytes;
    const u64 some = nbytes - at < kSendrecvSlotNbytes ? nbytes - at : kSendrecvSlotNbytes;
    u8* const mine = side.pointer + begin + at;
    if (sends) {
      copy_bytes(x.slot(peer, rank, channel, epoch), mine, some, thread, blockDim.x);
    } else {
      copy_bytes(mine, x.slot(rank, peer, channel, epoch), some, thread, blockDim.x);
    }
    __syncthreads();
    // A flag: pairs with the load_acquire in await_epoch of the receiver, and publishes the chunk.
    // Credit: pairs with the load_acquire in await_epoch of the sender, and says that the block's
    // loads of the slot are over. channel_words.cuh says why a plain store would be wrong.
    if (thread == 0) {
      store_release(sends ? x.flag(peer, rank, channel, epoch) : x.credit(peer, rank, channel), word_of(epoch, side.tag));
    }
  }
  // The next kernel of this kind reads the count. It starts after this kernel is over, on any
  // stream.
  if (thread == 0) *count = last + chunks;
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh.
extern "C" __global__ void __launch_bounds__(mpicomm::kSendrecvThreads, mpicomm::kSendrecvBlocks)
    mpicomm_sendrecv(const __grid_constant__ mpicomm::Sendrecv);

MPICOMM_KERNEL void mpicomm_sendrecv(const __grid_constant__ mpicomm::Sendrecv x) { mpicomm::carry(x); }
