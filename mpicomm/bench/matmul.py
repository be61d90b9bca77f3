"""``python -m mpicomm.bench matmul``: products that overlap with a collective, beside their parts and other libraries.

On GPUs PyTorch multiplies, on the host NumPy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.bench.compare import OWN, Library, open_libraries
from mpicomm.bench.libraries import OPS, Nccl, TorchSymmetric, type_of
from mpicomm.bench.measure import Call, CheckedCall, LibraryError, Measured, Measuring, Trial, machine_of
from mpicomm.bench.report import Report, ResultRow
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.types import covered_dtype

NAME = "matmul"
_PEERS: dict[str, type[Library]] = {"nccl": Nccl, "torch": TorchSymmetric}
_PARTS = ("collective", "product")
_KINDS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")
_DTYPES = ("bfloat16", "float16", "float32", "float64")

Product = tuple[Call, Callable[[], Any] | None]
"""A call, and a function that returns the result of the last call; None for a part without a result."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.command_parser(
        f"bench {NAME}",
        "Time products that overlap with a collective, check their results, and compare with their parts "
        "and with other libraries.",
        peers=_PEERS,
    )
    result.add_argument("matmul", choices=(NAME,), help=argparse.SUPPRESS)
    sizes = arguments.list_of(arguments.parse_size)
    rows = "of the product; default: 1K,4K,16K, on the cpu 256,512"
    result.add_argument("--rows", type=sizes, metavar="N,...", help=rows)
    result.add_argument("--shape", type=_shape, metavar="K,N", help="of the weights; default: 8K,7K, on the cpu 1K,512")
    count = arguments.count_from
    result.add_argument("-d", "--datatype", choices=_DTYPES, default=None, help="default: bfloat16, on the cpu float32")
    result.add_argument("-n", "--iters", type=count(1), default=5, metavar="N", help="calls of a round; default: 5")
    result.add_argument("-G", "--rounds", type=count(1), default=7, metavar="N", help="timed rounds; default: 7")
    return result


def _shape(text: str) -> tuple[int, int]:
    sizes = arguments.list_of(arguments.parse_size)(text)
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: use K,N, the two sizes of the weights, as in 8K,7K")
    return sizes[0], sizes[1]


class Matrices:
    """The matrices of one product on one rank, of PyTorch on a GPU and of NumPy on the host.

    The product is of ``rows`` x ``inner`` by ``inner`` x ``columns`` on each rank.
    """

    def __init__(self, comm: Communicator, kind: str, rows: int, inner: int, columns: int, dtype: str) -> None:
        self._comm, self._kind, self._dtype = comm, kind, dtype
        self._gathers, scatters = kind == "allgather_matmul", kind == "matmul_reduce_scatter"
        self._on_gpu = isinstance(comm.device, int)
        self._xp: Any = np
        made: dict[str, Any] = {}
        if self._on_gpu:
            import torch

            self._xp = torch
            made = {"device": torch.device("cuda", comm.device)}
        self._made = {**made, "dtype": getattr(self._xp, dtype)}
        shard = rows // comm.size
        self.a = self._xp.empty((shard if self._gathers else rows, inner), **self._made)
        self.b = self._xp.empty((inner, columns), **self._made)
        self.out = self._xp.empty((shard if scatters else rows, columns), **self._made)
        self._whole = self._xp.empty((rows, inner if self._gathers else columns), **self._made)
        """The gathered input, or the partial sums, of calls that run one after the other."""
        self._product = self._xp.empty((rows, columns), **self._made)
        """The result of the part that only multiplies."""

    def fill_exactly(self) -> None:
        """Fill the inputs with few small integers, so that all sums are exact in every element type and order."""
        self.a[...] = self._integers(self._comm.rank, *self.a.shape)
        self.b[...] = self._integers(100 + self._comm.rank, *self.b.shape)

    def fill_as_in_programs(self) -> None:
        """Fill the inputs with normal numbers, because a GPU needs less power for products of few small integers."""
        rng = np.random.default_rng(self._comm.rank)
        for array in (self.a, self.b):
            if self._on_gpu:
                array.normal_()
            else:
                array[...] = rng.standard_normal(array.shape)

    def count_wrong(self, result: Callable[[], Any]) -> int:
        """Return how many elements of a result are wrong, after `fill_exactly`."""
        comm = self._comm
        ranks = [self._integers(rank, *self.a.shape) for rank in range(comm.size)]
        if self._gathers:
            wanted = self._xp.concatenate(ranks) @ self.b
        else:
            wanted = sum(a @ self._integers(100 + rank, *self.b.shape) for rank, a in enumerate(ranks))
            begin = comm.rank * len(self.out) if self._kind == "matmul_reduce_scatter" else 0
            wanted = wanted[begin : begin + len(self.out)]
        return int((result() != wanted).sum())

    def products(self, libraries: Mapping[str, Any]) -> dict[str, Callable[[], Product]]:
        """Return the functions that make the measured calls, by name. They fail if a library has no such call."""
        comm, kind = self._comm, self._kind
        collectives: dict[str, Call] = {
            "allgather_matmul": lambda: comm.Allgather(self.a, self._whole),
            "matmul_reduce_scatter": lambda: comm.Reduce_scatter_block(self._whole, self.out),
            "matmul_allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, self.out),
        }
        collective, fused = collectives[kind], getattr(comm, kind)
        a = self._whole if self._gathers else self.a
        made: dict[str, Callable[[], Product]] = {
            "collective": lambda: (collective, None),
            "product": lambda: (lambda: self._xp.matmul(a, self.b, out=self._product), None),
            OWN: lambda: (lambda: fused(self.a, self.b, self.out), lambda: self.out),
            "serial": lambda: self._serial(collective),
        }
        if "nccl" in libraries:
            made["nccl"] = lambda: self._serial(self._by_nccl(libraries["nccl"]))
        if "torch" in libraries:
            made["torch"] = lambda: libraries["torch"].product(kind, self.a, self.b)
        return made

    def _serial(self, collective: Call) -> Product:
        def gather_first() -> None:
            collective()
            self._xp.matmul(self._whole, self.b, out=self.out)

        def reduce_last() -> None:
            self._xp.matmul(self.a, self.b, out=self.out if self._kind == "matmul_allreduce" else self._whole)
            collective()

        return gather_first if self._gathers else reduce_last, lambda: self.out

    def _by_nccl(self, nccl: Nccl) -> Call:
        function, send, receive, counted = {
            "allgather_matmul": ("ncclAllGather", self.a, self._whole, self.a),
            "matmul_reduce_scatter": ("ncclReduceScatter", self._whole, self.out, self.out),
            "matmul_allreduce": ("ncclAllReduce", self.out, self.out, self.out),
        }[self._kind]
        memory = send.data_ptr(), receive.data_ptr(), counted.numel()
        op = [] if self._gathers else [OPS["sum"]]
        return nccl.bind(function, *memory, type_of(covered_dtype(self._dtype)), *op)

    def _integers(self, seed: int, rows: int, columns: int) -> Any:
        if self._on_gpu:
            generator = self._xp.Generator(device=self._made["device"]).manual_seed(seed)
            signs = self._xp.randint(-8, 9, (rows, columns), device=self._made["device"], generator=generator)
            return ((signs == 8).int() - (signs == -8).int()).to(self._made["dtype"])
        signs = np.random.default_rng(seed).integers(-8, 9, (rows, columns))
        return (signs == 8).astype(self._dtype) - (signs == -8).astype(self._dtype)


