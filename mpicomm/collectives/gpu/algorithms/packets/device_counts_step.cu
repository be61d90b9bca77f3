// Messages with counts on the device in one step, where blocks follow each other in both buffers. A rank takes
// this kernel if its buffers hold no more than a step, as packets.cu cuts messages. Other ranks of the launch may
// take packets.cu with MPICOMM_DEVICE_COUNTS: both kernels store the same lengths, facts and packets in the same slots
// (device_counts.cuh). So a rank needs to know nothing about the buffers of its peers.
//
// Such a launch is short, so the way from the counts to the last packet has few steps:
// - Each worker loads the counts of this rank itself, and finds its units without a barrier.
// - Each worker polls the length for its block together with its packets, so the block needs no second barrier.
//   A worker beyond the end of the buffer polls nothing. Polls of all workers would delay the packets by a fifth.
// - Each overseer of block 0 polls all that it needs at once, to compare the rooms and the calls.
//
// Why slots are free and why no ranks wait in a circle: see the top of packets.cu. No step uses a slot again.
#include "packet_worker.cuh"

namespace mpicomm {

static_assert(kOneStep && kDeviceCounts && Protocol::kResetsSlots, "the only variant for a number of ranks");

// Offsets and lengths have 32 bits, because the host ensures that the buffers are small. An array has an entry for
// the distance of each rank from this rank.
using OfEach = u32[kRanks];

using Slots = CountSlots<kRanks>;

MPICOMM_DEVICE u32 rank_at(u32 rank, u32 distance) {
  return kRanks == 2 ? rank ^ distance : (rank + distance) % kRanks;
}

MPICOMM_DEVICE Pair* slot_at(u64 slot, u64 nbytes) { return reinterpret_cast<Pair*>(slot + nbytes); }

// Loads each line of the arguments. Without it, a thread that waits for packets loads a line only after they have come.
// The condition keeps the loads in the program, and is as good as never true.
MPICOMM_DEVICE void load_arguments(const Packets& x) {
#if defined(__CUDACC__)
  const u32* const words = reinterpret_cast<const u32*>(&x);
  u32 sum = 0;
#pragma unroll
  for (u32 word = 0; word < sizeof(Packets) / sizeof(u32); word += 16) sum = sum * 3 + words[word];
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9E3779B9; @p nanosleep.u32 20; }" ::"r"(sum));
#endif
}

// The number of the launch and the counts of this rank's messages.
struct Loads {
  u64 last_launch;
  OfEach low, high;
  u32 wide;

  // No load waits for another load.
  MPICOMM_DEVICE explicit Loads(const Packets& x) : wide(x.device_counts.send.wide_counts) {
    const u32* const words = static_cast<const u32*>(x.device_counts.send.counts);
#pragma unroll
    for (u32 d = 0; d < kRanks; ++d) {
      const u32* const first = words + (rank_at(x.team.rank, d) << (wide != 0 ? 1 : 0));
      low[d] = *first;
      high[d] = first[wide != 0 ? 1 : 0];
    }
    last_launch = launches_of(x.team)[blockIdx.x];
  }

  // A count, or a number that no buffer has room for if the count is negative or has more than 32 bits.
  MPICOMM_DEVICE u32 count(u32 distance) const { return wide != 0 && high[distance] != 0 ? ~0u : low[distance]; }

  // Finds the lengths of the messages. Returns false if they do not fit the buffer.
  MPICOMM_DEVICE bool lengths(const Packets& x, OfEach& nbytes) const {
    const u32 room = static_cast<u32>(x.device_counts.send.room), itemsize = static_cast<u32>(x.device_counts.itemsize);
    bool fits = true;
    u32 total = 0;
#pragma unroll
    for (u32 d = 0; d < kRanks; ++d) {
      fits = fits && count(d) <= room;
      total += count(d);
      nbytes[d] = count(d) * itemsize;
    }
    return fits && total <= room;
  }
};

// The offset of the block of the rank at a distance: the sum of the blocks of lower ranks.
MPICOMM_DEVICE u32 offset_of(const OfEach& nbytes, u32 rank, u32 distance) {
  u32 offset = 0;
#pragma unroll
  for (u32 d = 0; d < kRanks; ++d) {
    if (d != distance && rank_at(rank, d) < rank_at(rank, distance)) offset += nbytes[d];
  }
  return offset;
}

