// A message to one rank and one from another, or the same, at once: in stream order, without the host. Ranks that have
// nothing to do with each other know nothing of each other's messages.
//
// Channels. A message is cut into parts, one for each channel of its two ranks, and a part into chunks. A channel is a
// block of the sender and a block of the receiver, `kSlots` slots in the receiver's memory, a flag for each there, and a
// word for credit in the sender's memory. Chunks are counted for ever, by epochs: chunk e lies in slot e % kSlots, its
// flag is {e, tag}, and credit {e} says that the receiver is done with chunk e. Both sides keep their count of a channel
// in their own memory and the kernel advances it, so a captured graph can be replayed for ever.
//
//     sender                                             receiver
//     while (load_acquire(credit) < e - kSlots) {}       while (load_acquire(flag) < e) {}
//     __syncthreads()                                    __syncthreads()
//     slot = chunk (all threads)                         ... = slot (all threads)
//     __syncthreads()                                    __syncthreads()
//     store_release(flag, e)                             store_release(credit, e)
//
// Matching. Messages from one rank to another are matched by their order, which is that of the two ranks' streams. The
// tag of a flag is made of the length and of MPI's tag, so that ranks which disagree on these notice.
//
// Why that cannot deadlock. Blocks that send and blocks that receive are not the same: what a rank sends does not wait
// for what it receives, however the other ranks depend on it. So a kernel ends once the ranks that it talks to have
// begun theirs, if all of its blocks run at once: the host launches at most as many as the smallest device holds, two
// for each multiprocessor (one copies while the other's fence waits for its stores to arrive). A message that fits into
// the slots does not even need its receiver. Ranks whose streams wait for each other in a circle, each sending first more
// than that, wait until time is up, as they would with MPI_Ssend.

#include "bytes.cuh"
#include "channel_words.cuh"

namespace mpicomm {

// The host's copies of these constants and structures are in arguments.py; a test compares them.
constexpr u32 kSendrecvThreads = 256;
constexpr u32 kSendrecvBlocks = 2;  // of a multiprocessor
constexpr u32 kSendrecvSlots = 2;
constexpr u64 kSendrecvSlotNbytes = 64 * 1024;

// A message; all of a channel's part lies at [channel * stride, (channel + 1) * stride).
struct Side {
  u8* pointer;
  u64 nbytes;
  u64 stride;
  u32 peer;
  u32 blocks;  // channels that have a part
  u32 tag;
  u32 mask;  // the bits of the tag that must be the sender's
};

struct Sendrecv {
  Team team;
  Side sent;
  Side received;
  u8* memory[kMaxRanks];  // every rank's for messages, as mapped here; counts are at its start
  u64 credits;            // where they begin in it
  u64 flags;
  u64 slots;
  u32 channels;  // of two ranks
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
  // Strides are those of the memory: were they those of the message, chunks of two messages could overlap.
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
  // Of the last chunk before this kernel. One kernel of a communicator runs at a time; all threads have read it at the
  // first barrier, long before the first writes it.
  u32* const count = x.count(sends, peer, channel);
  const u32 last = *count;
  // One thread, of a warp that waits for nobody, looks whether somebody has given up before.
  bool ok = thread != 32 || is_healthy(x.team, blockIdx.x, load_health(x.team));

  for (u32 chunk = 0; chunk < chunks; ++chunk) {
    const u32 epoch = last + chunk + 1;
    if (thread == 0) {
      const u32 awaited = sends ? epoch - kSendrecvSlots : epoch;
      const Watch watch{x.team.faults, x.team.timeout_ns, kMessage, awaited, blockIdx.x, x.team.names[peer]};
      const u64* const word = sends ? x.credit(rank, peer, channel) : x.flag(rank, peer, channel, epoch);
      ok = await_epoch(x.team, word, watch, side.tag, sends ? 0 : side.mask);
    }
    // All leave or none: a thread that went on alone would wait at the next barrier for ever.
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
    // A flag: pairs with the load_acquire of it by the receiver, in await_epoch, and publishes the chunk, which this
    // thread has seen written by the whole block at the barrier. A plain store could arrive before the data.
    // A credit: pairs with the load_acquire of it by the sender and says that the block's reads of the slot, before the
    // barrier, are over. A plain store could overtake them, and the sender would write what is still being read.
    // System scope, the other side being another device.
    if (thread == 0) {
      store_release(sends ? x.flag(peer, rank, channel, epoch) : x.credit(peer, rank, channel), word_of(epoch, side.tag));
    }
  }
  // Read by the next of these kernels: it starts when this one is over, on whichever stream the host puts it.
  if (thread == 0) *count = last + chunks;
}

}  // namespace mpicomm

// Bounds the registers, so that two blocks always fit: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kSendrecvThreads, mpicomm::kSendrecvBlocks)
    mpicomm_sendrecv(const __grid_constant__ mpicomm::Sendrecv);

MPICOMM_KERNEL void mpicomm_sendrecv(const __grid_constant__ mpicomm::Sendrecv x) { mpicomm::carry(x); }
