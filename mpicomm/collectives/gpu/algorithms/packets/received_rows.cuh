// Rows that other ranks have reduced, and that this rank normalises as they come: stage C of packets.cu.
//
// The first thread of a group takes the statistics of the rows that end with a step, and the group
// meets. Then each thread normalises its units of the earlier steps of these rows, and takes and
// normalises the units of the step itself. So nothing remains to be done after the last packet.
#pragma once

#include "packet_worker.cuh"

namespace mpicomm {

#if defined(MPICOMM_WEIGHT) && defined(MPICOMM_FAN_OUT)

struct ReceivedRows {
  const Rows& rows;
  u64 row = 0;  // of the step of stage C, with its part
  u32 part = 0;
  u32 turn = 0;  // the index of the statistics that these rows use

  // The next step of stage C is the present step of stage B.
  MPICOMM_DEVICE void follow() { row = rows.course.row, part = rows.course.part; }

  // Whether a shard has such a row, and another rank reduces it.
  MPICOMM_DEVICE bool has_row(u32 shard) const { return shard != rows.own && rows.has_row(shard, row); }

  // Takes the units of h from `ranks`, at offset `at` of their shards, whose slots `load_slots` has loaded. A
  // thread that breaks off calls `leave`. Returns false if the thread must leave.
  template <class Leave>
  MPICOMM_DEVICE bool take(
      const Worker& worker, SlotPackets (&units)[kOthers], u32 ranks, u64 at, u64 slot_index, const Leave& leave) {
    const bool ends = rows.course.ends(part);
    if (ends && !take_statistics(worker, ranks, slot_index)) return false;
#pragma unroll 1
    for (u32 each = ends ? 0 : part; each <= part; ++each) {
      if (each == part && !take_units(worker, units, ranks, at, slot_index, leave)) return false;
      if (ends) normalise(worker, units, each);
    }
    if (ends) turn ^= 1;
    return true;
  }

  // Publishes the statistics of the rows to the group. Returns false if the threads must leave.
  //
  // A slow thread may still read them afterwards. The next statistics in this place come two rows later.
  // They come after the barrier of the next row, which the slow thread has to reach first.
  MPICOMM_DEVICE bool take_statistics(const Worker& worker, u32 ranks, u64 slot_index) const {
    bool took = true;
    if (rows.course.thread == 0 && ranks != 0) {
      SlotPackets packets[kOthers];
      worker.load_slots(packets, kStatistics, ranks, slot_index);
      took = worker.take(packets, kStatistics, ranks, slot_index);
#pragma unroll
      for (u32 entry = 0; entry < kOthers; ++entry) {
        if (!took || !is_among(ranks, entry)) continue;
        const u32 shard = worker.rank_of(entry);
        const Packet packet = Protocol::unit(packets[entry].packets[0]);
        rows.memory.statistics[turn][shard] = packet;
        store_scale(rows.norm, rows.row_of(shard, row), __builtin_bit_cast(Statistics, packet));
      }
    }
    return row_barrier(rows.barrier, took);
  }

  // Takes and stores the units of this step.
  template <class Leave>
  MPICOMM_DEVICE bool take_units(
      const Worker& worker,
      SlotPackets (&units)[kOthers],
      u32 ranks,
      u64 at,
      u64 slot_index,
      const Leave& leave) const {
    const bool took = ranks == 0 || worker.take(units, 1, ranks, slot_index);
    if (kScaledGroups && rows.course.ends(part)) {
      // Threads of a warp find scales together, so all threads leave or none.
      if (!row_barrier(rows.barrier, took)) return false;
    } else if (!took) {
      leave();
      return false;
    }
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      if (is_among(ranks, entry)) rows.store(worker.rank_of(entry), part, at, unit_of(units[entry]));
    }
    return true;
  }

  // Normalises the units of step `each` of the rows. `units` are of the last step.
  MPICOMM_DEVICE void normalise(const Worker& worker, const SlotPackets (&units)[kOthers], u32 each) const {
    const u64 at = rows.course.at(row, each), packet = rows.course.packet_of(each);
    const bool has_unit = packet < rows.course.packets();
    if (!kScaledGroups && !has_unit) return;
    const u32 count = !kScaledGroups || has_unit ? kElements : 0;
    const Weights weights(rows.norm, packet * kElements, count);
    // One copy of the code that quantizes serves all shards.
#pragma unroll(kQuantizes ? 1 : kOthers)
    for (u32 entry = 0; entry < kOthers; ++entry) {
      const u32 shard = worker.rank_of(entry);
      if (!has_row(shard)) continue;
      Packet h = unit_of(select(units, entry));
      if (each < part) h = rows.load(shard, each, at);
      const auto statistics = __builtin_bit_cast(Statistics, rows.memory.statistics[turn][shard]);
      store_normal(rows.norm, rows.row_of(shard, row), packet * kElements, weights, h, count, statistics);
    }
  }

  MPICOMM_DEVICE static Packet unit_of(const SlotPackets& held) { return Protocol::unit(held.packets[0]); }
};

#endif

}  // namespace mpicomm
