// Moves one message along a chain of ranks. Each rank sends on the packets that come from the
// previous rank, unchanged or reduced with its own contribution. Each rank launches one kernel. If
// one rank sends to all, or all send to one, a chain is faster than shards that other ranks send
// on. In a chain every link has one sender, and a link carries less if several ranks send to one
// rank at a time.
//
// The message travels in packets that show by themselves whether they have come, on the sentinel
// protocol (packet_protocols.cuh). So a rank sends data on without a release. Hence pieces can be
// small, and the first pieces reach the end of the chain soon.
//
// Channels. A warp of a rank and the same warp of the next rank are a channel. channel_words.cuh
// explains slots, epochs, flags and credit. This kernel uses them with these differences:
// - The message is cut into batches, with a few packets for each lane. The channels carry the
//   batches in turn. A slot holds several batches. Epochs count slots, not chunks, and each launch
//   begins with a new slot.
// - The packets of a slot need no flag. The flag of the first slot of a launch, {e, tag}, says
//   which call it is, because packets do not say that. The sender stores the flag before the
//   packets, and the receiver waits for it. The sender also stores the flags of the other slots,
//   although no receiver waits for them, because epochs wrap around. A flag that kept its old
//   value would look new 2^31 slots later, when a launch begins with that slot.
// - The receiver gives credit for each slot, not for each batch. Credit travels against the data
//   from the previous rank, and takes a part of the bandwidth of the links.
// - The receiver stores credit after a fence instead of by a release, see below.
//
//     sender                                              receiver
//     while (load_acquire(credit) < e - kChainSlots) {}   if the launch begins:
//                                                           while (load_acquire(flag) < e) {}
//     store_relaxed(flag, e)                              while (load_volatile(packets) are not
//     store_volatile(packets of each batch)                 all there) {}
//                                                         store_volatile(packets, "absent")
//                                                         __syncwarp()
//                                                         fence_slots()
//                                                         store_relaxed(credit, e)
//
// Why a slot may be used again. The receiver resets the packets of a slot. The resets must be in
// the slot before the sender stores there again. Otherwise they could arrive after the next packets
// and wipe these out. So the receiver gives credit after fence_slots: memory_order.cuh explains the
// scope of this fence, and why it works although the PTX memory model promises nothing. The
// receiver's loads of the slot are over by then, because it repeated each load until the packet was
// there. The sender stores the flag of a slot after it has credit for the slot, as it stores the
// packets. So the previous flag of that word stays until the receiver has looked for it.
//
// Why that cannot deadlock. A batch waits for the previous batch of its channel and for the same
// batch on the previous rank. It also waits until the next rank is done with the slot kChainSlots
// epochs earlier. The first rank of the chain has its batches. The last rank takes all packets that
// come. The last slot of a launch gets credit like any other slot. The root of a reduction may also
// be the first rank. Then it has two hops in the chain, one for sending and one for receiving.
// Different blocks serve these hops and do not wait for each other. All blocks of a launch run at
// once (team.cuh), because the host launches only as many as the smallest device holds: two for
// each multiprocessor.
//
// Why `own` may be `output`. A lane reads both contributions to a packet before it writes the
// result. The data that it has read ahead belongs to the next batch. On a rank that is first and
// last, one hop reads `own` and the other hop writes `output`. That needs no fence. The written
// packet has come around the chain from the packet that was read. Each access on its way depends on
// the previous access.

#define MPICOMM_SENTINEL  // the protocol

#include "channel_words.cuh"
#include "packet_protocols.cuh"
#if defined(MPICOMM_DTYPE)
#include "reduce_packets.cuh"
#endif

