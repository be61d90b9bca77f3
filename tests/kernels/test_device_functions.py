"""Each function of mpicomm.cuh in a kernel of a user, called by threads, warps and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.build import Builds
from tests.kernels.device_functions_rig import (
    FUNCTIONS,
    GROUPS,
    IN_TIME,
    SOURCE,
    Messages,
    Rig,
    exchange,
    hand_over,
    reduce_all,
)
from tests.kernels.machine import controls, without_mistake
from tests.kernels.mistakes import Change, Changes

# Lengths around a unit, a packet and a line, and longer than the bytes that all threads move at once.
SHAPES = [
    *(Messages(nbytes, rounds=2) for nbytes in (0, 1, 16, 1500)),
    Messages(117, 3, 3, rounds=4),  # aligned alike
    Messages(200, 8, 4, rounds=4),
    Messages(333, 5, 12, rounds=2),
    Messages(502, 0, 6, rounds=2),
]
REDUCTIONS = [
    *(("float32", "sum", group, Messages(500, 0, 0)) for group in GROUPS),
    ("float32", "max", "Block", Messages(404, 8, 4)),
    ("float16", "sum", "Warp", Messages(1250, 6, 6)),
    ("bfloat16", "min", "Thread", Messages(34, 0, 14)),
    ("int32", "sum", "Warp", Messages(4, 12, 0)),
]


def require_all_in_time(failed: Sequence[npt.NDArray[np.uint32]]) -> None:
    assert not any(each.any() for each in failed), IN_TIME


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_messages_arrive(builds: Builds, function: str, group: str) -> None:
    for number, messages in enumerate(SHAPES):
        require_all_in_time(exchange(Rig(builds, group, messages, size=1 + number % 4), function))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wait_for_a_rank_that_does_not_come_ends_on_all_threads(builds: Builds, function: str) -> None:
    for group in GROUPS:
        failed = exchange(Rig(builds, group, Messages(100), absent=1), function, timeout_s=0.001)
        assert [each.all() for each in failed] == [True, False, True]
        assert not failed[1].any()


@pytest.mark.parametrize("group", GROUPS)
def test_blocks_of_a_rank_hand_data_over(builds: Builds, group: str) -> None:
    require_all_in_time(hand_over(Rig(builds, group, Messages(200), size=1)))


@pytest.mark.parametrize(("dtype", "op", "group", "messages"), REDUCTIONS, ids=str)
def test_reduction_equals_numpys_in_rank_order(
    builds: Builds, dtype: str, op: str, group: str, messages: Messages
) -> None:
    require_all_in_time(reduce_all(Rig(builds, group, messages), dtype, op))


def run(
    builds: Builds,
    name: str,
    group: str,
    *,
    seed: int = 0,
    changes: Changes = (),
    timeout_s: float = 20,
) -> None:
    """Run one kernel of device_functions.cu between three ranks."""
    messages = Messages(200, 4, 8) if name == "reduce_all" else Messages(200, 3, 5)
    rig = Rig(builds, group, messages, changes=changes)
    if name == "reduce_all":
        require_all_in_time(reduce_all(rig, "float32", "sum", timeout_s=timeout_s))
    elif name == "between_blocks":
        require_all_in_time(hand_over(rig, timeout_s=timeout_s))
    else:
        require_all_in_time(exchange(rig, name, timeout_s=timeout_s))


def header(name: str, old: str, new: str) -> Change:
    return Change(f"include/mpicomm/{name}.cuh", old, new)


SYNC = "  group.sync();  // "
CONTROLS: list[tuple[str, str, Change]] = [
    ("put_around", "Block", header("copies", f"{SYNC}a thread copies bytes", "  // ")),
    ("put_around", "Warp", header("copies", f"{SYNC}a thread copies bytes", "  // ")),
    ("put_around", "Block", header("flags", "  group.sync();\n  if (group", "  if (group")),
    ("put_around", "Warp", header("flags", "else store_release(", "else store_relaxed(")),
    ("put_around", "Warp", header("flags", "has_reached(load_acquire(", "has_reached(load_relaxed(")),
    ("put_around", "Block", header("flags", "return group.all(", "return (")),
    ("get_around", "Block", header("copies", f"{SYNC}without it", "  // ")),
    ("get_around", "Warp", header("copies", f"{SYNC}without it", "  // ")),
    ("get_around", "Warp", header("groups", "    __syncwarp(kWarp);  // a vote", "    // ")),
    ("get_around", "Warp", header("groups", "{ __syncwarp(kWarp); }", "{}")),
    ("packets_to_all", "Block", header("packets", f"{SYNC}a thread sends", "  // ")),
    ("packets_to_all", "Block", header("packets", "return group.all(come)", "return come")),
    ("packets_to_all", "Warp", Change("flag_protocol.cuh", "static_cast<u32>(packet.first >> 32) == flag && ", "")),
    ("packets_to_all", "Warp", Change("flag_protocol.cuh", " && static_cast<u32>(packet.second >> 32) == flag", "")),
    ("packets_to_all", "Warp", Change(SOURCE.name, "round % 2 * x.size", "0 * x.size")),
    ("between_blocks", "Warp", header("flags", "store_release_on_device(", "store_relaxed(")),
    ("between_blocks", "Warp", header("flags", "load_acquire_on_device(", "load_relaxed(")),
    ("meet", "Block", header("barrier", "  group.sync();\n", "")),
    ("meet", "Warp", header("barrier", "    store_release(", "    store_relaxed(")),
    ("meet", "Warp", header("barrier", "has_reached(load_acquire(", "has_reached(load_relaxed(")),
    ("meet", "Warp", header("barrier", "return group.all(come)", "return come")),
    ("meet", "Warp", header("barrier", "load_relaxed(counts + rank) + 1;", "1;")),
    ("reduce_all", "Warp", header("reduce_load", f"{SYNC}without it", "  // ")),
    ("reduce_all", "Block", Change("reduce_bytes.cuh", "source(place);", "source(sources - 1 - place);")),
]
MISTAKES = {f"{name}-{group}-{change.old}": (name, group, change) for name, group, change in CONTROLS}
test_mistake_is_seen = controls(partial(run, timeout_s=1), MISTAKES, watched=True)


@pytest.mark.parametrize("name", [*FUNCTIONS, "between_blocks", "reduce_all"])
def test_no_race(watched_builds: Builds, name: str) -> None:
    for group in ("Warp", "Block"):
        run(watched_builds, name, group, changes=without_mistake(MISTAKES))
