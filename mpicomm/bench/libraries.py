"""Other libraries that the bench compares with mpicomm.

NVIDIA's are NCCL, on ordinary CuPy arrays and on its own memory, and NVSHMEM's collectives on streams. Those of PyTorch
are its symmetric memory, its fused products, and NCCL's ``all_to_all_single``.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.compare import Library, view_bytes
from mpicomm.bench.measure import Call, LibraryError, Machine
from mpicomm.bench.operations import BARRIER, IN_PLACE, ROOT, Case, CaseBuffers, expected
from mpicomm.cli import options as command_line
from mpicomm.devices.cuda import nccl
from mpicomm.devices.cuda.driver import cuda_major

TYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2"),
)
_COLLECTIVES = {
    "allreduce": "ncclAllReduce",
    "reduce_scatter": "ncclReduceScatter",
    "allgather": "ncclAllGather",
    "bcast": "ncclBroadcast",
    "reduce": "ncclReduce",
    "gather": "ncclGather",
    "scatter": "ncclScatter",
    "alltoall": "ncclAlltoAll",
}
"""The functions by the bench's names of the operations. An older library lacks the last three functions."""
_GRANULARITY = 2 << 20
_COLLECTIVE_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class Nccl(Library):
    """An NCCL communicator. If NCCL has functions for gathers, scatters and exchanges, it calls them."""

    result_at_front = False

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        self.version = nccl.version()
        identity = command_line.on_first_rank(comm, nccl.unique_id)
        self._nccl = nccl.NcclCommunicator(comm.size, identity, comm.rank)

    @staticmethod
    def missing() -> str | None:
        return nccl.missing()

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        send, receive = (0 if each is None else int(each.data.ptr) for each in (buffers.send, buffers.receive))
        operation, dtype = case.operation, type_of(case.dtype)
        if operation is BARRIER:  # as in programs that use NCCL
            return {"": self.bind("ncclAllReduce", send, send, 1, dtype, OPS[case.op])}
        function = _COLLECTIVES.get(operation.name)
        if function is not None and nccl.has(function):
            arguments = [*([OPS[case.op]] if operation.reduces else []), *([ROOT] if operation.rooted else [])]
            return {"": self.bind(function, send, receive, case.block, dtype, *arguments)}
        counts, displs = case.sent()
        receivers = [peer for peer in range(case.size) if case.rank in case.seen_from(peer).sources]
        messages = [("ncclSend", send, peer, displs[peer], counts[peer]) for peer in receivers]
        messages += [("ncclRecv", receive, part.period, part.start, part.count) for part in expected(case)]
        calls = [
            self.bind(name, address + start * case.dtype.itemsize, count, dtype, peer)
            for name, address, peer, start, count in messages
        ]

        def grouped() -> None:
            nccl.call("ncclGroupStart")
            try:
                for call in calls:
                    call()
            finally:
                nccl.call("ncclGroupEnd")

        return {"": grouped}

    def bind(self, name: str, *arguments: Any) -> Call:
        """Return a call of an NCCL function, whose last arguments are the communicator and the stream.

        The arguments are converted once, because a C program converts none.
        """
        function: Callable[..., int] = getattr(nccl.load(), name)
        converted = tuple(
            kind(argument) if isinstance(argument, int) else argument
            for kind, argument in zip(
                function.argtypes,  # type: ignore[attr-defined]
                (*arguments, self._nccl.handle, self._machine.stream.ptr),
                strict=True,
            )
        )

        def run() -> None:
            status = function(*converted)
            if status != 0:
                nccl.check(name, status)

        return run

    def close(self) -> None:
        self._nccl.destroy()


