// A reduction along a chain of ranks, as that of chain.cu, in packets that say themselves whether they have come: the
// sentinel wire of packet_wires.cuh. What a rank passes on needs no release, so that it can be small pieces, of which
// the first are at the end of the chain some microseconds after they were sent.
//
// Channels: see chain.cuh. A chunk is a batch, a few packets of each lane, and a slot holds several. A launch begins
// with a new slot e. The flag of that says what call it is, {e, tag}, and goes before the packets, which do not. Credit
// {e} says that the receiver is done with slot e and all before.
//
//     sender                                             receiver
//     while (load_acquire(credit) < e - kSlots) {}       while (load_relaxed(flag) < e) {} if the launch begins
//     store_relaxed(flag, e) if the launch begins        while (load_volatile(packets) are not all there) {}
//     store_volatile(packets of each batch)              store_volatile(packets, ones)
//                                                        __syncwarp(), fence_device(), store_relaxed(credit, e)
//
// The ones must be in the slot before the sender writes there again: they could arrive after the next packet and wipe it
// out. The credit says so, which comes after the fence. The scope of the device is enough: the slot lies in its own
// memory, where stores of the peers come to be ordered with its own. Waiting for the whole system would be waiting for
// what goes to the next rank, too. Loads of the slot are over by then, as each was repeated until its packet was there.
// Credit goes against the data of the rank before, on links which it takes some percent of: hence not for each batch.
//
// The flag of a slot is written with credit for that, as its packets are: what the receiver looks for is still there.
//
// Why that cannot deadlock: as in chain.cu; the last slot of a launch gets its credit like any other.
//
// Why `own` may be `output`. A lane reads both contributions to a packet before it writes the result; what it has read
// ahead is of the next batch. And on a rank that is first and last, what is written comes of what was read there: no
// fence is needed where each access depends on the one before.

#define MPICOMM_SENTINEL  // the wire

#include "chain.cuh"
#include "packet_wires.cuh"
#include "reduce_bytes.cuh"

namespace mpicomm {

// The host's copies of these constants are in packet_chain.py; a test compares them.
constexpr u32 kPacketChainThreads = 256;
constexpr u32 kPacketChainBlocks = 2;  // of a multiprocessor
constexpr u32 kPacketChainSlots = 2;
constexpr u64 kPacketChainSlotNbytes = 32 * 1024;
constexpr u64 kBatchNbytes = 2 * 1024;
constexpr u32 kRows = kBatchNbytes / (kLanes * kPacketNbytes);  // of a batch, each a packet for each lane
constexpr u32 kBatches = kPacketChainSlotNbytes / kBatchNbytes;  // of a slot

using PacketChain = Chain<kPacketChainSlots, kPacketChainSlotNbytes>;

template <class Each>
struct Rows {
  Each of[kRows];
};

// What a warp passes on.
struct Passing {
  const PacketChain& x;
  const Place place;
  const u32 lane, channel;
  u32 received, sent;  // slots
  u32 credit = sent - PacketChain::kSlots;  // that there is, at least
  Rows<Packet> own{};  // of the next batch

  MPICOMM_DEVICE u64 end(u64 begin) const { return x.nbytes - begin < x.chunk_nbytes ? x.nbytes : begin + x.chunk_nbytes; }

  // Whether a batch has all the packets that it can have, of which each is one access of the arrays.
  MPICOMM_DEVICE bool is_whole(u64 begin) const {
    return end(begin) - begin == kBatchNbytes && (width_of(place.own) & width_of(place.output)) == kPacketNbytes;
  }

  // Calls `each(row, where the packet begins)` for the packets of this lane.
  template <bool whole, class Each>
  MPICOMM_DEVICE void for_packets(u64 begin, Each each) const {
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
      const u64 at = begin + (row * kLanes + lane) * kPacketNbytes;
      if (whole || at < end(begin)) each(row, at);
    }
  }

  template <bool whole>
  MPICOMM_DEVICE void load_own(u64 begin) {
    for_packets<whole>(begin, [&](u32 row, u64 at) {
      own.of[row] = whole ? load_aligned(place.own + at) : load_unit(place.own, width_of(place.own), at, x.nbytes);
    });
  }
  MPICOMM_DEVICE void load_own(u64 begin) {
    if (place.own == nullptr || begin >= x.nbytes) return;
    if (is_whole(begin)) load_own<true>(begin);
    else load_own<false>(begin);
  }

  MPICOMM_DEVICE Pair* packets(u32 owner, u32 epoch, u32 batch) const {
    return reinterpret_cast<Pair*>(x.slot(owner, channel, epoch) + batch * kBatchNbytes) + lane;
  }

  // Waits until the slot `sent` may be written.
  MPICOMM_DEVICE bool await_credit() {
    const u32 awaited = sent - PacketChain::kSlots;
    const auto has_credit = [&] {
      // Pairs with the receiver's store of it. Were it a plain load, stores to the slot could overtake it, and be
      // wiped out.
      if (static_cast<i32>(credit - awaited) < 0) credit = epoch_of(load_acquire(x.credit(x.team.rank, channel)));
      return static_cast<i32>(credit - awaited) >= 0;
    };
    return await_together(x.team, x.watch(x.next, awaited), lane, has_credit);
  }

