// Messages with counts on the device that take one step, where blocks follow each other in both buffers.
#include "packet_worker.cuh"

#if defined(__CUDACC__)
#define MPICOMM_PIN(value) asm volatile("" : "+l"(value))
#define MPICOMM_PIN32(value) asm volatile("" : "+r"(value))
#else
#define MPICOMM_PIN(value)
#define MPICOMM_PIN32(value)
#endif
#if !defined(STAMP)
#define STAMP(i)
#define STAMPS
#endif

namespace mpicomm {

// Arrays have an entry for the distance of each rank from this rank.
using Each = u32[kRanks];

#if defined(__CUDACC__)
MPICOMM_DEVICE u32 load_now(const u8* p) {
  u32 value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(p));
  return value;
}
MPICOMM_DEVICE u64 load_now64(const u8* p) {
  u64 value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(p));
  return value;
}
#else
MPICOMM_DEVICE u32 load_now(const u8* p) { return *reinterpret_cast<const u32*>(p); }
MPICOMM_DEVICE u64 load_now64(const u8* p) { return *reinterpret_cast<const u64*>(p); }
#endif

MPICOMM_DEVICE void tell(Pair* slot, u64 number, u32 launch) {
  const Packet unit{{static_cast<u32>(number), static_cast<u32>(number >> 32), 0, 0}};
  store_volatile(slot, FlagProtocol::packet(unit, FlagProtocol::flag(launch)));
}
MPICOMM_DEVICE u64 number_in(const Pair& packet) {
  return packet.second << 32 | static_cast<u32>(packet.first);
}
MPICOMM_DEVICE Pair* shifted(u64 slot, u64 by) { return reinterpret_cast<Pair*>(slot + by); }
MPICOMM_DEVICE u32 at_distance(u32 rank, u32 distance) { return kRanks == 2 ? rank ^ distance : (rank + distance) % kRanks; }

// The counts of this rank's messages. No load waits for another load.
struct OwnCounts {
  u64 addresses[kRanks];
  u64 launch_at;
  u32 high;
  Each lows, highs;
  u64 launches;

  MPICOMM_DEVICE void find(const Packets& x, u32 rank) {
    const CountedSide& send = x.counted.send;
    high = send.wide_counts != 0 ? 4 : 0;
#pragma unroll
    for (u32 d = 0; d < kRanks; ++d) {
      addresses[d] = reinterpret_cast<u64>(send.counts) + at_distance(rank, d) * (4 + high);
      MPICOMM_PIN(addresses[d]);
    }
    launch_at = reinterpret_cast<u64>(launches_of(x.team) + blockIdx.x);
    MPICOMM_PIN(launch_at);
    MPICOMM_PIN32(high);
  }
  MPICOMM_DEVICE void load() {
#pragma unroll
    for (u32 d = 0; d < kRanks; ++d) {
      lows[d] = load_now(reinterpret_cast<const u8*>(addresses[d]));
      highs[d] = load_now(reinterpret_cast<const u8*>(addresses[d] + high));
    }
    launches = load_now64(reinterpret_cast<const u8*>(launch_at));
  }
  MPICOMM_DEVICE u32 count(u32 d) const { return high != 0 && highs[d] != 0 ? ~0u : lows[d]; }
};

constexpr u32 kFactsOfRank = 2 * kRanks + 1;

MPICOMM_DEVICE u64 fact_offset(u32 source, u32 fact) {
  return (kRanks * kMaxBlocks + source * kFactsOfRank + fact) * sizeof(Pair);
}

MPICOMM_DEVICE_CALL void push_escaped(const Packets& x, u32 peer, Pair* slot, Pair packet) {
  u8* const inboxes = x.inboxes[peer];
  u8* const escapes = inboxes + 2 * kStages * kRanks * x.inbox_nbytes;
  store_escaped(slot, escapes + (reinterpret_cast<u8*>(slot) - inboxes) / kSlotNbytes, packet);
}
MPICOMM_DEVICE_CALL u32 take_escape_of(const Packets& x, u32 launch, u32 peer, Pair* slot) {
  u8* const inboxes = x.inboxes[x.team.rank];
  u8* const escapes = inboxes + 2 * kStages * kRanks * x.inbox_nbytes;
  return take_escape(x.team, launch, peer, escapes + (reinterpret_cast<u8*>(slot) - inboxes) / kSlotNbytes);
}

