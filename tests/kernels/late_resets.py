"""Slots of packets are put back as late as fences allow, so that a mistake with fences loses packets."""

from __future__ import annotations

from tests.kernels.mistakes import Change

LATE = [
    Change(
        "fences.cuh",
        "struct Fences {",
        """struct Late { u32 worker; void (*reset)(void*); void* slot; bool asked; u32 taker; };  // of scales, too
struct LateResets {
  Late all[1 << 15];
  u32 count;
};
inline LateResets& late() {
  static thread_local LateResets resets;  // of a block
  return resets;
}
inline void add_late(u32 worker, void (*reset)(void*), void* slot) {
  LateResets& x = late();
  if (x.count == sizeof x.all / sizeof x.all[0]) __builtin_trap();
  x.all[x.count++] = {worker, reset, slot, false, 0};
}
inline void put_back(bool (*arrives)(const Late&, u32), u32 who) {
  LateResets& x = late();
  // This thread takes all of them first, and returns when it has reset them: others have their turn in each store.
  const u32 taker = threadIdx.x + 1;
  for (u32 i = 0; i < x.count; ++i) {
    if (x.all[i].taker == 0 && arrives(x.all[i], who)) x.all[i].taker = taker;
  }
  for (u32 i = 0; i < x.count;) {
    if (x.all[i].taker != taker) { ++i; continue; }
    const Late each = x.all[i];
    x.all[i] = x.all[--x.count];
    each.reset(each.slot);
    i = 0;
  }
}

struct Fences {""",
    ),
    Change(
        "fences.cuh",
        "void publish(u32 worker, u32 turns) {",
        """void publish(u32 worker, u32 turns) {
    for (u32 i = 0; i < late().count; ++i) late().all[i].asked |= late().all[i].worker == worker;
    if (turns == kLeft) put_back([](const Late& each, u32 me) { return each.worker == me; }, worker);""",
    ),
    Change(
        "fences.cuh",
        "      fence_slots();",
        "      for (int turn = 0; turn < 20; ++turn) MPICOMM_YIELD();\n"
        "      put_back([](const Late& each, u32 me) { return each.asked && each.worker % kLanes == me; }, overseer);",
    ),
    Change(
        "packet_worker.cuh",
        "for (u32 each = 0; each < kPackets; ++each) Protocol::reset_slot(taken + each * kSharers);",
        """for (u32 each = 0; each < kPackets; ++each) {
        auto* const slot = taken + each * kSharers;
        const auto reset = [](void* at) { Protocol::reset_slot(static_cast<decltype(slot)>(at)); };
        if constexpr (kLaps) add_late(threadIdx.x, reset, slot);
        else reset(slot);
      }""",
    ),
    Change(
        "scales.cuh",
        "store_volatile(worker.scales(worker.x.team.rank, stage, worker.rank_of(entry), slot_index), 0);",
        """ScaleWord* const taken = worker.scales(worker.x.team.rank, stage, worker.rank_of(entry), slot_index);
        const auto reset = [](void* at) { store_volatile(static_cast<ScaleWord*>(at), 0); };
        if constexpr (kLaps) add_late(threadIdx.x, reset, taken);
        else reset(taken);""",
    ),
]
"""A slot is put back when a later fence is over, and no sooner."""

LOST = "fault on rank| differ, first at "
"""The error of a run that wipes a packet out or takes one twice. It is no hang, because hanging threads come to no
fence.
"""