  // Passes on batch number `batch` of a slot. False means that the kernel must leave.
  template <bool whole>
  MPICOMM_DEVICE bool pass_on(u64 begin, u32 batch) {
    Rows<Packet> out = own;
    if (place.receives) {
      Pair* const slot = packets(x.team.rank, received, batch);
      Rows<Pair> in;
      const auto have_come = [&] {
        bool come = true;
        for_packets<whole>(begin, [&](u32 row, u64) { in.of[row] = Wire::load(slot + row * kLanes); });
        for_packets<whole>(begin, [&](u32 row, u64) { come &= Wire::has_come(in.of[row], {}); });
        return come;
      };
      if (!await_together(x.team, x.watch(x.previous, received), lane, have_come)) return false;
      for_packets<whole>(begin, [&](u32 row, u64) { Wire::give_back(slot + row * kLanes); });
      for_packets<whole>(begin, [&](u32 row, u64) {
        out.of[row] = Wire::unit(in.of[row]);
        // What comes is reduced over the ranks before: with what this one adds, the order of all is that of the ranks.
        if (place.own != nullptr) out.of[row] = reduce_packets(out.of[row], own.of[row]);
      });
    }
    load_own(begin + x.stride());  // under way while the rest of this batch is
    if (place.sends) {
      Pair* const slot = packets(x.next, sent, batch);
      for_packets<whole>(begin, [&](u32 row, u64) { Wire::store(slot + row * kLanes, Wire::packet(out.of[row], {})); });
    }
    if (place.output != nullptr) {
      for_packets<whole>(begin, [&](u32 row, u64 at) {
        if constexpr (whole) store_aligned(place.output + at, out.of[row]);
        else store_unit(place.output, width_of(place.output), at, x.nbytes, out.of[row]);
      });
    }
    return true;
  }

  // A slot, whose first batch begins at `begin`, and whether the launch begins with it; false as above.
  MPICOMM_DEVICE bool begin_slot(bool first) {
    received += place.receives;
    sent += place.sends;
    if (place.sends && !await_credit()) return false;
    if (!first) return true;
    // Pairs with the load of it by the next rank, in await_epoch below. Relaxed: nothing is published with it, and whoever
    // reads it needs nothing but the word.
    if (place.sends && lane == 0) store_relaxed(x.flag(x.next, channel, sent), word_of(sent, x.tag));
    bool same = true;
    if (place.receives && lane == 0) {
      same = await_epoch(x.team, x.flag(x.team.rank, channel, received), x.watch(x.previous, received), x.tag, ~0u);
    }
    return __all_sync(kWarp, same);
  }

  MPICOMM_DEVICE void end_slot() {
    if (!place.receives) return;
    // The store of credit pairs with the load of it by the rank before, in await_credit. The barrier has what all lanes
    // have put back before the fence of one, and the fence has it in the slot before the credit leaves: the rank before
    // would else store packets that are wiped out.
    __syncwarp(kWarp);
    if (lane != 0) return;
    fence_device();
    store_relaxed(x.credit(x.previous, channel), word_of(received, x.tag));
  }
};

MPICOMM_DEVICE void run(const PacketChain& x) {
  // Counts, slots and `own` may still be written by the kernel ahead: nothing is read or stored before it is over.
  wait_for_predecessor();
  // In all warps, also those that have nothing to do. Blocks of the next kernel come to wait beside those of this one,
  // which all run by then: they keep none of them away.
  let_successor_start();
  const u32 lane = threadIdx.x % kLanes, channel = x.channel();
  const u64 first = channel * x.chunk_nbytes;
  if (first >= x.nbytes) return;  // the whole warp, as nothing is left for it
  // One lane looks whether somebody has given up before: before anything is stored.
  Health health;
  if (lane == 0) health = load_health(x.team);
  const Place& place = x.place();
  Passing passing{
      x,
      place,
      lane,
      channel,
      place.receives ? *x.count(false, channel) : 0,
      place.sends ? *x.count(true, channel) : 0,
  };
  passing.load_own(first);
  if (!__all_sync(kWarp, lane != 0 || is_healthy(x.team, blockIdx.x, health))) return;

  u32 batch = 0;
  for (u64 begin = first; begin < x.nbytes; begin += x.stride()) {
    if (batch == 0 && !passing.begin_slot(begin == first)) return;
    const bool ok = passing.is_whole(begin) ? passing.pass_on<true>(begin, batch) : passing.pass_on<false>(begin, batch);
    if (!ok) return;
    batch = (batch + 1) % kBatches;
    if (batch == 0) passing.end_slot();
  }
  if (batch != 0) passing.end_slot();
  // Read by the next of these kernels: it starts when this one is over, on whichever stream the host puts it.
  if (lane == 0 && place.receives) *x.count(false, channel) = passing.received;
  if (lane == 0 && place.sends) *x.count(true, channel) = passing.sent;
}

}  // namespace mpicomm

// Bounds the registers, so that as many blocks always fit: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kPacketChainThreads, mpicomm::kPacketChainBlocks)
    mpicomm_packet_chain(const __grid_constant__ mpicomm::PacketChain);

MPICOMM_KERNEL void mpicomm_packet_chain(const __grid_constant__ mpicomm::PacketChain x) { mpicomm::run(x); }