namespace mpicomm {

// The host's copies of these constants and structures are in plan.py; a test compares them.
constexpr u32 kChainThreads = 256;
constexpr u32 kChainBlocks = 2;  // that a multiprocessor holds
constexpr u32 kChainSlots = 2;
constexpr u64 kBatchNbytes = 2 * 1024;
constexpr u32 kBatchPackets = kBatchNbytes / kPacketNbytes;
constexpr u32 kRows = kBatchPackets / kLanes;  // rows of a batch; a row is one packet for each lane

// A hop of a rank in the chain.
struct Hop {
  const u8* own;  // the contribution that this rank adds, or null
  u8* output;     // where the rank keeps the result, or null
  u32 receives;   // whether there is a previous rank
  u32 sends;      // whether there is a next rank
};

struct Chain {
  Team team;
  Hop hops[2];  // the second is for a rank that is first and last
  u64 nbytes;
  u64 batch_nbytes;       // at most kBatchNbytes
  u8* memory[kMaxRanks];  // the memory of every rank for chains, as mapped on this rank; its counts come first
  u64 credits;            // an offset in that memory, like flags and slots
  u64 flags;
  u64 slots;
  u64 slot_nbytes;
  u32 batches;   // in a slot
  u32 channels;  // for which there is memory
  u32 blocks;    // for one hop
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
  // The escape of a packet in a slot. Escapes follow all slots.
  MPICOMM_DEVICE u8* escape(u32 owner, const Pair* packet) const {
    const u64 begin = reinterpret_cast<const u8*>(packet) - (memory[owner] + slots);
    return memory[owner] + slots + channels * kChainSlots * slot_nbytes + begin / kPacketNbytes;
  }

  MPICOMM_DEVICE const Hop& hop() const { return hops[blockIdx.x / blocks]; }
  // The channel of this thread's warp.
  MPICOMM_DEVICE u32 channel() const { return threadIdx.x / kLanes * blocks + blockIdx.x % blocks; }
  // The distance from one batch of a channel to the next.
  MPICOMM_DEVICE u64 stride() const { return static_cast<u64>(blockDim.x / kLanes) * blocks * batch_nbytes; }
  // The entries of a fault record for a wait until `peer` comes to `epoch`.
  MPICOMM_DEVICE Watch watch(u32 peer, u32 epoch) const {
    return {team.faults, team.timeout_ns, kExchange, epoch, blockIdx.x, team.user_ranks[peer]};
  }
};

template <class Each>
struct Rows {
  Each of[kRows];
};

// The work of one warp: it takes packets, reduces them and sends them on.
struct Forwarder {
  const Chain& x;
  const Hop hop;
  const u32 lane, channel;
  u32 received, sent;  // the epochs of the last slots received and sent
  u32 credit = sent - kChainSlots;  // the least credit that this rank has
  Pair* incoming{};    // the first of this lane's packets of the next batch in the slot
  Pair* outgoing{};    // the same in the slot of the next rank
  Rows<Packet> own{};  // this rank's contribution to the next batch

  MPICOMM_DEVICE u64 end(u64 begin) const { return x.nbytes - begin < x.batch_nbytes ? x.nbytes : begin + x.batch_nbytes; }

  // Whether a batch has all kBatchPackets packets, and each of them is one access to the arrays.
  MPICOMM_DEVICE bool is_whole(u64 begin) const {
    return end(begin) - begin == kBatchNbytes && (width_of(hop.own) & width_of(hop.output)) == kPacketNbytes;
  }