// Stores a packet with an escape in a slot of `peer`. It is a call, because escapes are rare and code takes time.
MPICOMM_DEVICE_CALL void push_escaped(const Packets& x, u32 peer, Pair* slot, Pair packet) {
  store_escaped(slot, escape_of(x, peer, slot), packet);
}

// Takes the escape of a slot of this rank. Returns 0 if the kernel must leave.
MPICOMM_DEVICE_CALL u32 take_escape_of(const Packets& x, u32 launch, u32 peer, Pair* slot) {
  return take_escape(x.team, launch, peer, escape_of(x, x.team.rank, slot));
}

MPICOMM_DEVICE void work(const Packets& x) {
  const Team& team = x.team;
  const u32 rank = team.rank, thread = threadIdx.x, workers = blockDim.x - kOverseers;
  const u32 at = (blockIdx.x * workers + thread) * kPacketNbytes;
  u64 out[kRanks], in[kRanks], length_slots[kRanks];
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) {
    const u32 peer = rank_at(rank, d);
    out[d] = reinterpret_cast<u64>(x.inboxes[peer]) + rank * x.inbox_nbytes + at;
    in[d] = reinterpret_cast<u64>(x.inboxes[rank]) + peer * x.inbox_nbytes + at;
    // Block 0 finds the length among the facts.
    length_slots[d] = reinterpret_cast<u64>(x.ll.sets) +
        (blockIdx.x == 0 ? Slots::of_fact(peer, rank) : Slots::of_length(peer));
  }
  load_arguments(x);
  wait_for_predecessor();

  const Loads loads(x);
  const u8* const input = x.device_counts.send.buffer;
  OfEach sent;
  const bool ok = loads.lengths(x, sent);
  Packet units[kRanks];
#pragma unroll
  for (u32 each = 1; each <= kRanks; ++each) {
    const u32 d = each % kRanks;  // peers first
    const u8* const from = input + offset_of(sent, rank, d);
    if (ok && at < sent[d]) units[d] = load_unit(from, width_of(from), at, sent[d]);
  }
  const u64 count = loads.last_launch + 1;
  const u32 launch = static_cast<u32>(count), flag = LLProtocol::flag(launch);
  begin_round_of_flags(x.ll, launch);
  // After this barrier the overseers know that slots are free, and all threads have read the number of the launch.
  if (!__syncthreads_and(ok)) return;

  // The choice between two values leaves a register more than a product with the parity, which would spill.
  const u64 set = launch % 2 ? x.stages * kRanks * x.inbox_nbytes : 0, ll_set = launch % 2 * x.ll.nbytes;
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) {
    if (at >= sent[d]) continue;
    Pair* const slot = slot_at(out[d], set);
    const Pair packet = Protocol::packet(units[d], {});
    if (Protocol::has_escape(packet)) push_escaped(x, rank_at(rank, d), slot, packet);
    else store_volatile(slot, packet);
  }
  let_successor_start();
  count_launch(team, count, thread, workers);
  // No message reaches beyond the buffer.
  const u32 room = static_cast<u32>(x.device_counts.receive.room * x.device_counts.itemsize);
  if (at >= room) return;

  // Pairs with `store_number` and `store_volatile` of the peers. Lengths and packets have no order, and need none.
  Pair packets[kRanks], lengths[kRanks];
  const auto absent = [&] {
    u32 ranks = 0;
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) {
      lengths[d] = load_volatile(slot_at(length_slots[d], ll_set));
      packets[d] = load_volatile(slot_at(in[d], set));
    }
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) {
      const bool knows = LLProtocol::has_arrived(lengths[d], flag);
      if (!knows || (at < static_cast<u32>(lengths[d].first) && !Protocol::has_arrived(packets[d], {}))) {
        ranks |= 1u << rank_at(rank, d);
      }
    }
    return ranks;
  };
  if (!await_ranks(team, launch, absent)) return;

  // All workers of the rank find the same lengths. So if there is no room, none of them stores.
  OfEach received;
  u32 total = received[0] = sent[0];
  bool fits = sent[0] <= room;
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) {
    const u64 nbytes = number_in(lengths[d]);
    fits = fits && nbytes <= room;
    total += received[d] = static_cast<u32>(nbytes);
  }
  if (!fits || total > room) return;
