"""NCCL on ordinary CuPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.content import expected
from mpicomm.bench.machine import Call, Machine
from mpicomm.bench.operations import BARRIER, ROOT, Case, CaseBuffers
from mpicomm.bench.peers import nccl_library
from mpicomm.bench.peers.base import UnsupportedError, from_first

missing = nccl_library.missing


class Nccl:
    """An NCCL communicator of all ranks. If NCCL has functions for gathers, scatters and exchanges, it calls them."""

    exact = False
    capturable = True
    result_at_front = False

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        self.version = nccl_library.version()
        self._machine = machine
        self._handle = ctypes.c_void_p()
        identity = from_first(comm, nccl_library.unique_id)
        nccl_library.call(
            "ncclCommInitRank",
            ctypes.byref(self._handle),
            comm.size,
            nccl_library.UniqueId.from_buffer_copy(identity),
            comm.rank,
        )

    def allocate(self, nbytes: int) -> Any:
        """Return a CuPy array."""
        return self._machine.empty(nbytes)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        """Return NCCL's call."""
        dtype = nccl_library.type_of(case.dtype)
        if dtype is None:
            raise UnsupportedError(f"NCCL has no {case.dtype}")
        return {"": self._call(case, _address(buffers.send), _address(buffers.receive), dtype)}

    def on_memory(
        self, function: str, send: int, receive: int, count: int, dtype: np.dtype[Any], *, reduces: bool
    ) -> Call:
        """Return a call of an NCCL function on memory at two addresses, with a sum if it reduces."""
        number = nccl_library.type_of(dtype)
        if number is None:
            raise UnsupportedError(f"NCCL has no {dtype}")
        reduction = [nccl_library.OPS["sum"]] if reduces else []
        return _bind(function, send, receive, count, number, *reduction, self._handle, self._machine.stream.ptr)

    def close(self) -> None:
        """Destroy the communicator."""
        nccl_library.call("ncclCommDestroy", self._handle)

    def _call(self, case: Case, send: int, receive: int, dtype: int) -> Call:
        operation, end = case.operation, (self._handle, self._machine.stream.ptr)
        reduction = [nccl_library.OPS[case.op]]
        if operation is BARRIER:  # as in programs that use NCCL
            return _bind("ncclAllReduce", send, send, 1, dtype, *reduction, *end)
        function = nccl_library.COLLECTIVES.get(case.name)
        if function is not None and nccl_library.has(function):
            arguments = [*(reduction if operation.reduces else []), *([ROOT] if operation.rooted else [])]
            return _bind(function, send, receive, case.block, dtype, *arguments, *end)
        return _group(
            [
                _bind(name, address + start * case.dtype.itemsize, count, dtype, peer, *end)
                for name, address, messages in (
                    ("ncclSend", send, _sent(case)),
                    ("ncclRecv", receive, _received(case)),
                )
                for peer, start, count in messages
            ]
        )


def _bind(name: str, *arguments: Any) -> Call:
    """Return a call with arguments that are converted once, because a C program converts none."""
    function: Callable[..., int] = getattr(nccl_library.load(), name)
    converted = tuple(
        kind(argument) if isinstance(argument, int) else argument
        for kind, argument in zip(function.argtypes, arguments, strict=True)  # type: ignore[attr-defined]
    )

    def run() -> None:
        status = function(*converted)
        if status != 0:
            nccl_library.check(name, status)

    return run


def _group(calls: list[Call]) -> Call:
    def run() -> None:
        nccl_library.call("ncclGroupStart")
        try:
            for call in calls:
                call()
        finally:
            nccl_library.call("ncclGroupEnd")

    return run


def _sent(case: Case) -> list[tuple[int, int, int]]:
    """Return (peer, first element, elements) of each message that a rank sends."""
    counts, displs = case.sent()
    receivers = [peer for peer in range(case.size) if case.rank in case.seen_from(peer).sources]
    return [(peer, displs[peer], counts[peer]) for peer in receivers]


def _received(case: Case) -> list[tuple[int, int, int]]:
    return [(piece.period, piece.start, piece.count) for piece in expected(case)]


def _address(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)
