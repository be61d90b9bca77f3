// One message along a chain of ranks, each of which sends on what comes, as it is or reduced with what it has. Each rank
// launches one kernel. Where one rank tells all, or all tell one, that is faster than shards by way of the others: on
// every link there is one sender, and where several send to one at a time a link carries some percent less.
//
// Channels: see chain.cuh. Here a slot has a flag of its own. That of chunk e is {e, tag of the call}, and credit {e} says
// that the receiver is done with chunk e and all before.
//
//     sender                                             receiver
//     while (load_acquire(credit) < e - kChainSlots) {}  while (load_acquire(flag) < e) {}
//     __all_sync()                                       __all_sync()
//     slot = chunk (all lanes)                           ... = slot (all lanes)
//     __syncwarp()                                       __syncwarp()
//     store_release(flag, e)                             store_release(credit, e) if e is a multiple of kCredited
//
// Credit goes against the data of the rank before that, on links which it takes some percent of: hence not for each.
//
// Warps. A release waits until all that was stored before has arrived, more than a microsecond. Warps know nothing of
// each other, so that they are not about as far as blocks would be, and while some wait others keep the link full.
//
// Why that cannot deadlock. A chunk waits for the one before it in its channel, for the same one on the rank before, and
// for the next rank to be done with one that is kCredited ahead or more: the first rank has it, the last one takes
// whatever comes. The rank that all tell may be the first one too: what it sends and what it receives are two places, of
// different blocks, neither of which waits for the other. All blocks must run at once: the host launches no more than
// the smallest device holds, two for each multiprocessor.
//
// Why `own` may be `output`. A lane reads both contributions to an element before it writes the result; and on a rank
// that is first and last, a chunk comes back when it was sent, hence read, and has been all around.

#include "chain.cuh"
#if defined(MPICOMM_DTYPE)
#include "reduce_bytes.cuh"
#endif

namespace mpicomm {

// The host's copies of these constants are in chain.py; a test compares them.
constexpr u32 kChainThreads = 128;
constexpr u32 kChainBlocks = 2;  // of a multiprocessor
constexpr u32 kChainSlots = 8;
constexpr u32 kCredited = kChainSlots / 2;
constexpr u64 kChainSlotNbytes = 8 * 1024;

using Chunks = Chain<kChainSlots, kChainSlotNbytes>;

// Some bytes on their way through a rank.
struct Piece {
  const u8* source;
  const u8* own;  // null where nothing is added
  u8* target;
  u8* also;  // where the same is kept, or null
  u64 nbytes;
};

// Out of line, as few pieces are not whole chunks of whole packets: a kernel waits for code that it jumps over.
MPICOMM_DEVICE_CALL void carry_any(const Piece& piece, u32 lane) {
#if defined(MPICOMM_DTYPE)
  if (piece.own != nullptr) {
    const bool aligned = width_of(piece.source) == 16 && width_of(piece.own) == 16 && width_of(piece.target) == 16;
    const auto source = [&](u32 number) { return number == 0 ? piece.source : piece.own; };
    return reduce_bytes(piece.target, source, 2, piece.nbytes, aligned, lane, kLanes);
  }
#endif
  copy_bytes(piece.target, piece.source, piece.nbytes, lane, kLanes);
  if (piece.also != nullptr) copy_bytes(piece.also, piece.source, piece.nbytes, lane, kLanes);
}

MPICOMM_DEVICE void carry(const Piece& piece, u32 lane) {
  const u32 width = width_of(piece.source) & width_of(piece.own) & width_of(piece.target) & width_of(piece.also);
  if (width != kPacketNbytes || piece.nbytes != kChainSlotNbytes) return carry_any(piece, lane);
  constexpr u32 kAtOnce = kChainSlotNbytes / kPacketNbytes / kLanes;
  Packet packets[kAtOnce];
  const auto at = [&](u32 i) { return static_cast<u64>(i * kLanes + lane) * kPacketNbytes; };
  // All loads before the first store.
#pragma unroll
  for (u32 i = 0; i < kAtOnce; ++i) packets[i] = load_aligned(piece.source + at(i));
#if defined(MPICOMM_DTYPE)
  if (piece.own != nullptr) {
    Packet own[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) own[i] = load_aligned(piece.own + at(i));
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) packets[i] = reduce_packets(packets[i], own[i]);
  }
#endif
#pragma unroll
  for (u32 i = 0; i < kAtOnce; ++i) store_aligned(piece.target + at(i), packets[i]);
  if (piece.also == nullptr) return;
#pragma unroll
  for (u32 i = 0; i < kAtOnce; ++i) store_aligned(piece.also + at(i), packets[i]);
}