#pragma unroll
  for (u32 each = 1; each <= kRanks; ++each) {
    const u32 d = each % kRanks;
    if (at >= received[d]) continue;
    u8* const to = x.device_counts.receive.buffer + offset_of(received, rank, d);
    if (d == 0) {
      store_unit(to, width_of(to), at, received[d], units[d]);
      continue;
    }
    Pair* const slot = slot_at(in[d], set);
    Pair packet = packets[d];
    if (Protocol::has_escape(packet)) {
      const u32 code = take_escape_of(x, launch, rank_at(rank, d), slot);
      if (code == 0) return;
      packet = unescaped(packet, code);
    }
    store_unit(to, width_of(to), at, received[d], Protocol::unit(packet));
    Protocol::reset_slot(slot);
  }
}

// Gives up because of a count of this rank that does not fit its buffer.
MPICOMM_DEVICE_CALL void report_own_counts(const Packets& x) {
  const DeviceCountsSide& send = x.device_counts.send;
  u64 total = 0;
  for (u32 to = 0; to < kRanks; ++to) {
    const u64 count = load_index(send.counts, send.wide_counts, to);  // huge if it is negative
    total += count;
    if (count <= send.room && total <= send.room) continue;
    report_bad_counts(x.team, kCounts, x.team.user_ranks[to], x.team.rank);
    return;
  }
}

// Gives up because `peer` gets `nbytes`, more than its buffer holds.
MPICOMM_DEVICE_CALL void report_overflow(const Packets& x, u64 nbytes, u32 peer) {
  const u64 elements = nbytes / x.device_counts.itemsize;
  report_bad_counts(x.team, kReceiveOverflow, elements < kMostReported ? elements : kMostReported, peer);
}

// Whether all blocks lie in the buffer of `peer`, whose blocks do not follow each other. If they do not, it gives up.
// This rank sends `nbytes` to the peer, and all other lengths have come.
MPICOMM_DEVICE_CALL bool fits_in_places(const Packets& x, u32 launch, u32 peer, u64 nbytes) {
  const u64 set = reinterpret_cast<u64>(x.ll.sets) + launch % 2 * x.ll.nbytes;
  const auto load = [&](u32 source, u32 fact) { return load_volatile(slot_at(set, Slots::of_fact(source, fact))); };
  const u64 room = number_in(load(peer, Slots::kRoomFact)) >> 1;
  u64 needed = 0;
  for (u32 source = 0; source < kRanks; ++source) {
    Pair packet{};
    const auto absent = [&] {
      packet = load(peer, kRanks + source);
      return LLProtocol::has_arrived(packet, LLProtocol::flag(launch)) ? 0u : 1u << peer;
    };
    if (!await_ranks(x.team, launch, absent)) return false;
    const u64 length = source == x.team.rank ? nbytes : number_in(load(source, peer)), limit = number_in(packet);
    if (length > limit && room - limit + length > needed) needed = room - limit + length;
  }
  if (needed != 0) report_overflow(x, needed, peer);
  return needed == 0;
}

MPICOMM_DEVICE_CALL u32 quotient(u32 nbytes, u32 itemsize) { return nbytes / itemsize; }

