// One message along a chain of ranks, each of which sends on what comes, as it is or reduced with what it has. Each rank
// launches one kernel. Where one rank tells all, or all tell one, that is faster than shards by way of the others: on
// every link there is one sender, and where several send to one at a time a link carries some percent less.
//
// It goes in packets that say themselves whether they have come, on the sentinel wire of packet_wires.cuh: what a rank
// passes on needs no release, so that it can be small pieces, of which the first are at the end of the chain some
// microseconds after they were sent.
//
// Channels. A warp of a rank and the same warp of the next one are a channel, with slots in the next one's memory, a word
// for a flag of each there, and a word for credit in the sender's memory. The message is cut into batches, a few packets
// of each lane, which the channels carry in turn. A slot holds several batches. Slots of a channel are counted for ever,
// by epochs: the e-th is slot e % kChainSlots. Both sides keep their count in their own memory and the kernel advances it,
// so a captured graph can be replayed for ever.
//
// A launch begins with a new slot e. The flag of that says what call it is, {e, tag}, and goes before the packets, which do
// not. Other slots have one, too, which nobody waits for: a flag that was left as it is where no launch begins would be
// taken for a new one 2^31 slots later, as epochs wrap. Credit {e} says that the receiver is done with slot e and all before.
//
//     sender                                             receiver
//     while (load_acquire(credit) < e - kChainSlots) {}  while (load_acquire(flag) < e) {} if the launch begins
//     store_relaxed(flag, e)                             while (load_volatile(packets) are not all there) {}
//     store_volatile(packets of each batch)              store_volatile(packets, "absent")
//                                                        __syncwarp(), fence_slots(), store_relaxed(credit, e)
//
// What is put back must be in the slot before the sender writes there again: it could arrive after the next packet and wipe
// it out. The credit says so, which comes after the fence. The scope of the device is enough: the slot lies in its own
// memory, where stores of the peers come to be ordered with its own. Waiting for the whole system would be waiting for
// what goes to the next rank, too: that is done where slots lie in memory of the host (MPICOMM_HOST_SLOTS). Loads of the
// slot are over by then, as each was repeated until its packet was there.
// Credit goes against the data of the rank before, on links which it takes some percent of: hence not for each batch.
//
// The flag of a slot is written with credit for that, as its packets are: what the receiver looks for is still there.
//
// Why that cannot deadlock. A batch waits for the one before it in its channel, for the same one on the rank before, and
// for the next rank to be done with a slot that is kChainSlots ahead: the first rank has it, the last one takes whatever
// comes, and the last slot of a launch gets its credit like any other. The rank that all tell may be the first one too:
// what it sends and what it receives are two places, of different blocks, neither of which waits for the other. All blocks
// must run at once: the host launches no more than the smallest device holds, two for each multiprocessor.
//
// Why `own` may be `output`. A lane reads both contributions to a packet before it writes the result; what it has read
// ahead is of the next batch. And on a rank that is first and last, what is written comes of what was read there: no
// fence is needed where each access depends on the one before.

#define MPICOMM_SENTINEL  // the wire

#include "channel_words.cuh"
#include "packet_wires.cuh"
#if defined(MPICOMM_DTYPE)
#include "reduce_packets.cuh"
#endif

namespace mpicomm {

// The host's copies of these constants and structures are in arguments.py; a test compares them.
constexpr u32 kChainThreads = 256;
constexpr u32 kChainBlocks = 2;  // of a multiprocessor
constexpr u32 kChainSlots = 2;
constexpr u64 kBatchNbytes = 2 * 1024;
constexpr u32 kBatchPackets = kBatchNbytes / kPacketNbytes;
constexpr u32 kRows = kBatchPackets / kLanes;  // of a batch, each a packet for each lane

// Where a rank stands in the chain: what it adds, if anything, where it keeps what comes of that, if it does, and on
// which sides it has a neighbour.
struct Place {
  const u8* own;
  u8* output;
  u32 receives;
  u32 sends;
};

struct Chain {
  Team team;
  Place places[2];  // the second for a rank that is first and last
  u64 nbytes;
  u64 batch_nbytes;       // at most kBatchNbytes
  u8* memory[kMaxRanks];  // every rank's, as mapped here; counts are at its start
  u64 credits;            // where they begin in it
  u64 flags;
  u64 slots;
  u64 slot_nbytes;
  u32 batches;   // of a slot
  u32 channels;  // that a memory has
  u32 blocks;    // of one place
  u32 previous;
  u32 next;
  u32 tag;

