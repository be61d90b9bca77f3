"""LL128: packets of which eight make a line with one flag, between processes and under ThreadSanitizer."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomm.collectives import patterns
from mpicomm.collectives.exchange import Span
from mpicomm.collectives.signature import Signature
from tests.kernels.build import Builds, Change
from tests.kernels.collective_calls import Calls
from tests.kernels.machine import CAUGHT, Machine, RunFailedError

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from tests.kernels.packet_rig import PacketRig
from tests.kernels.packet_runs import INBOX_NBYTES, SMALL, STARTS, run_every_size, run_long, run_movements


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_size_at_which_something_changes(builds: Builds, size: int) -> None:
    run_every_size(builds, "lines", size)


@pytest.mark.parametrize("start", STARTS)
def test_hundreds_of_launches_while_numbers_begin_again(builds: Builds, start: str) -> None:
    run_long(builds, "lines", start=STARTS[start])


@pytest.mark.parametrize("nbytes", [1, 8, 100, 2000])
def test_bytes_are_moved(builds: Builds, nbytes: int) -> None:
    run_movements(builds, "lines", nbytes)


def test_five_ranks_with_no_more_than_four_steps_of_room(builds: Builds) -> None:
    rig = PacketRig(Machine(builds, 5), "lines", SMALL, inbox_nbytes=4 * SMALL.threads * 16)
    calls = Calls(rig, np.random.default_rng(5), nap_us=1000)
    checks = [calls.allreduce("int32", "sum", 3001, two_shot=two_shot) for two_shot in (False, True)]
    checks.append(calls.reduce_scatter("int32", "sum", [3001] * rig.size, in_place=True))
    checks += [calls.allgather(9001), calls.relayed_bcast(30001), calls.allgather(9001)]
    rig.machine.run(seed=5, jitter_us=300)
    for check in checks:
        check()


def test_a_rank_that_does_not_come_is_missed(builds: Builds) -> None:
    machine = Machine(builds, 3)
    rig = PacketRig(machine, "lines", SMALL, inbox_nbytes=INBOX_NBYTES, timeout_s=0.3)
    dtype, count = np.dtype(np.int32), 700
    for rank in range(2):
        source, target = machine.allocate(rank, 4 * count), machine.allocate(rank, 4 * count)
        spans = Span(source.address, count), Span(target.address, count)
        rig.run(rank, patterns.allreduce(rank, 3, dtype, *spans, "sum"), Signature("Allreduce", "int32", count, "sum"))
    with pytest.raises(RunFailedError, match=r"operation=2, sequence=1, block=\d, peer=12"):
        machine.run(limit_s=20)


def test_no_race(watched_builds: Builds) -> None:
    run_long(watched_builds, "lines", start=0, batches=1)


# The second changes what stands for accesses of whole lines on a processor: what GPUs do can be seen there alone.
MISTAKES = {
    "one set of inboxes of lines": Change("packets.cu", "((launch % 2) * kStages + stage)", "(stage)"),
    "the end of a line before the rest": Change(
        "memory_order.cuh",
        "  store_relaxed(&p->first, value.first);\n  if (!ends) store_relaxed(&p->second, value.second);",
        "  if (ends) store_release(&p->second, value.second);\n  MPICOMM_SYNC_WARP();\n"
        "  store_relaxed(&p->first, value.first);\n  if (!ends) store_relaxed(&p->second, value.second);",
    ),
    "flags of lines that do not know the step": Change("packet_wires.cuh", "count << 20 | step", "count << 20"),
    "a source that goes on before the relays": Change(
        "packets.cu", "has_c ? worker", "has_c && (!kRelays || x.sources != 0) ? worker"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_seen(builds: Builds, name: str) -> None:
    with pytest.raises(AssertionError, match=CAUGHT):
        for _ in range(5):
            run_long(builds, "lines", start=100, batches=4, changes=[MISTAKES[name]], timeout_s=2)