  // Calls `each(row, offset)` for the packets of this lane in the batch at `begin`.
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
      own.of[row] = whole ? load_aligned(hop.own + at) : load_unit(hop.own, width_of(hop.own), at, x.nbytes);
    });
  }
  MPICOMM_DEVICE void load_own(u64 begin) {
    if (hop.own == nullptr || begin >= x.nbytes) return;
    if (is_whole(begin)) load_own<true>(begin);
    else load_own<false>(begin);
  }

  MPICOMM_DEVICE Pair* packets(u32 owner, u32 epoch) const {
    return reinterpret_cast<Pair*>(x.slot(owner, channel, epoch)) + lane;
  }

  // Waits until this rank may store in slot `sent` of the next rank. Returns false if the kernel
  // must leave.
  MPICOMM_DEVICE bool await_credit() {
    const u32 awaited = sent - kChainSlots;
    const auto has_credit = [&] {
      // Pairs with the receiver's store of credit in end_slot: its resets have reached the slot.
      // With a plain load, this rank's stores to the slot could overtake the load, and the resets
      // would wipe them out.
      if (static_cast<i32>(credit - awaited) < 0) credit = epoch_of(load_acquire(x.credit(x.team.rank, channel)));
      return static_cast<i32>(credit - awaited) >= 0;
    };
    return await_together(x.team, x.watch(x.next, awaited), lane, has_credit);
  }

  // Takes the escapes of all packets of a batch that have an escape. Returns false if the kernel
  // must leave.
  template <bool whole>
  MPICOMM_DEVICE bool take_escapes(u64 begin, Rows<Pair>& in) const {
    bool ok = true;
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
      const u64 at = begin + (row * kLanes + lane) * kPacketNbytes;
      const bool escaped = (whole || at < end(begin)) && Protocol::has_escape(in.of[row]);
      u8* const escape = x.escape(x.team.rank, incoming + row * kLanes);
      u32 code = 0;
      const auto has_arrived = [&] {
        if (escaped) code = load_volatile(escape);  // pairs with the store in store_escaped; only the byte counts
        return !escaped || code != 0;
      };
      ok = ok && await_together(x.team, x.watch(x.previous, received), lane, has_arrived);
      if (!ok || !escaped) continue;
      in.of[row] = unescaped(in.of[row], code);
      // This rank resets the escape together with the packets, before the credit for the slot. A
      // later reset could wipe out the next escape of the packet.
      store_volatile(escape, 0);
    }
    return ok;
  }

  MPICOMM_DEVICE void send(Pair* slot, const Pair& packet) const {
    if (Protocol::has_escape(packet)) store_escaped(slot, x.escape(x.next, slot), packet);
    else store_volatile(slot, packet);
  }

  // Takes, reduces, sends on and keeps the batch that begins at `begin`. Returns false if the
  // kernel must leave.
  template <bool whole>
  MPICOMM_DEVICE bool forward(u64 begin) {
    Rows<Packet> out = own;
    if (hop.receives) {
      Rows<Pair> in;
      const auto have_arrived = [&] {
        bool come = true;
        for_packets<whole>(begin, [&](u32 row, u64) { in.of[row] = load_volatile(incoming + row * kLanes); });
        for_packets<whole>(begin, [&](u32 row, u64) { come &= Protocol::has_arrived(in.of[row], {}); });
        return come;
      };
      if (!await_together(x.team, x.watch(x.previous, received), lane, have_arrived)) return false;
      bool escaped = false;
      for_packets<whole>(begin, [&](u32 row, u64) { escaped |= Protocol::has_escape(in.of[row]); });
      if (__any_sync(kWarp, escaped) && !take_escapes<whole>(begin, in)) return false;
      for_packets<whole>(begin, [&](u32 row, u64) { Protocol::reset_slot(incoming + row * kLanes); });
      incoming += kBatchPackets;
      for_packets<whole>(begin, [&](u32 row, u64) {
        out.of[row] = Protocol::unit(in.of[row]);
        // The packet that comes is the reduction of all previous ranks. This rank's contribution
        // comes second, so the reduction keeps the order of ranks.
#if defined(MPICOMM_DTYPE)
        if (hop.own != nullptr) out.of[row] = reduce_packets(out.of[row], own.of[row]);
#endif
      });
    }
    load_own(begin + x.stride());  // these loads are in flight during the rest of this batch
    if (hop.sends) {
      Rows<Pair> going;
      bool escapes = false;
      for_packets<whole>(begin, [&](u32 row, u64) {
        going.of[row] = Protocol::packet(out.of[row], {});
        escapes |= Protocol::has_escape(going.of[row]);
      });
      if (!escapes) {
        for_packets<whole>(begin, [&](u32 row, u64) { store_volatile(outgoing + row * kLanes, going.of[row]); });
      } else {
        for_packets<whole>(begin, [&](u32 row, u64) { send(outgoing + row * kLanes, going.of[row]); });
      }
      outgoing += kBatchPackets;
    }
    if (hop.output != nullptr) {
      for_packets<whole>(begin, [&](u32 row, u64 at) {
        if constexpr (whole) store_aligned(hop.output + at, out.of[row]);
        else store_unit(hop.output, width_of(hop.output), at, x.nbytes, out.of[row]);
      });
    }
    return true;
  }

  // Begins the next slot for receiving and for sending. `first` is whether the launch begins with
  // it. Returns false if the kernel must leave.
  MPICOMM_DEVICE bool begin_slot(bool first) {
    received += hop.receives;
    sent += hop.sends;
    if (hop.receives) incoming = packets(x.team.rank, received);
    if (hop.sends) outgoing = packets(x.next, sent);
    if (hop.sends && !await_credit()) return false;
    // Pairs with the next rank's load in await_epoch below. The store is relaxed, because the
    // reader needs only this word, and so the store publishes nothing.
    if (hop.sends && lane == 0) store_relaxed(x.flag(x.next, channel, sent), word_of(sent, x.tag));
    if (!first) return true;
    bool same = true;
    if (hop.receives && lane == 0) {
      same = await_epoch(x.team, x.flag(x.team.rank, channel, received), x.watch(x.previous, received), x.tag, ~0u);
    }
    return __all_sync(kWarp, same);
  }

  MPICOMM_DEVICE void end_slot() {
    if (!hop.receives) return;
    // The store of credit pairs with the previous rank's load in await_credit. The barrier orders
    // the resets of all lanes before the fence of one lane. The fence orders the resets before the
    // credit. Without it the resets could arrive late and wipe out the next packets of the previous
    // rank.
    __syncwarp(kWarp);
    if (lane != 0) return;
    fence_slots();
    store_relaxed(x.credit(x.previous, channel), word_of(received, x.tag));
  }
};

