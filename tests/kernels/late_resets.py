"""Slots of packets are put back as late as fences allow, so that a mistake with fences loses packets."""

from __future__ import annotations

from tests.kernels.build import Change

LATE = [
    Change(
        "fences.cuh",
        "struct Fences {",
        """struct Late { u32 worker; std::function<void()> reset; bool asked; };  // of a slot or of scales
inline std::vector<Late>& late() {
  static thread_local std::vector<Late> all;  // of a block
  return all;
}
inline void put_back(bool (*arrives)(const Late&, u32), u32 who) {
  std::vector<Late> left, now;  // first, as others have their turn in each store
  for (const Late& each : late()) (arrives(each, who) ? now : left).push_back(each);
  late() = left;
  for (const Late& each : now) each.reset();
}

struct Fences {""",
    ),
    Change(
        "fences.cuh",
        '#include "memory_order.cuh"',
        '#include <functional>\n#include <vector>\n#include "memory_order.cuh"',
    ),
    Change(
        "fences.cuh",
        "void say(u32 worker, u32 turns) {",
        """void say(u32 worker, u32 turns) {
    for (Late& each : late()) each.asked |= each.worker == worker;
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
        "for (u32 each = 0; each < kPackets; ++each) Protocol::give_back(taken + each * kSharers);",
        """for (u32 each = 0; each < kPackets; ++each) {
        const auto reset = [=] { Protocol::give_back(taken + each * kSharers); };
        if constexpr (kLaps) late().push_back({threadIdx.x, reset, false});
        else reset();
      }""",
    ),
    Change(
        "scales.cuh",
        "store_volatile(worker.scales(worker.x.team.rank, stage, worker.rank_of(entry), place), 0);",
        """ScaleWord* const taken = worker.scales(worker.x.team.rank, stage, worker.rank_of(entry), place);
        const auto reset = [=] { store_volatile(taken, 0); };
        if constexpr (kLaps) late().push_back({threadIdx.x, reset, false});
        else reset();""",
    ),
]
"""A slot is put back when a later fence is over, and no sooner."""

LOST = "fault on rank| differ, first at "
"""The error of a run that wipes a packet out or takes one twice. It is no hang, because hanging threads come to no
fence.
"""