  MPICOMM_DEVICE u32* count(bool sends, u32 channel) const {
    return reinterpret_cast<u32*>(memory[team.rank]) + (sends ? channels : 0) + channel;
  }
  MPICOMM_DEVICE u64* credit(u32 owner, u32 channel) const {
    return reinterpret_cast<u64*>(memory[owner] + credits + channel * kLineNbytes);
  }
  MPICOMM_DEVICE u64* flag(u32 owner, u32 channel, u32 epoch) const {
    return reinterpret_cast<u64*>(memory[owner] + flags + channel * kLineNbytes) + epoch % kChainSlots;
  }
  MPICOMM_DEVICE u8* slot(u32 owner, u32 channel, u32 epoch) const {
    return memory[owner] + slots + (static_cast<u64>(channel) * kChainSlots + epoch % kChainSlots) * slot_nbytes;
  }
  // That of a packet in a slot: they follow all slots.
  MPICOMM_DEVICE u8* escape(u32 owner, const Pair* packet) const {
    const u64 begin = reinterpret_cast<const u8*>(packet) - (memory[owner] + slots);
    return memory[owner] + slots + channels * kChainSlots * slot_nbytes + begin / kPacketNbytes;
  }

  MPICOMM_DEVICE const Place& place() const { return places[blockIdx.x / blocks]; }
  // That of this thread's warp.
  MPICOMM_DEVICE u32 channel() const { return threadIdx.x / kLanes * blocks + blockIdx.x % blocks; }
  // From one batch of a channel to the next.
  MPICOMM_DEVICE u64 stride() const { return static_cast<u64>(blockDim.x / kLanes) * blocks * batch_nbytes; }
  // For a wait for that neighbour to come to an epoch.
  MPICOMM_DEVICE Watch watch(u32 peer, u32 epoch) const {
    return {team.faults, team.timeout_ns, kExchange, epoch, blockIdx.x, team.names[peer]};
  }
};

template <class Each>
struct Rows {
  Each of[kRows];
};

// What a warp passes on.
struct Passing {
  const Chain& x;
  const Place place;
  const u32 lane, channel;
  u32 received, sent;  // slots
  u32 credit = sent - kChainSlots;  // that there is, at least
  Pair* incoming{};    // where this lane's packets of the next batch begin
  Pair* outgoing{};
  Rows<Packet> own{};  // of the next batch

  MPICOMM_DEVICE u64 end(u64 begin) const { return x.nbytes - begin < x.batch_nbytes ? x.nbytes : begin + x.batch_nbytes; }

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

  MPICOMM_DEVICE Pair* packets(u32 owner, u32 epoch) const {
    return reinterpret_cast<Pair*>(x.slot(owner, channel, epoch)) + lane;
  }

  // Waits until the slot `sent` may be written.
  MPICOMM_DEVICE bool await_credit() {
    const u32 awaited = sent - kChainSlots;
    const auto has_credit = [&] {
      // Pairs with the receiver's store of it. Were it a plain load, stores to the slot could overtake it, and be
      // wiped out.
      if (static_cast<i32>(credit - awaited) < 0) credit = epoch_of(load_acquire(x.credit(x.team.rank, channel)));
      return static_cast<i32>(credit - awaited) >= 0;
    };
    return await_together(x.team, x.watch(x.next, awaited), lane, has_credit);
  }

  // Takes the escapes of those packets of a batch that have one; false as below.
  template <bool whole>
  MPICOMM_DEVICE bool take_escapes(u64 begin, Rows<Pair>& in) const {
    bool ok = true;
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
      const u64 at = begin + (row * kLanes + lane) * kPacketNbytes;
      const bool escaped = (whole || at < end(begin)) && Wire::has_escape(in.of[row]);
      u8* const escape = x.escape(x.team.rank, incoming + row * kLanes);
      u32 code = 0;
      const auto has_come = [&] {
        if (escaped) code = load_volatile(escape);  // pairs with the store of it in store_escaped: it says everything
        return !escaped || code != 0;
      };
      ok = ok && await_together(x.team, x.watch(x.previous, received), lane, has_come);
      if (!ok || !escaped) continue;
      in.of[row] = unescaped(in.of[row], code);
      // Before the credit for the slot, with what is put back there: a later escape of it could else be wiped out.
      store_volatile(escape, 0);
    }
    return ok;
  }