MPICOMM_DEVICE void oversee(const Packets& x) {
  const Team& team = x.team;
  const u32 rank = team.rank, overseer = threadIdx.x - (blockDim.x - kOverseers);
  const bool has_peer = overseer < kRanks && overseer != rank;
  const u64 ll_inboxes = x.ll.sets - team.arenas[rank];  // the offset of the slots in each arena
  const u64 room = x.device_counts.receive.room * x.device_counts.itemsize;
  load_arguments(x);
  wait_for_predecessor();

  // As in packets.cu, but with the counts.
  const Loads loads(x);
  Announcements ours{}, theirs{};
  if (has_peer) {
    theirs = load_announcements(team, overseer);
    ours = load_sent_announcements(team, overseer);
  }
  Health health;
  if (overseer == kRanks) health = load_health(team);
  OfEach sent;
  bool ok = loads.lengths(x, sent);
  if (!ok && overseer == 0) report_own_counts(x);
  const u32 launch = static_cast<u32>(loads.last_launch + 1), flag = LLProtocol::flag(launch);
  begin_round_of_flags(x.ll, launch);
  if (blockIdx.x == 0 && has_peer) announce(team, overseer, launch);
  const auto is_behind = [&] { return static_cast<i32>(theirs.last_launch() - (launch - 1)) < 0; };
  if (has_peer && is_behind()) {
    const auto absent = [&] {
      theirs = load_announcements(team, overseer);
      return is_behind() ? 1u << overseer : 0u;
    };
    ok = await_ranks(team, launch, absent) && ok;
  }
  if (overseer == kRanks) ok = is_healthy(team, blockIdx.x, health) && ok;
  if (!__syncthreads_and(ok)) return;
  let_successor_start();

  const u64 set = launch % 2 * x.ll.nbytes;
  const auto slots_of = [&](u32 owner) { return reinterpret_cast<u64>(team.arenas[owner]) + ll_inboxes + set; };
  u32 mine = sent[0];  // to the rank of this lane
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) mine = overseer == rank_at(rank, d) ? sent[d] : mine;
  if (blockIdx.x != 0) {
    if (has_peer) store_number(slot_at(slots_of(overseer), Slots::of_length(rank)), mine, launch);
    return;
  }
  if (overseer < Slots::kFacts) {
    const u64 fact = overseer < kRanks ? mine : overseer < Slots::kRoomFact ? room : room << 1 | 1;
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) {
      store_number(slot_at(slots_of(rank_at(rank, d)), Slots::of_fact(rank, overseer)), fact, launch);
    }
  }
  if (overseer >= kRanks) return;
  if (has_peer && theirs.differ_from(ours, launch - 1)) report_mismatch(team, overseer, launch - 1);  // see oversee.cuh

  // Lane r receives all lengths of messages to rank r, the room of rank r, and the length of the message from there. It
  // also waits for the announcement of rank r. Pairs with `store_number` and `announce` of the peers.
  Pair lengths[kRanks]{}, its_room{}, from_there{};
  u32 announced = kSame;
  const u64 slots = reinterpret_cast<u64>(x.ll.sets) + set;
  const u64* const announcement = announcements(team, rank, overseer) + launch % 2;
  const auto absent = [&] {
    u32 ranks = 0;
    u64 word = 0;
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) {
      lengths[d] = load_volatile(slot_at(slots, Slots::of_fact(rank_at(rank, d), overseer)));
    }
    if (has_peer) {
      its_room = load_volatile(slot_at(slots, Slots::of_fact(overseer, Slots::kRoomFact)));
      from_there = load_volatile(slot_at(slots, Slots::of_fact(overseer, rank)));
      word = load_relaxed(announcement);
    }
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) {
      if (!LLProtocol::has_arrived(lengths[d], flag)) ranks |= 1u << rank_at(rank, d);
    }
    if (has_peer) {
      announced = compare_announcement(team, overseer, launch, word);
      const bool knows = LLProtocol::has_arrived(its_room, flag) && LLProtocol::has_arrived(from_there, flag);
      if (announced == kAbsent || !knows) ranks |= 1u << overseer;
    }
    return ranks;
  };
  if (!await_ranks(team, launch, absent)) return;
  if (announced == kDifferent) {
    report_mismatch(team, overseer, launch);
    return;
  }
  u64 total = mine;
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) total += number_in(lengths[d]);
  const u64 fact = has_peer ? number_in(its_room) : room << 1 | 1;
  if ((fact & 1) == 0) {
    if (!fits_in_places(x, launch, overseer, mine)) return;
  } else if (total > fact >> 1) {
    report_overflow(x, total, overseer);
    return;
  }
  const u32 nbytes = has_peer ? static_cast<u32>(from_there.first) : mine;
  const u32 itemsize = static_cast<u32>(x.device_counts.itemsize);
  const bool is_power = (itemsize & (itemsize - 1)) == 0;  // as nearly always, and a division takes long
  const u32 count = is_power ? nbytes >> (31 - __clz(static_cast<int>(itemsize))) : quotient(nbytes, itemsize);
  if (x.device_counts.receive.wide_counts != 0) static_cast<u64*>(x.device_counts.receive.counts)[overseer] = count;
  else static_cast<u32*>(x.device_counts.receive.counts)[overseer] = count;
}

}  // namespace mpicomm

// Bounds the registers: see team.cuh.
extern "C" __global__ void __launch_bounds__(mpicomm::kThreads, 1)
    mpicomm_device_counts_step(const __grid_constant__ mpicomm::Packets);

MPICOMM_KERNEL void mpicomm_device_counts_step(const __grid_constant__ mpicomm::Packets packets) {
  if (threadIdx.x < blockDim.x - mpicomm::kOverseers) mpicomm::work(packets);
  else mpicomm::oversee(packets);
}
