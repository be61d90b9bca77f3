"""``python -m mpicomm.bench matmul``: products that overlap with a collective, beside their parts and other libraries.

On GPUs PyTorch multiplies, on the host NumPy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.bench.contenders import open_peer
from mpicomm.bench.machine import Call, Machine, machine_of
from mpicomm.bench.measure import CheckedCall, Measuring, Outcome, PeerFailureError, Trial, those_that_work
from mpicomm.bench.nccl import Nccl
from mpicomm.bench.peers import OWN, Peer
from mpicomm.bench.torch_peers import FusedTorch
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.types import covered_dtype
from mpicomm.sizes import Columns

NAME = "matmul"
_PEERS: dict[str, type[Peer]] = {"nccl": Nccl, "torch": FusedTorch}
_PARTS = ("collective", "product")
_KINDS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")
_DTYPES = ("bfloat16", "float16", "float32", "float64")

Product = tuple[Call, Callable[[], Any] | None]
"""A call, and a function that returns the result of the last call; None for a part without a result."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.measuring_parser(
        f"bench {NAME}",
        "Time products that overlap with a collective, check their results, and compare with their parts "
        "and with other libraries.",
    )
    result.add_argument("matmul", choices=(NAME,), help=argparse.SUPPRESS)
    result.add_argument(
        "--rows", type=_sizes, metavar="N,...", help="of the product; default: 1K,4K,16K, on the cpu 256,512"
    )
    result.add_argument("--shape", type=_shape, metavar="K,N", help="of the weights; default: 8K,7K, on the cpu 1K,512")
    count = arguments.count_from
    result.add_argument("-d", "--datatype", choices=_DTYPES, default=None, help="default: bfloat16, on the cpu float32")
    result.add_argument("-n", "--iters", type=count(1), default=5, metavar="N", help="calls of a round; default: 5")
    result.add_argument("-G", "--rounds", type=count(1), default=7, metavar="N", help="timed rounds; default: 7")
    result.add_argument("--eager", action="store_true", help="no graphs, on GPUs")
    arguments.add_compare_argument(result, _PEERS)
    return result


def _sizes(text: str) -> list[int]:
    return [arguments.parse_size(part) for part in text.split(",")]


def _shape(text: str) -> tuple[int, int]:
    sizes = _sizes(text)
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: use K,N, the two sizes of the weights, as in 8K,7K")
    return sizes[0], sizes[1]


@dataclass(frozen=True)
class ProductCase:
    """A product of ``rows`` x ``inner`` by ``inner`` x ``columns`` on each rank."""

    kind: str
    rows: int
    inner: int
    columns: int
    size: int