MPICOMM_DEVICE void pass_on(const Chunks& x) {
  const Place& place = x.place();
  const u32 lane = threadIdx.x % kLanes, rank = x.team.rank, channel = x.channel();
  const u64 first = channel * x.chunk_nbytes;
  if (first >= x.nbytes) return;  // the whole warp, as nothing is left for it
  // Lane 0 keeps the channel from the rank before, lane 1 the one to the next: it alone waits for its words, writes them
  // and knows its count. One kernel of a communicator runs at a time.
  const bool sender = lane == 1, keeper = lane < 2 && (sender ? place.sends : place.receives);
  u32 received = place.receives ? *x.count(false, channel) : 0, sent = place.sends ? *x.count(true, channel) : 0;
  // Another lane looks whether somebody has given up before, which counts at the first vote: before anything is stored.
  bool ok = lane != 2 || is_healthy(x.team, blockIdx.x, load_health(x.team));

  for (u64 begin = first; begin < x.nbytes; begin += x.stride()) {
    received += place.receives;
    sent += place.sends;
    const u32 epoch = sender ? sent : received, peer = sender ? x.next : x.previous;
    if (keeper) {
      const u32 awaited = sender ? epoch - kChainSlots : epoch;
      const u64* const word = sender ? x.credit(rank, channel) : x.flag(rank, channel, epoch);
      ok = await_epoch(x.team, word, x.watch(peer, awaited), x.tag, sender ? 0 : ~0u);
    }
    // All leave or none: a lane that went on alone would wait for the others for ever. Counts are read by now.
    if (!__all_sync(kWarp, ok)) return;

    const u64 nbytes = x.nbytes - begin < x.chunk_nbytes ? x.nbytes - begin : x.chunk_nbytes;
    const u8* const own = place.own == nullptr ? nullptr : place.own + begin;
    u8* const output = place.output == nullptr ? nullptr : place.output + begin;
    Piece piece{own, nullptr, output, nullptr, nbytes};
    // What comes is reduced over the ranks before: with what this one adds, the order of all is that of the ranks.
    if (place.receives) piece.source = x.slot(rank, channel, received), piece.own = own;
    if (place.sends) piece.target = x.slot(x.next, channel, sent), piece.also = output;
    carry(piece, lane);

    __syncwarp(kWarp);
    // A flag: pairs with the load_acquire of it by the next rank, in await_epoch, and publishes the chunk, which this
    // lane has seen written by the whole warp at the barrier. A plain store could arrive before the data.
    // A credit: pairs with the load_acquire of it by the rank before and says that the warp's reads of the slot, before
    // the barrier, are over. A plain store could overtake them, and the sender would write what is still being read.
    // System scope, the other side being another device. One instruction for both kinds: a release waits for what it
    // publishes, and so the warp waits once.
    // Both sides count alike, so credit that is not given now comes with a chunk that the sender has room for.
    if (keeper && (sender || epoch % kCredited == 0)) {
      store_release(sender ? x.flag(peer, channel, epoch) : x.credit(peer, channel), word_of(epoch, x.tag));
    }
  }
  // Read by the next of these kernels: it starts when this one is over, on whichever stream the host puts it.
  if (keeper) *x.count(sender, channel) = sender ? sent : received;
}

}  // namespace mpicomm

// Bounds the registers, so that two blocks always fit: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kChainThreads, mpicomm::kChainBlocks)
    mpicomm_chain(const __grid_constant__ mpicomm::Chunks);

MPICOMM_KERNEL void mpicomm_chain(const __grid_constant__ mpicomm::Chunks x) { mpicomm::pass_on(x); }