MPICOMM_DEVICE_CALL void refuse_room(const Packets& x, u64 nbytes, u32 peer) {
  const u64 elements = nbytes / x.counted.itemsize;
  refuse_counts(x.team, kCountedRoom, elements < kMostReported ? elements : kMostReported, peer);
}
// The blocks of `peer` do not follow each other. Gives up if one of them lies outside of its buffer. `mine` are the
// bytes of this rank's message to it.
MPICOMM_DEVICE_CALL bool fits_at_places(const Packets& x, u32 launch, u32 peer, u64 mine) {
  const u64 set = reinterpret_cast<u64>(x.flagged.sets) + launch % 2 * x.flagged.nbytes;
  const auto load = [&](u32 source, u32 fact) { return load_volatile(shifted(set, fact_offset(source, fact))); };
  const u64 room = number_in(load(peer, 2 * kRanks)) >> 1;
  u64 needed = 0;
  for (u32 source = 0; source < kRanks; ++source) {
    Pair packet{};
    const auto absent = [&] {
      packet = load(peer, kRanks + source);
      return FlagProtocol::has_come(packet, FlagProtocol::flag(launch)) ? 0u : 1u << peer;
    };
    if (!await_ranks(x.team, launch, absent)) return false;
    const u64 nbytes = source == x.team.rank ? mine : number_in(load(source, peer)), limit = number_in(packet);
    if (nbytes > limit && room - limit + nbytes > needed) needed = room - limit + nbytes;
  }
  if (needed != 0) refuse_room(x, needed, peer);
  return needed == 0;
}
// Loads every line of the arguments, so that no later instruction waits for one.
MPICOMM_DEVICE void fetch_arguments(const Packets& x) {
#if defined(__CUDACC__) && !defined(NO_FETCH)
  const u32* const words = reinterpret_cast<const u32*>(&x);
  u32 sum = 0;
#pragma unroll
  for (u32 word = 0; word < sizeof(Packets) / 4; word += 16) sum = sum * 3 + words[word];
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9E3779B9; @p nanosleep.u32 20; }" ::"r"(sum));
#endif
}
MPICOMM_DEVICE_CALL u32 elements_in(u32 nbytes, u32 itemsize) { return nbytes / itemsize; }
MPICOMM_DEVICE u32 shift_of(u32 power) { return 31 - __clz(static_cast<int>(power)); }

MPICOMM_DEVICE void work(const Packets& x) {
  const Team& team = x.team;
  const u32 rank = team.rank, thread = threadIdx.x, workers = blockDim.x - kOverseers;
  const u32 itemsize = static_cast<u32>(x.counted.itemsize), send_room = static_cast<u32>(x.counted.send.room);
  const u32 room_nbytes = static_cast<u32>(x.counted.receive.room) * itemsize;
  u32 number_at = (blockIdx.x * workers + thread) * kPacketNbytes;
  OwnCounts own;
  own.find(x, rank);
  u64 out[kRanks], in[kRanks], heard[kRanks];
  u64 parity = kStages * kRanks * x.inbox_nbytes, flag_parity = x.flagged.nbytes;
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) {
    const u32 peer = at_distance(rank, d);
    out[d] = reinterpret_cast<u64>(x.inboxes[peer] + rank * x.inbox_nbytes) + number_at;
    in[d] = reinterpret_cast<u64>(x.inboxes[rank] + peer * x.inbox_nbytes) + number_at;
    heard[d] = reinterpret_cast<u64>(x.flagged.sets) +
        (blockIdx.x == 0 ? fact_offset(peer, rank) : (peer * kMaxBlocks + blockIdx.x) * sizeof(Pair));
    MPICOMM_PIN(out[d]);
    MPICOMM_PIN(in[d]);
    MPICOMM_PIN(heard[d]);
  }
  MPICOMM_PIN(parity);
  MPICOMM_PIN(flag_parity);
  MPICOMM_PIN32(number_at);
  fetch_arguments(x);
  STAMPS
  STAMP(0);