class Matrices:
    """The matrices of one case on one rank, of PyTorch on a GPU and of NumPy on the host.

    Contenders are pairs: a call, and a function that returns the result of the last call, or None for a part.
    """

    def __init__(self, case: ProductCase, comm: Communicator, dtype: str) -> None:
        self.case, self._comm, self._dtype = case, comm, dtype
        self._on_gpu = isinstance(comm.device, int)
        self._xp: Any = np
        self._kind: dict[str, Any] = {"dtype": np.dtype(dtype) if not self._on_gpu else None}
        if self._on_gpu:
            import torch

            self._xp = torch
            self._kind = {"device": torch.device("cuda", comm.device), "dtype": getattr(torch, dtype)}
        shard = case.rows // comm.size
        gathers, scatters = case.kind == "allgather_matmul", case.kind == "matmul_reduce_scatter"
        self.a = self._empty(shard if gathers else case.rows, case.inner)
        self.b = self._empty(case.inner, case.columns)
        self.out = self._empty(shard if scatters else case.rows, case.columns)
        self.whole = self._empty(case.rows, case.inner if gathers else case.columns)
        """The gathered input, or the partial sums, of contenders that run one after the other."""

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
        case, comm = self.case, self._comm
        ranks = [self._integers(rank, *self.a.shape) for rank in range(comm.size)]
        if case.kind == "allgather_matmul":
            wanted = self._xp.concatenate(ranks) @ self.b
        else:
            wanted = sum(a @ self._integers(100 + rank, *self.b.shape) for rank, a in enumerate(ranks))
            rows = len(self.out)
            begin = comm.rank * rows if case.kind == "matmul_reduce_scatter" else 0
            wanted = wanted[begin : begin + rows]
        return int((result() != wanted).sum())

    def contenders(self, peers: Mapping[str, Any]) -> dict[str, Callable[[], Product]]:
        """Return the functions that make each contender, by its name. They fail if a peer has no such call."""
        comm, kind = self._comm, self.case.kind
        collectives: dict[str, Call] = {
            "allgather_matmul": lambda: comm.Allgather(self.a, self.whole),
            "matmul_reduce_scatter": lambda: comm.Reduce_scatter_block(self.whole, self.out),
            "matmul_allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, self.out),
        }
        collective, fused = collectives[kind], getattr(comm, kind)
        product_out = self._empty(self.case.rows, self.case.columns)
        a = self.whole if kind == "allgather_matmul" else self.a
        made: dict[str, Callable[[], Product]] = {
            "collective": lambda: (collective, None),
            "product": lambda: (lambda: self._xp.matmul(a, self.b, out=product_out), None),
            OWN: lambda: (lambda: fused(self.a, self.b, self.out), lambda: self.out),
            "serial": lambda: self._serial(collective),
        }
        if "nccl" in peers:
            made["nccl"] = lambda: self._serial(self._nccl_call(peers["nccl"]))
        if "torch" in peers:
            made["torch"] = lambda: peers["torch"].product(kind, self.a, self.b)
        return made

    def _serial(self, collective: Call) -> Product:
        """Return a collective and the product, one after the other."""
        gathers = self.case.kind == "allgather_matmul"
        a, out = (self.whole, self.out) if gathers else (self.a, self.whole)
        if self.case.kind == "matmul_allreduce":
            out = self.out

        def both() -> None:
            if gathers:
                collective()
            self._xp.matmul(a, self.b, out=out)
            if not gathers:
                collective()

        return both, lambda: self.out

    def _nccl_call(self, nccl: Nccl) -> Call:
        function, send, receive, counted = {
            "allgather_matmul": ("ncclAllGather", self.a, self.whole, self.a),
            "matmul_reduce_scatter": ("ncclReduceScatter", self.whole, self.out, self.out),
            "matmul_allreduce": ("ncclAllReduce", self.out, self.out, self.out),
        }[self.case.kind]
        memory = (send.data_ptr(), receive.data_ptr(), counted.numel())
        reduces = self.case.kind != "allgather_matmul"
        return nccl.on_memory(function, *memory, covered_dtype(self._dtype), reduces=reduces)

    def _integers(self, seed: int, rows: int, columns: int) -> Any:
        if self._on_gpu:
            generator = self._xp.Generator(device=self._kind["device"]).manual_seed(seed)
            kind = {"device": self._kind["device"], "generator": generator}
            signs = self._xp.randint(-8, 9, (rows, columns), **kind)
            return ((signs == 8).int() - (signs == -8).int()).to(self._kind["dtype"])
        signs = np.random.default_rng(seed).integers(-8, 9, (rows, columns))
        return (signs == 8).astype(self._dtype) - (signs == -8).astype(self._dtype)

    def _empty(self, rows: int, columns: int) -> Any:
        return self._xp.empty((rows, columns), **self._kind)


