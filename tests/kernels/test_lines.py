"""LL128: packets of which eight make a line with one flag, between processes and under ThreadSanitizer."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.build import Builds, Change
from tests.kernels.collective_calls import Calls
from tests.kernels.machine import CAUGHT, Machine

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from tests.kernels.packet_rig import PacketRig
from tests.kernels.packet_runs import INBOX_NBYTES, SMALL, STARTS, run_every_size, run_long


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_size_at_which_something_changes(builds: Builds, size: int) -> None:
    run_every_size(builds, "lines", size)


@pytest.mark.parametrize("start", STARTS)
def test_hundreds_of_launches_while_numbers_begin_again(builds: Builds, start: str) -> None:
    run_long(builds, "lines", start=STARTS[start])


@pytest.mark.parametrize("nbytes", [1, 8, 100, 2000])
def test_bytes_are_moved(builds: Builds, nbytes: int) -> None:
    rig = PacketRig(Machine(builds, 4), "lines", SMALL, inbox_nbytes=INBOX_NBYTES)
    calls = Calls(rig, np.random.default_rng(nbytes))
    checks = [call(nbytes) for call in (calls.bcast, calls.relayed_bcast, calls.allgather)]
    rig.machine.run(jitter_us=100)
    for check in checks:
        check()


def test_no_race(watched_builds: Builds) -> None:
    run_long(watched_builds, "lines", start=0, batches=1)


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