class SymmetricNccl(Nccl):
    """NCCL on its own memory, registered as a symmetric window, because NCCL has faster kernels for such memory."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        self._windows: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []

    @staticmethod
    def missing() -> str | None:
        reason = nccl.missing()
        if reason is None and not nccl.has("ncclCommWindowRegister"):
            package = f"nvidia-nccl-cu{cuda_major()}>=2.27"
            return f"NCCL {nccl.version()} has no symmetric windows: pip install '{package}'"
        return reason

    def allocate(self, nbytes: int) -> Any:
        """Return registered memory of ncclMemAlloc."""
        memory, window = ctypes.c_void_p(), ctypes.c_void_p()
        whole = -(-nbytes // _GRANULARITY) * _GRANULARITY
        nccl.call("ncclMemAlloc", ctypes.byref(memory), whole)
        given = (memory, whole, ctypes.byref(window), _COLLECTIVE_SYMMETRIC)
        nccl.call("ncclCommWindowRegister", self._nccl.handle, *given)
        self._windows.append((memory, window))
        assert memory.value is not None
        return view_bytes(memory.value, nbytes, self)

    def close(self) -> None:
        for memory, window in self._windows:
            nccl.call("ncclCommWindowDeregister", self._nccl.handle, window)
            nccl.call("ncclMemFree", memory)
        super().close()


def type_of(dtype: np.dtype[Any]) -> int:
    """Return NCCL's number of an element type."""
    if dtype.name not in TYPES:
        raise LibraryError(f"NCCL has no {dtype}")
    return TYPES.index(dtype.name)


_NVSHMEM_TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # the other types have NumPy's names


class Nvshmem(Library):
    """NVSHMEM on its symmetric heap, through nvshmem4py's bindings."""

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
            raise LibraryError("NVSHMEM does not promise that it works in place")
        names = {
            "allreduce": f"{case.op}_reduce",
            "reduce_scatter": f"{case.op}_reducescatter",
            "allgather": "fcollect",
            "alltoall": "alltoall",
            "bcast": "broadcast",
        }
        name = f"{_NVSHMEM_TYPES.get(case.dtype.name, case.dtype.name)}_{names.get(case.operation.name)}_on_stream"
        function: Callable[..., Any] | None = getattr(self._bindings, name, None)
        if function is None:
            raise LibraryError(f"NVSHMEM has no {case.operation.name} ({case.op}) of {case.dtype}")
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


class TorchGroup(Library):
    """PyTorch's default group, with NCCL, over the ranks of ``comm``. Its calls go on the machine's stream.

    NCCL starts with the first collective of the group. ``options`` go to ``init_process_group``. If rank 0 cannot serve
    the store of the group, all ranks raise RuntimeError. Creation is collective, and blocks.
    """

    def __init__(self, comm: Communicator, machine: Machine, **options: Any) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(comm, machine)
        self._torch, self._dist = torch, dist
        self.version = str(torch.__version__)
        assert isinstance(comm.device, int)
        self._device = torch.device("cuda", comm.device)
        torch.cuda.set_device(self._device)
        stores: list[Any] = []

        def serve() -> int:
            # The store must not wait for the other ranks, because they do not know its port yet.
            stores.append(dist.TCPStore("127.0.0.1", 0, comm.size, True, wait_for_workers=False))
            return int(stores[0].port)

        port = command_line.on_first_rank(comm, serve)
        store = stores[0] if stores else dist.TCPStore("127.0.0.1", port, comm.size, False)
        dist.init_process_group("nccl", store=store, rank=comm.rank, world_size=comm.size, **options)
        self._group = dist.group.WORLD.group_name
        torch.cuda.set_stream(torch.cuda.ExternalStream(machine.stream.ptr, device=self._device))

    @staticmethod
    def missing() -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "not installed: pip install torch"
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} is without CUDA: install one that is built for CUDA {cuda_major()}"
        return None

    def close(self) -> None:
        self._torch.cuda.set_stream(self._torch.cuda.default_stream(self._device))
        self._dist.destroy_process_group()