#if defined(MPICOMM_DRY) && defined(__CUDACC__)
  u32 live = x.unused;
#pragma unroll 1
  for (;; live = 1) {
  if (live != 0) wait_for_predecessor();
#else
  constexpr u32 live = 1;
  wait_for_predecessor();
#endif
  STAMP(1);
#if defined(MPICOMM_EARLY)
  if (live != 0) let_successor_start();
#endif
  if (live != 0) own.load();
  const u32 at = live != 0 ? number_at : ~0u;
  bool ok = true;
  Packet units[kRanks];
  Each counts, nbytes;
  u32 total = 0;
#pragma unroll
  for (u32 d = 0; d < kRanks; ++d) {
    counts[d] = own.count(d);
    ok = ok && counts[d] <= send_room;
    total += counts[d];
  }
  ok = ok && total <= send_room;
#pragma unroll
  for (u32 each = 1; each <= kRanks; ++each) {
    const u32 d = each % kRanks;
    u32 displ = 0;
#pragma unroll
    for (u32 e = 0; e < kRanks; ++e) {
      if (e != d && at_distance(rank, e) < at_distance(rank, d)) displ += counts[e];
    }
    nbytes[d] = ok ? counts[d] * itemsize : 0;
    const u8* const array = x.counted.send.buffer + static_cast<u64>(displ) * itemsize;
    if (at < nbytes[d]) units[d] = load_unit(array, width_of(array), at, nbytes[d]);
  }
  const u64 count = own.launches + 1;
  const u32 launch = static_cast<u32>(count);
  STAMP(2);
  if (live != 0) begin_round_of_flags(x.flagged, launch);
  if (!__syncthreads_and(ok || live == 0)) return;
  STAMP(3);
  const bool odd = (launch & 1) != 0;
  const u64 shift = odd ? parity : 0, flag_shift = odd ? flag_parity : 0;
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) {
    if (at >= nbytes[d]) continue;
    Pair* const slot = shifted(out[d], shift);
    const Pair packet = Protocol::packet(units[d], {});
    if (Protocol::has_escape(packet)) push_escaped(x, at_distance(rank, d), slot, packet);
    else store_volatile(slot, packet);
  }
  STAMP(4);
#if !defined(MPICOMM_EARLY)
  if (live != 0) let_successor_start();
#endif
  if (live != 0) count_launch(team, count, thread, workers);
#if !defined(POLL_ALL)
  // No message reaches beyond the buffer. Polls of idle threads would delay packets.
  if (live != 0 && at >= room_nbytes) return;
#endif
  Pair packets[kRanks], lengths[kRanks];
  const u32 flag = FlagProtocol::flag(launch);
  const auto absent = [&] {
    u32 missing = 0;
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) {
      lengths[d] = load_volatile(shifted(heard[d], flag_shift));
      packets[d] = load_volatile(shifted(in[d], shift));
    }
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) {
      const bool has_length = FlagProtocol::has_come(lengths[d], flag);
      if (!has_length || (at < static_cast<u32>(lengths[d].first) && !Protocol::has_come(packets[d], {}))) missing |= 1u << at_distance(rank, d);
    }
    return live != 0 ? missing : 0;
  };
  if (!await_ranks(team, launch, absent)) return;
  STAMP(5);
  Each received;
  u32 all = received[0] = nbytes[0];
  bool fits = true;
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) {
    received[d] = static_cast<u32>(lengths[d].first);
    fits = fits && received[d] <= room_nbytes && static_cast<u32>(lengths[d].second) == 0;
    all += received[d];
  }
  if (live != 0 && !(fits && all <= room_nbytes)) return;
