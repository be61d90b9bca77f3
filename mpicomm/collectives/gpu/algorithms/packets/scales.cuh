// The scales of the units of a turn, if packets carry quantized elements: how a worker takes them.
// units.cuh says where they lie. Other packets have no scales.
#pragma once

#include "packet_worker.cuh"

namespace mpicomm {

#if defined(MPICOMM_WIRE)
struct Scales {
  u32 of[kOthers];

  MPICOMM_DEVICE Unit unit(u32 entry, const SlotPackets& held) const {
    Unit unit;
#pragma unroll
    for (u32 part = 0; part < kParts; ++part) {
      unit.quantized[part] = Protocol::unit(held.packets[part]);
      unit.scales[part] = of[entry] >> part * 8 & 0xFF;
    }
    return unit;
  }

  // Loads the scales beside the slots of a stage for each of `ranks`.
  MPICOMM_DEVICE void load(const Worker& worker, u32 stage, u32 ranks, u64 slot_index) {
    const u32 own = worker.x.team.rank;
#pragma unroll
    for (u32 entry = 0; entry < kOthers; ++entry) {
      if (!is_among(ranks, entry)) continue;
      of[entry] = load_volatile(worker.scales(own, stage, worker.rank_of(entry), slot_index));
    }
  }

  // Takes the scales of `ranks`, after `load` has loaded them once, and resets them. `took` is
  // whether this thread has taken its packets. Returns false if the kernel must leave. All threads
  // of the warp call it together.
  MPICOMM_DEVICE bool take(const Worker& worker, u32 stage, u32 ranks, u64 slot_index, bool took) {
    const auto missing = [&] {
      u32 absent = 0;
#pragma unroll
      for (u32 entry = 0; entry < kOthers; ++entry) {
        if (is_among(ranks, entry) && of[entry] == 0) absent |= 1u << worker.rank_of(entry);
      }
      return absent;
    };
    const auto reload = [&] {
      load(worker, stage, ranks, slot_index);
      return missing();
    };
    if (took && missing() != 0) took = await_ranks(worker.x.team, worker.launch, reload);
    // Without this vote the reset below could come before another thread of the warp has loaded the
    // scales. That thread would wait for ever. A thread that leaves takes all of them along, because
    // the others would wait for it when they quantize their next part.
    if (!__all_sync(kWarp, took)) return false;
    if (is_first_of_block()) {
#pragma unroll
      for (u32 entry = 0; entry < kOthers; ++entry) {
        if (!is_among(ranks, entry)) continue;
        store_volatile(worker.scales(worker.x.team.rank, stage, worker.rank_of(entry), slot_index), 0);
      }
    }
    return true;
  }
};
#else
struct Scales {
  MPICOMM_DEVICE static Unit unit(u32, const SlotPackets& held) { return Protocol::unit(held.packets[0]); }
  MPICOMM_DEVICE static void load(const Worker&, u32, u32, u64) {}
  MPICOMM_DEVICE static bool take(const Worker&, u32, u32, u64, bool took) { return took; }
};
#endif

}  // namespace mpicomm