  MPICOMM_DEVICE void send(Pair* slot, const Pair& packet) const {
    if (Wire::has_escape(packet)) store_escaped(slot, x.escape(x.next, slot), packet);
    else store_volatile(slot, packet);
  }

  // Passes on the batch that begins at `begin`. False means that the kernel must leave.
  template <bool whole>
  MPICOMM_DEVICE bool pass_on(u64 begin) {
    Rows<Packet> out = own;
    if (place.receives) {
      Rows<Pair> in;
      const auto have_come = [&] {
        bool come = true;
        for_packets<whole>(begin, [&](u32 row, u64) { in.of[row] = load_volatile(incoming + row * kLanes); });
        for_packets<whole>(begin, [&](u32 row, u64) { come &= Wire::has_come(in.of[row], {}); });
        return come;
      };
      if (!await_together(x.team, x.watch(x.previous, received), lane, have_come)) return false;
      bool escaped = false;
      for_packets<whole>(begin, [&](u32 row, u64) { escaped |= Wire::has_escape(in.of[row]); });
      if (__any_sync(kWarp, escaped) && !take_escapes<whole>(begin, in)) return false;
      for_packets<whole>(begin, [&](u32 row, u64) { Wire::give_back(incoming + row * kLanes); });
      incoming += kBatchPackets;
      for_packets<whole>(begin, [&](u32 row, u64) {
        out.of[row] = Wire::unit(in.of[row]);
        // What comes is reduced over the ranks before: with what this one adds, the order of all is that of the ranks.
#if defined(MPICOMM_DTYPE)
        if (place.own != nullptr) out.of[row] = reduce_packets(out.of[row], own.of[row]);
#endif
      });
    }
    load_own(begin + x.stride());  // under way while the rest of this batch is
    if (place.sends) {
      Rows<Pair> going;
      bool escapes = false;
      for_packets<whole>(begin, [&](u32 row, u64) {
        going.of[row] = Wire::packet(out.of[row], {});
        escapes |= Wire::has_escape(going.of[row]);
      });
      if (!escapes) {
        for_packets<whole>(begin, [&](u32 row, u64) { store_volatile(outgoing + row * kLanes, going.of[row]); });
      } else {
        for_packets<whole>(begin, [&](u32 row, u64) { send(outgoing + row * kLanes, going.of[row]); });
      }
      outgoing += kBatchPackets;
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
    if (place.receives) incoming = packets(x.team.rank, received);
    if (place.sends) outgoing = packets(x.next, sent);
    if (place.sends && !await_credit()) return false;
    // Pairs with the load of it by the next rank, in await_epoch below. Relaxed: nothing is published with it, and whoever
    // reads it needs nothing but the word.
    if (place.sends && lane == 0) store_relaxed(x.flag(x.next, channel, sent), word_of(sent, x.tag));
    if (!first) return true;
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
    fence_slots();
    store_relaxed(x.credit(x.previous, channel), word_of(received, x.tag));
  }
};

MPICOMM_DEVICE void run(const Chain& x) {
  // Counts, slots and `own` may still be written by the kernel ahead: nothing is read or stored before it is over.
  wait_for_predecessor();
  // In all warps, also those that have nothing to do. Blocks of the next kernel come to wait beside those of this one,
  // which all run by then: they keep none of them away.
  let_successor_start();
  const u32 lane = threadIdx.x % kLanes, channel = x.channel();
  const u64 first = channel * x.batch_nbytes;
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
    const bool ok = passing.is_whole(begin) ? passing.pass_on<true>(begin) : passing.pass_on<false>(begin);
    if (!ok) return;
    if (++batch == x.batches) batch = 0;
    if (batch == 0) passing.end_slot();
  }
  if (batch != 0) passing.end_slot();
  // Read by the next of these kernels: it starts when this one is over, on whichever stream the host puts it.
  if (lane == 0 && place.receives) *x.count(false, channel) = passing.received;
  if (lane == 0 && place.sends) *x.count(true, channel) = passing.sent;
}

}  // namespace mpicomm

// Bounds the registers, so that as many blocks always fit: a launch that fails here would leave the peers waiting.
extern "C" __global__ void __launch_bounds__(mpicomm::kChainThreads, mpicomm::kChainBlocks)
    mpicomm_chain(const __grid_constant__ mpicomm::Chain);

MPICOMM_KERNEL void mpicomm_chain(const __grid_constant__ mpicomm::Chain x) { mpicomm::run(x); }