def main() -> int:
    """Run the command line on this rank. Collective."""
    run = command_line.Run(parser(), one_node=True)
    options, comm = run.options, run.comm
    on_host = comm.device == "cpu"
    options.rows = options.rows or ([256, 512] if on_host else [1024, 4096, 16384])
    inner, columns = options.shape = options.shape or ((1024, 512) if on_host else (8192, 7168))
    if wrong_rows := [rows for rows in options.rows if rows % comm.size]:
        size = comm.size
        raise InvalidUsageError(f"--rows {wrong_rows[0]}: {size} ranks cannot share them: pass a multiple of {size}")
    if on_host and options.datatype == "bfloat16":
        raise InvalidUsageError("--datatype bfloat16 is for GPUs: on the host pass float32")
    if not on_host and (missing := TorchSymmetric.missing()):
        raise InvalidUsageError(f"bench {NAME} on GPUs needs PyTorch: {missing}")
    options.datatype = options.datatype or ("float32" if on_host else "bfloat16")
    machine = machine_of(comm)
    effort = {"iterations": options.iters, "warmups": 2, "rounds": options.rounds}
    measuring = Measuring(comm, machine, **effort, graphs=not on_host)
    if on_host:
        stream: AbstractContextManager[Any] = nullcontext()
    else:
        import torch

        stream = torch.cuda.stream(torch.cuda.ExternalStream(machine.stream.ptr, device=comm.device))
    with stream:
        opened, absent = open_libraries(comm, machine, _PEERS, options.compare)
        compared, own = ["serial", *opened], [OWN, "serial"]
        report = Report([("call", "", 24), ("rows", "", 8)], [NAME], compared, parts=_PARTS, own=own)

        def measure(case: tuple[str, int]) -> ResultRow:
            kind, rows = case
            # The products after an all-gather and before a reduction have transposed shapes, as in a layer.
            shape = (inner, columns) if kind == "allgather_matmul" else (columns, inner)
            measured = _measure(measuring, Matrices(comm, kind, rows, *shape, options.datatype), opened)
            facts = {"kind": kind, "rows": rows, "inner": shape[0], "columns": shape[1]}
            return ResultRow(facts, {NAME: measured})

        lines, cases = [measuring.how, options.datatype], [*itertools.product(_KINDS, options.rows)]
        return report.make(run, f"bench {NAME}", lines, cases, measure, [*opened.values()], absent)


def _measure(measuring: Measuring, matrices: Matrices, libraries: Mapping[str, Any]) -> Measured:
    matrices.fill_as_in_programs()  # before the parts, which have no check
    trials: list[Trial] = []
    failures: dict[str, str] = {}
    for name, make in matrices.products(libraries).items():
        try:
            call, result = measuring.step(make, own=name not in libraries)
        except LibraryError as failure:
            failures[name] = str(failure)
            continue
        count_wrong = partial(matrices.count_wrong, result) if result is not None else None
        checks = [] if count_wrong is None else [CheckedCall(matrices.fill_exactly, call, count_wrong)]
        refresh = matrices.fill_as_in_programs
        trials.append(Trial(name, call, checks, name not in libraries, capturable=name != "torch", refresh=refresh))
    return measuring.run(trials, failures)
