"""NVSHMEM's collectives that the host enqueues, through nvshmem4py's bindings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Call, Machine
from mpicomm.bench.measure import UnsupportedError
from mpicomm.bench.operations import BARRIER, IN_PLACE, ROOT, Case, CaseBuffers
from mpicomm.bench.peers import Peer, view_bytes
from mpicomm.cli import options as command_line
from mpicomm.devices.cuda.driver import cuda_major

_TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # the other types have NumPy's names


class Nvshmem(Peer):
    """NVSHMEM on its symmetric heap."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        import nvshmem.core as core
        from cuda.core import Device
        from nvshmem import bindings

        self._core, self._bindings = core, bindings
        self._stream = machine.stream.ptr
        device = Device(comm.device)
        device.set_current()
        unique = core.get_unique_id(empty=True)
        unique._data[:] = command_line.on_first_rank(comm, lambda: core.get_unique_id()._data)
        core.init(device=device, uid=unique, rank=comm.rank, nranks=comm.size, initializer_method="uid")
        self.version = str(core.get_version())
        self._team = core.Teams.TEAM_WORLD
        self._held: list[Any] = []

    @staticmethod
    def missing() -> str | None:
        if importlib.util.find_spec("nvshmem") is None:
            return f"not installed: pip install nvshmem4py-cu{cuda_major()}"
        return None

    def allocate(self, nbytes: int) -> Any:
        memory = self._core.buffer(nbytes)
        self._held.append(memory)
        return view_bytes(int(memory.handle), nbytes, memory)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        if case.operation is BARRIER:
            barrier, stream = self._bindings.barrier_all_on_stream, self._stream
            return {"": lambda: barrier(stream)}
        if case.in_place and case.operation.places != (IN_PLACE,):
            raise UnsupportedError("NVSHMEM does not promise that it works in place")
        names = {
            "allreduce": f"{case.op}_reduce",
            "reduce_scatter": f"{case.op}_reducescatter",
            "allgather": "fcollect",
            "alltoall": "alltoall",
            "bcast": "broadcast",
        }
        name = f"{_TYPES.get(case.dtype.name, case.dtype.name)}_{names.get(case.operation.name)}_on_stream"
        function: Callable[..., Any] | None = getattr(self._bindings, name, None)
        if function is None:
            raise UnsupportedError(f"NVSHMEM has no {case.operation.name} ({case.op}) of {case.dtype}")
        arguments = [self._team, int(buffers.receive.data.ptr), int(buffers.send.data.ptr), case.block]
        arguments += [ROOT, self._stream] if case.operation.rooted else [self._stream]

        def run() -> None:
            if function(*arguments):
                raise RuntimeError(f"nvshmem {name} failed")

        return {"": run}

    def close(self) -> None:
        while self._held:
            self._core.free(self._held.pop())
        self._core.finalize()