#pragma unroll
  for (u32 each = 1; each <= kRanks; ++each) {
    const u32 d = each % kRanks;
    u32 place = 0;
#pragma unroll
    for (u32 e = 0; e < kRanks; ++e) {
      if (e != d && at_distance(rank, e) < at_distance(rank, d)) place += received[e];
    }
    u8* const array = x.counted.receive.buffer + place;
    if (at >= received[d]) continue;
    Packet unit = units[d];
    if (d > 0) {
      Pair packet = packets[d];
      Pair* const slot = shifted(in[d], shift);
      if (Protocol::has_escape(packet)) {
        const u32 code = take_escape_of(x, launch, at_distance(rank, d), slot);
        if (code == 0) return;
        packet = unescaped(packet, code);
      }
      unit = Protocol::unit(packet);
    }
    store_unit(array, width_of(array), at, received[d], unit);
    if (d > 0) Protocol::give_back(shifted(in[d], shift));
  }
  STAMP(6);
#if defined(MPICOMM_DRY) && defined(__CUDACC__)
  if (live != 0) break;
  }
#endif
}

MPICOMM_DEVICE void oversee(const Packets& x) {
  const Team& team = x.team;
  const u32 rank = team.rank, overseer = threadIdx.x - (blockDim.x - kOverseers);
  const bool has_peer = overseer < kRanks && overseer != rank;
  const u32 send_room = static_cast<u32>(x.counted.send.room);
  u64 flag_parity = x.flagged.nbytes;
  const u32 itemsize = static_cast<u32>(x.counted.itemsize);
  const u64 room_nbytes = x.counted.receive.room * itemsize;
  OwnCounts own;
  own.find(x, rank);
  const u64 flagged_at = x.flagged.sets - team.arenas[rank];
  u64 tells[kRanks], hears[kRanks], length_at;
  length_at = reinterpret_cast<u64>(team.arenas[overseer % kRanks] + flagged_at) + (rank * kMaxBlocks + blockIdx.x) * sizeof(Pair);
  MPICOMM_PIN(length_at);
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) {
    const u32 peer = at_distance(rank, d);
    tells[d] = reinterpret_cast<u64>(team.arenas[peer] + flagged_at) + fact_offset(rank, overseer);
    hears[d] = reinterpret_cast<u64>(x.flagged.sets) + fact_offset(peer, overseer);
    MPICOMM_PIN(tells[d]);
    MPICOMM_PIN(hears[d]);
  }
  u64 hears_room = reinterpret_cast<u64>(x.flagged.sets) + fact_offset(overseer, 2 * kRanks);
  u64 hears_from = reinterpret_cast<u64>(x.flagged.sets) + fact_offset(overseer, rank);
  MPICOMM_PIN(hears_room);
  MPICOMM_PIN(hears_from);
  fetch_arguments(x);
  STAMPS

#if defined(MPICOMM_DRY) && defined(__CUDACC__)
  u32 live = x.unused;