def main() -> int:
    """Run the command line on this rank. Collective."""
    run = command_line.Run(parser(), one_node="the bench is for ranks of one node")
    options, comm = run.options, run.comm
    on_host = comm.device == "cpu"
    options.rows = options.rows or ([256, 512] if on_host else [1024, 4096, 16384])
    inner, columns = options.shape = options.shape or ((1024, 512) if on_host else (8192, 7168))
    _require_possible(options, comm)
    dtype = options.datatype or ("float32" if on_host else "bfloat16")
    machine = machine_of(comm)
    graphs = not on_host and not options.eager
    measuring = Measuring(comm, machine, iterations=options.iters, warmups=2, rounds=options.rounds, graphs=graphs)
    results, wrong = [], 0
    with _torch_stream(comm, machine):
        opened, absent = those_that_work(comm, options.compare, lambda name: open_peer(_PEERS[name], comm, machine))
        names = (*_PARTS, OWN, "serial", *opened)
        times_of = [(name, "(us)", 11) for name in names]
        table = Columns([("call", "", 24), ("rows", "", 8), *times_of, ("ratio", "", 11), ("#wrong", "", 8)])
        run.introduce(
            f"bench {NAME}",
            f"timed: {'graphs of ' if graphs else ''}{options.iters} calls, slowest rank, median of {options.rounds} "
            f"rounds; {dtype}",
            *(f"{name} {peer.version}" for name, peer in opened.items()),
            *(f"{name}: {reason}" for name, reason in absent.items()),
            *(["torch: call by call, not in graphs"] if graphs and "torch" in opened else []),
            "ratio: mpicomm divided by the larger of collective and product",
        )
        command_line.show(*table.head())
        # The products after an all-gather and before a reduction have transposed shapes, as in a layer.
        for kind, rows in itertools.product(_KINDS, options.rows):
            shape = (inner, columns) if kind == "allgather_matmul" else (columns, inner)
            case = ProductCase(kind, rows, *shape, comm.size)
            times, silent = _measure(measuring, Matrices(case, comm, dtype), opened)
            ratio = times[OWN].time_us / max(times[name].time_us for name in _PARTS)
            wrong += sum(times[name].wrong or 0 for name in (OWN, "serial"))
            found = {name: asdict(each) for name, each in times.items()}
            results.append({**asdict(case), "times": found, "ratio": ratio, "missing": silent})
            cells = [times[name].time_us if name in times else None for name in names]
            bad = sum(each.wrong or 0 for each in times.values())
            command_line.show(table.line((kind, rows, *cells, f"{ratio:.3f}", bad)))
        for peer in opened.values():
            peer.close()
    peers = {name: peer.version for name, peer in opened.items()}
    document = {"datatype": dtype, "peers": peers, "results": results, "absent": absent}
    return run.finish(document, wrong)


def _require_possible(options: argparse.Namespace, comm: Communicator) -> None:
    size, wrong_rows = comm.size, [rows for rows in options.rows if rows % comm.size]
    if wrong_rows:
        raise InvalidUsageError(f"--rows {wrong_rows[0]}: {size} ranks cannot share them: pass a multiple of {size}")
    if comm.device == "cpu" and options.eager:
        raise InvalidUsageError("--eager is for GPUs: on the host all calls are timed without graphs: leave it out")
    if comm.device == "cpu" and options.datatype == "bfloat16":
        raise InvalidUsageError("--datatype bfloat16 is for GPUs: on the host pass float32")
    if comm.device != "cpu" and FusedTorch.missing():
        raise InvalidUsageError(f"bench {NAME} on GPUs needs PyTorch: {FusedTorch.missing()}")


def _torch_stream(comm: Communicator, machine: Machine) -> AbstractContextManager[Any]:
    """Return a ``with`` block in which PyTorch works on the machine's stream."""
    context: AbstractContextManager[Any] = nullcontext()
    if machine.stream is not None:
        import torch

        context = torch.cuda.stream(torch.cuda.ExternalStream(machine.stream.ptr, device=comm.device))
    return context


def _measure(
    measuring: Measuring, matrices: Matrices, peers: Mapping[str, Any]
) -> tuple[dict[str, Outcome], dict[str, str]]:
    matrices.fill_as_in_programs()  # before the parts, which have no check
    trials: list[Trial] = []
    silent: dict[str, str] = {}
    for name, make in matrices.contenders(peers).items():
        try:
            call, result = measuring.step(make, own=name not in peers)
        except PeerFailureError as failure:
            silent[name] = str(failure)
            continue
        count_wrong = partial(matrices.count_wrong, result) if result is not None else None
        checks = [] if count_wrong is None else [CheckedCall(matrices.fill_exactly, call, count_wrong)]
        refresh = matrices.fill_as_in_programs
        trials.append(Trial(name, call, checks, name not in peers, capturable=name != "torch", refresh=refresh))
    return measuring.run(trials, silent)