class TorchSymmetric(TorchGroup):
    """PyTorch's symmetric memory: all-reduces on tensors that all ranks have mapped, and fused products."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        self._memory = importlib.import_module("torch.distributed._symmetric_memory")
        self._tensors: list[Any] = []

    def allocate(self, nbytes: int) -> Any:
        tensor = self._memory.empty(nbytes, dtype=self._torch.uint8, device=self._device)
        self._memory.rendezvous(tensor, self._group)
        self._tensors.append(tensor)
        return view_bytes(tensor.data_ptr(), nbytes, tensor)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        """Return one-shot and two-shot all-reduce, of which the faster one counts; in place only two-shot."""
        if case.operation.name != "allreduce" or case.op != "sum" or case.dtype.name not in ("float32", "bfloat16"):
            raise LibraryError("its kernels are for the sum of float32 and bfloat16 in allreduce")
        operations, group = self._torch.ops.symm_mem, self._group
        send, receive = self._tensor(case, buffers.send), self._tensor(case, buffers.receive)
        if case.in_place:
            return {"two_shot": lambda: operations.two_shot_all_reduce_(send, "sum", group)}
        calls: dict[str, Call] = {"one_shot": lambda: operations.one_shot_all_reduce_out(send, "sum", group, receive)}
        if case.size in (2, 4, 8):  # PyTorch compiles two-shot only for these sizes
            calls["two_shot"] = lambda: operations.two_shot_all_reduce_out(send, "sum", group, receive)
        return calls

    def product(self, kind: str, a: Any, b: Any) -> tuple[Call, Callable[[], Any]]:
        """Return a call of a product with a collective, and a function that returns the result of the last call."""
        group, operators = self._group, self._torch.ops.symm_mem
        results: list[Any] = [None]
        calls = {
            "allgather_matmul": lambda: operators.fused_all_gather_matmul(a, [b], 0, group)[1][0],
            "matmul_reduce_scatter": lambda: operators.fused_matmul_reduce_scatter(a, b, "sum", 0, group),
        }
        if kind not in calls:
            raise LibraryError("PyTorch has no such operator")

        def run() -> None:
            results[0] = calls[kind]()

        return run, lambda: results[0]

    def close(self) -> None:
        self._tensors.clear()
        super().close()

    def _tensor(self, case: Case, array: Any) -> Any:
        offsets = ((tensor, int(array.data.ptr) - tensor.data_ptr()) for tensor in self._tensors)
        tensor, start = next((tensor, start) for tensor, start in offsets if 0 <= start < tensor.nbytes)
        return tensor[start : start + array.nbytes].view(getattr(self._torch, case.dtype.name))


class TorchNccl(TorchGroup):
    """NCCL's exchange of rows. The rows of a rank lie in its buffer by their target, so nothing is packed or sorted."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        import torch

        super().__init__(comm, machine, device_id=torch.device("cuda", comm.device))
        self.version = f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        self._size = comm.size

    def calls(self, counts: Sequence[int], tokens: int, hidden: int) -> dict[str, Call]:
        """Return a dispatch with counts through the host, a combine with known counts, and an even exchange.

        ``counts`` are the rows of this rank for each rank, at most ``tokens`` with ``hidden`` elements. Collective.
        """
        torch, dist = self._torch, self._dist
        shape = (self._size * tokens, hidden)
        sent, taken = (torch.zeros(shape, dtype=torch.bfloat16, device=self._device) for _ in range(2))
        mine = torch.tensor(counts, device=self._device)
        theirs = torch.empty_like(mine)

        def dispatch() -> None:
            dist.all_to_all_single(theirs, mine)
            out, back = theirs.tolist(), mine.tolist()
            dist.all_to_all_single(taken[: sum(out)], sent[: sum(back)], out, back)

        dispatch()
        known = theirs.tolist()

        def combine() -> None:
            dist.all_to_all_single(sent[: sum(counts)], taken[: sum(known)], counts, known)

        return {"dispatch": dispatch, "combine": combine, "even": lambda: dist.all_to_all_single(taken, sent)}