MPICOMM_DEVICE void run(const Chain& x) {
  // The previous kernel may still write counts, slots and `own`. So this kernel loads and stores
  // nothing before the previous kernel is over.
  wait_for_predecessor();
  // All warps call this, also warps without work. Then blocks of the next kernel wait beside the
  // blocks of this kernel. They keep no block of this kernel from running, because all of its
  // blocks run by then.
  let_successor_start();
  const u32 lane = threadIdx.x % kLanes, channel = x.channel();
  const u64 first = channel * x.batch_nbytes;
  if (first >= x.nbytes) return;  // the whole warp leaves, because it has no batch
  // One lane checks whether a rank has given up before. The warp uses the result before it stores
  // anything.
  Health health;
  if (lane == 0) health = load_health(x.team);
  const Hop& hop = x.hop();
  Forwarder forwarder{
      x,
      hop,
      lane,
      channel,
      hop.receives ? *x.count(false, channel) : 0,
      hop.sends ? *x.count(true, channel) : 0,
  };
  forwarder.load_own(first);
  if (!__all_sync(kWarp, lane != 0 || is_healthy(x.team, blockIdx.x, health))) return;

  u32 batch = 0;
  for (u64 begin = first; begin < x.nbytes; begin += x.stride()) {
    if (batch == 0 && !forwarder.begin_slot(begin == first)) return;
    const bool ok = forwarder.is_whole(begin) ? forwarder.forward<true>(begin) : forwarder.forward<false>(begin);
    if (!ok) return;
    if (++batch == x.batches) batch = 0;
    if (batch == 0) forwarder.end_slot();
  }
  if (batch != 0) forwarder.end_slot();
  // The next kernel of this kind reads the counts after this kernel is over, on any stream. All
  // lanes have read the counts above. The votes since then order no memory, so without this barrier
  // a lane could read a new count.
  __syncwarp(kWarp);
  if (lane == 0 && hop.receives) *x.count(false, channel) = forwarder.received;
  if (lane == 0 && hop.sends) *x.count(true, channel) = forwarder.sent;
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh.
extern "C" __global__ void __launch_bounds__(mpicomm::kChainThreads, mpicomm::kChainBlocks)
    mpicomm_chain(const __grid_constant__ mpicomm::Chain);

MPICOMM_KERNEL void mpicomm_chain(const __grid_constant__ mpicomm::Chain x) { mpicomm::run(x); }
