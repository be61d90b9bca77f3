"""The calls that are measured: mpicomm's call, its parts, and the calls of other libraries."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Call, GpuMachine
from mpicomm.bench.peers.torch_group import begin_group
from mpicomm.bench.products.cases import Matrices
from mpicomm.mpi.types import covered_dtype

PEERS = ("nccl", "torch")
Prepare = Callable[[Matrices], tuple[Call, Callable[[], Any]]]
"""It returns a call, and a function that returns the result of the last call."""


def own(comm: Communicator) -> Prepare:
    """Return mpicomm's call."""

    def prepare(matrices: Matrices) -> tuple[Call, Callable[[], Any]]:
        call = getattr(comm, matrices.case.kind)
        return lambda: call(matrices.a, matrices.b, matrices.out), lambda: matrices.out

    return prepare


def collective(comm: Communicator) -> Prepare:
    """Return mpicomm's collective alone."""

    def prepare(matrices: Matrices) -> tuple[Call, Callable[[], Any]]:
        return _collective(comm, matrices), lambda: None

    return prepare


def serial(comm: Communicator) -> Prepare:
    """Return mpicomm's collective and the product, one after the other."""
    return lambda matrices: _one_after_the_other(matrices, _collective(comm, matrices))


def _collective(comm: Communicator, matrices: Matrices) -> Call:
    if matrices.case.kind == "allgather_matmul":
        return lambda: comm.Allgather(matrices.a, matrices.whole)
    if matrices.case.kind == "matmul_reduce_scatter":
        return lambda: comm.Reduce_scatter_block(matrices.whole, matrices.out)
    return lambda: comm.Allreduce(MPI.IN_PLACE, matrices.out)


def _one_after_the_other(matrices: Matrices, collective: Call) -> tuple[Call, Callable[[], Any]]:
    kind = matrices.case.kind
    if kind == "allgather_matmul":
        multiply = matrices.multiplying(matrices.whole, matrices.b, matrices.out)
        calls = (collective, multiply)
    else:
        partial = matrices.whole if kind == "matmul_reduce_scatter" else matrices.out
        calls = (matrices.multiplying(matrices.a, matrices.b, partial), collective)

    def both() -> None:
        for call in calls:
            call()

    return both, lambda: matrices.out


def missing(name: str, comm: Communicator) -> str | None:
    """Return why a library cannot be compared with, or None. Local."""
    if comm.device == "cpu":
        return "it is for arrays on GPUs"
    if name == "nccl":
        from mpicomm.bench.peers import nccl

        return nccl.missing()
    return None


class SerialNccl:
    """NCCL's collective and the product, one after the other."""

    capturable = True

    def __init__(self, comm: Communicator, machine: GpuMachine) -> None:
        from mpicomm.bench.peers import nccl

        self._nccl = nccl.Nccl(comm, machine)
        self.version = self._nccl.version

    def prepare(self, matrices: Matrices) -> tuple[Call, Callable[[], Any]]:
        """See `Prepare`."""
        kind, out, whole = matrices.case.kind, matrices.out, matrices.whole
        dtype = covered_dtype(str(out.dtype).removeprefix("torch."))
        if kind == "allgather_matmul":
            given: tuple[Any, ...] = "ncclAllGather", matrices.a, whole, matrices.a.numel()
        elif kind == "matmul_reduce_scatter":
            given = "ncclReduceScatter", whole, out, out.numel()
        else:
            given = "ncclAllReduce", out, out, out.numel()
        function, send, receive, count = given
        call = self._nccl.on_memory(
            function, send.data_ptr(), receive.data_ptr(), count, dtype, reduces=kind != "allgather_matmul"
        )
        return _one_after_the_other(matrices, call)

    def close(self) -> None:
        """Destroy the communicator."""
        self._nccl.close()


class FusedTorch:
    """The fused operators of PyTorch's symmetric memory, without multicast."""

    capturable = False  # PyTorch does not say that graphs can contain them

    def __init__(self, comm: Communicator, machine: GpuMachine) -> None:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch
        import torch.distributed as dist

        importlib.import_module("torch.distributed._symmetric_memory")  # defines the operators
        self.version = str(torch.__version__)
        self._operators, self._dist = torch.ops.symm_mem, dist
        begin_group(comm)
        self._group = dist.group.WORLD.group_name

    def prepare(self, matrices: Matrices) -> tuple[Call, Callable[[], Any]]:
        """See `Prepare`."""
        a, b, group, operators = matrices.a, matrices.b, self._group, self._operators
        results: list[Any] = [None]

        def gather() -> None:
            results[0] = operators.fused_all_gather_matmul(a, [b], 0, group)[1][0]

        def scatter() -> None:
            results[0] = operators.fused_matmul_reduce_scatter(a, b, "sum", 0, group)

        calls = {"allgather_matmul": gather, "matmul_reduce_scatter": scatter}
        if matrices.case.kind not in calls:
            raise RuntimeError("PyTorch has no such operator")
        return calls[matrices.case.kind], lambda: results[0]

    def close(self) -> None:
        """End the process group."""
        self._dist.destroy_process_group()