#pragma unroll 1
  for (;; live = 1) {
  if (live != 0) wait_for_predecessor();
#else
  constexpr u32 live = 1;
  wait_for_predecessor();
#endif
#if defined(MPICOMM_EARLY)
  if (live != 0) let_successor_start();
#endif
  STAMP(1);
  Announcements ours{}, theirs{};
  Health health;
  if (live != 0) {
    own.load();
    if (has_peer) {
      theirs = load_announcements(team, overseer);
      ours = load_said(team, overseer);
    }
    if (overseer == kRanks) health = load_health(team);
  }
  const u64 count = own.launches + 1;
  const u32 launch = static_cast<u32>(count), flag_odd = launch & 1;
  Each counts;
  u32 total = 0, bad = kRanks;
#pragma unroll
  for (u32 d = 0; d < kRanks; ++d) {
    counts[d] = own.count(d);
    if (counts[d] > send_room) bad = at_distance(rank, d);
    total += counts[d];
  }
  bool ok = bad == kRanks && total <= send_room;
  if (!ok && live != 0 && overseer == 0) refuse_counts(team, kCounts, team.names[bad < kRanks ? bad : kRanks - 1], rank);
  // The lane's message.
  u32 mine = counts[0];
#pragma unroll
  for (u32 d = 1; d < kRanks; ++d) mine = overseer == at_distance(rank, d) ? counts[d] : mine;
  mine *= itemsize;
  if (live != 0) {
    begin_round_of_flags(x.flagged, launch);
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
  }
  STAMP(2);
  if (!__syncthreads_and(ok || live == 0)) return;
  STAMP(3);
#if !defined(MPICOMM_EARLY)
  if (live != 0) let_successor_start();
#endif
  const u64 flag_shift = flag_odd != 0 ? flag_parity : 0;
  if (blockIdx.x != 0) {
    if (has_peer && live != 0) tell(shifted(length_at, flag_shift), mine, launch);
    STAMP(4);
  } else {
    // Lane f tells fact f to all peers.
    const u64 fact = overseer < kRanks ? mine : overseer < 2 * kRanks ? room_nbytes : room_nbytes << 1 | 1;
    if (overseer < kFactsOfRank && live != 0) {
#pragma unroll
      for (u32 d = 1; d < kRanks; ++d) tell(shifted(tells[d], flag_shift), fact, launch);
    }
    if (overseer < kRanks) {
    // Lane r judges rank r. It hears the lengths of all messages to rank r, the room of rank r, and the length of the
    // message from there.
    if (has_peer && live != 0 && theirs.differ_from(ours, launch - 1)) refuse(team, overseer, launch - 1);
    STAMP(4);
    Pair lengths[kRanks]{}, room_of{}, from_there{};
    u32 said = kSame;
    const u32 flag = FlagProtocol::flag(launch);
    const u64* const announced = announcements(team, rank, overseer) + launch % 2;
    const auto absent = [&] {
      u32 missing = 0;
      u64 word = 0;
#pragma unroll
      for (u32 d = 1; d < kRanks; ++d) lengths[d] = load_volatile(shifted(hears[d], flag_shift));
      if (has_peer) {
        room_of = load_volatile(shifted(hears_room, flag_shift));
        from_there = load_volatile(shifted(hears_from, flag_shift));
        word = load_relaxed(announced);
      }
#pragma unroll
      for (u32 d = 1; d < kRanks; ++d) {
        if (!FlagProtocol::has_come(lengths[d], flag)) missing |= 1u << at_distance(rank, d);
      }
      if (has_peer) {
        said = judge(team, overseer, launch, word);
        if (said == kAbsent || !FlagProtocol::has_come(room_of, flag) || !FlagProtocol::has_come(from_there, flag)) missing |= 1u << overseer;
      }
      return live != 0 ? missing : 0;
    };
    if (!await_ranks(team, launch, absent)) return;
    STAMP(5);
    u64 all = mine;
#pragma unroll
    for (u32 d = 1; d < kRanks; ++d) all += number_in(lengths[d]);
    const u64 room_fact = has_peer ? number_in(room_of) : room_nbytes << 1 | 1;
    const u32 received = has_peer ? static_cast<u32>(from_there.first) : mine;
    if (live != 0) {
      if (said == kDifferent) {
        refuse(team, overseer, launch);
      } else if (all > room_fact >> 1 && (room_fact & 1) != 0) {
        refuse_room(x, all, overseer);
      } else if ((room_fact & 1) != 0 || fits_at_places(x, launch, overseer, mine)) {
        const u32 number = (itemsize & (itemsize - 1)) == 0 ? received >> shift_of(itemsize) : elements_in(received, itemsize);
        if (x.counted.receive.wide_counts != 0) static_cast<u64*>(x.counted.receive.counts)[overseer] = number;
        else static_cast<u32*>(x.counted.receive.counts)[overseer] = number;
      }
    }
    STAMP(6);
    }
  }
#if defined(MPICOMM_DRY) && defined(__CUDACC__)
  if (live != 0) break;
  }
#endif
}

}  // namespace mpicomm

extern "C" __global__ void __launch_bounds__(mpicomm::kThreads, 1)
    mpicomm_counted_step(const __grid_constant__ mpicomm::Packets);

MPICOMM_KERNEL void mpicomm_counted_step(const __grid_constant__ mpicomm::Packets packets) {
  if (threadIdx.x < blockDim.x - mpicomm::kOverseers) mpicomm::work(packets);
  else mpicomm::oversee(packets);
}
