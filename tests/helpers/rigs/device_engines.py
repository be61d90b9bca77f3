"""Only the engine of collectives on GPUs: on a communicator, with its own memory and stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.reductions import samples

Array = npt.NDArray[Any]

SUM = Signature("Allreduce", "int64", 4097, "sum")


class Memory:
    """Elements on the GPU, at any address."""

    def __init__(self, content: Array, offset: int = 0) -> None:
        import cupy

        self.dtype = content.dtype
        self.count = content.size
        self._bytes = cupy.zeros(offset + content.nbytes + 32, np.uint8)[offset : offset + content.nbytes]
        self._bytes.set(np.ascontiguousarray(content).reshape(-1).view(np.uint8))
        cupy.cuda.get_current_stream().synchronize()  # the engine works on a stream that waits for no other
        self.span = Span(int(self._bytes.data.ptr), content.size)

    def get(self) -> Array:
        return np.asarray(self._bytes.get()).view(self.dtype)


class Rig:
    """An engine on a communicator, with a stream."""

    def __init__(self, comm: mpicomm.Communicator) -> None:
        import cupy

        from mpicomm.collectives.gpu.engine import DeviceEngine

        session = comm._session.set_up("test")
        self.backend = session.gpu("test")
        self.comm = comm
        self.node = session.node
        self.rank, self.size = self.node.rank, self.node.size
        self._call_log = CallLog(session.node)
        self.engine = DeviceEngine(
            session.node, self.backend, session.kind, self._call_log, session.placement.most_on_a_device
        )
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def run(self, pattern: Pattern, signature: Signature = SUM, stream: Any = None) -> None:
        self.engine.enqueue(self.prepare(pattern, signature), (stream or self.stream).ptr)

    def prepare(self, pattern: Pattern, signature: Signature = SUM) -> Any:
        call = str(signature), signature.hash32
        return self.engine.prepare_step(pattern.operation, pattern.buffers, call, pattern.algorithm)

    def finish(self) -> None:
        self.backend.synchronize()
        self.backend.check()

    def close(self) -> None:
        self.backend.synchronize()
        for each in (self.engine, self._call_log):
            each.close_peers()
        MPI.COMM_WORLD.Barrier()
        for each in (self.engine, self._call_log):
            each.close_own()


@contextlib.contextmanager
def rig_of(comm: mpicomm.Communicator) -> Iterator[Rig]:
    import cupy

    with cupy.cuda.Device(comm.device):
        rig = Rig(comm)
        if rig.size < comm.size:
            pytest.skip("the ranks are not on one node")
        yield rig
        rig.close()


def contributions(rig: Rig, dtype: np.dtype[Any], count: int, *seed: int) -> list[Array]:
    """The contributions of all ranks, which every rank knows."""
    return [samples(dtype, count, np.random.default_rng([*seed, rank])) for rank in range(rig.size)]


def in_place_sum(rig: Rig, memory: Memory, *, two_shot: bool) -> Pattern:
    piece = memory.count * 8 if two_shot else None
    return patterns.allreduce(rig.rank, rig.size, memory.dtype, memory.span, memory.span, "sum", piece_nbytes=piece)
