"""Calls that are filled into the plans of their forms and carried out by kernels have NumPy's results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.built_in import BUILT_IN
from mpicomm.collectives.gpu.form_plan import FormPlan, form_plan
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.plain_arrays import plain_array
from mpicomm.mpi.span import Span
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.inputs.patterns import Pattern
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import Calls, random_counts
from tests.kernels.launches import kernel_of
from tests.kernels.machine import Machine
from tests.kernels.program_rig import INBOX_NBYTES, ProgramRig


class FilledRig(ProgramRig):
    """A rig on which each rank fills its calls into the plans of their forms."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, 16)
        self._plans: dict[Hashable, FormPlan] = {}
        self.launched: list[str] = []
        """The algorithms of the launches of filled calls."""
        self._nap_us = 0

    def run(
        self, rank: int, pattern: Pattern, signature: Signature, *, nap_us: int = 0, symmetric: bool = False
    ) -> None:
        b, operation = pattern.buffers, pattern.operation
        send, receive = _argument(b.send, b.send_blocks, b.dtype), _argument(b.output, b.blocks, b.dtype)
        own = b.output or (b.blocks and b.blocks[rank])
        if b.send is not None and own and b.send.pointer == own.pointer:
            send = MPI.IN_PLACE
        elif operation.send != "vector" and isinstance(send, list):
            send = send[0]
        if operation.receive != "vector" and isinstance(receive, list):
            receive = receive[0]
        op = MPI.SUM if operation.reduces else None
        call = Call(operation, Arguments(send, receive, op, b.root), rank, self.size)
        key = rank, operation, b.dtype, b.root, pattern.algorithm, type(send), type(receive)
        if key not in self._plans:
            form = Form(call, rank, self.size)
            load = partial(self._launcher, rank)
            self._plans[key] = form_plan(form, call.signature, pattern.algorithm, BUILT_IN, self.nodes[rank], load)
        plan, (sent, received) = self._plans[key], map(plain_array, (send, receive))
        assert sent is not None and received is not None and plan.takes(sent, received)
        assert plan.fill(sent, received)
        self._nap_us = nap_us
        plan.launch(7)
        self.launched.append(plan.choice.algorithm)

    def _launcher(self, rank: int, variant: Any, arguments: Any, early: bool) -> Any:
        kernel = kernel_of(self.machine.builds, variant)

        def launch(stream: int, blocks: int, threads: int) -> None:
            self.machine.launch(rank, kernel, [arguments], blocks=blocks, threads=threads, nap_us=self._nap_us)

        return SimpleNamespace(launch=launch)


def _argument(span: Span | None, blocks: Sequence[Span] | None, dtype: np.dtype[Any]) -> Any:
    """Return the argument of a call for a buffer of a pattern."""
    if blocks is None:
        return None if span is None else DeviceArray(span.pointer, span.count, dtype)
    base = min(block.pointer for block in blocks)
    displs = [(block.pointer - base) // dtype.itemsize for block in blocks]
    counts = [block.count for block in blocks]
    return [DeviceArray(base, max(map(sum, zip(counts, displs, strict=True))), dtype), counts, displs, None]


@pytest.mark.parametrize(("size", "name"), [(2, "float32"), (3, "int32")])
def test_filled_calls_of_any_size(builds: Builds, monkeypatch: pytest.MonkeyPatch, size: int, name: str) -> None:
    read_device_arrays(monkeypatch)
    rig = FilledRig(Machine(builds, size))
    rng = np.random.default_rng(size)
    calls = Calls(rig, rng, nap_us=1000)
    for count in (
        700,
        1,
        4097,
        INBOX_NBYTES // 4 + 1,
        699,
    ):
        checks = [calls.allreduce(name, "sum", count, two_shot=two_shot) for two_shot in (False, True)]
        checks += [calls.bcast(4 * count, algorithm) for algorithm in ("two_shot", "chain")]
        checks.append(calls.reduce(name, "sum", count, "chain"))
        checks.append(calls.allgather(4 * count))
        checks.append(calls.alltoallv(random_counts(rng, size, (0, 1, 4 * count))))
        checks.append(calls.allreduce(name, "sum", count))
        rig.machine.run(seed=count, jitter_us=200)
        for check in checks:
            check()
        rig.machine.clear()
    assert {*rig.launched} == {"one_shot", "two_shot", "chain"}
