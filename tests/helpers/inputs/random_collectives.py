"""Random sequences of collectives, blocking, nonblocking and persistent, on communicators that share ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.host.selection import MPI_TYPES
from mpicomm.collectives.operations import ALLREDUCE, ALLTOALLV, OPERATIONS
from mpicomm.collectives.wire import QUANTIZABLE, QUANTIZABLE_OPS, WIRE_DTYPES
from mpicomm.mpi.types import COVERED
from tests.helpers.inputs.communicator_calls import MPI_OPS, Case, Prepared, algorithms, legal_ops, may_be_in_place
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.communicators import communicator, groups_of
from tests.helpers.rigs.device_calls import on_host_engine
from tests.helpers.rigs.message_rigs import take_for_gpu

REDUCED = ("bool", "int32", "uint8", "float16", "bfloat16", "float32", "float64", "complex64")
SUMMED = ("int32", "uint8", "float32", "float64", "complex64")  # also along a tree
FORMS = ("plain", "any", "any", "any")
SMALL = (0, 1, 3, 12, 12, 17, 1800, 4097)
SWITCH_POINTS = (256 * 1024, 1024 * 1024)


@cache
def known(names: tuple[str, ...]) -> list[str]:
    """Return the names of element types that this machine's NumPy has."""

    def has(name: str) -> bool:
        try:
            return bool(dtype_named(name).itemsize)
        except ImportError:
            return False

    return [name for name in names if has(name)]


@dataclass
class Member:
    """A communicator that this rank belongs to."""

    name: str
    comm: mpicomm.Communicator
    rank: int
    size: int


class Family:
    """Communicators that share ranks: all ranks, a graph of them, two halves, and each smaller number of ranks.

    On "threads" only the graph, whose ranks are all each other's neighbours, and each has a GPU made of a thread.
    ``members`` has None for a communicator that this rank does not belong to.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._threads = contextlib.ExitStack()
        world = communicator("cpu" if device == "threads" else device)
        graph: Any = world.Create_dist_graph_adjacent(range(world.size), range(world.size))
        self.gpu: Any = None
        """The device of arrays on "threads"."""
        self._all: list[MPI.Comm] = [world, graph]
        names = ["world", "graph"]
        if device == "threads":
            self.gpu = take_for_gpu(graph, slowest_s=2e-4)
            self._threads.enter_context(on_host_engine(graph))
        else:
            self._all.append(world.Split(world.rank % 2, -world.rank))
            group = world.Get_group()
            for size in range(1, world.size):
                ranks = [(size + index) % world.size for index in range(size)]
                part = group.Incl(ranks)
                self._all.append(world.Create_group(part, size) if world.rank in ranks else MPI.COMM_NULL)
                part.Free()
            group.Free()
            names += ["half", *(f"{size} ranks" for size in range(1, world.size))]
        self.world = world
        members = [
            Member(name, comm, comm.rank, comm.size) if isinstance(comm, mpicomm.Communicator) else None
            for name, comm in zip(names, self._all, strict=True)
        ]
        first = int(device == "threads")
        self.members, self.names = members[first:], names[first:]

    def free(self) -> None:
        """Free all of them. Collective."""
        self._threads.close()
        for comm in reversed(self._all):
            if comm != MPI.COMM_NULL:
                comm.Free()


class Player:
    """Plays one sequence. Every rank draws the same choices for a call, whether it takes part in the call or not.

    ``rng`` draws them, by default a generator with that seed.
    """

    def __init__(self, family: Family, seed: int, xp: Any, rng: Any = None) -> None:
        self._family, self._seed, self._xp = family, seed, family.gpu or xp
        self._rng = np.random.default_rng(seed) if rng is None else rng
        self._pending: list[MPI.Request] = []
        self._unchecked: list[tuple[str, Member, Prepared]] = []
        self._failures: list[str] = []

    def play(self, calls: int) -> None:
        """Make so many calls, and check all results. Collective."""
        for number in range(calls):
            index = int(self._rng.integers(len(self._family.members)))
            member = self._family.members[index]
            mode = self._choose(["blocking", "nonblocking", "persistent"])
            case = self._draw(
                number, 1 if member is None else member.size, mode, of_graph=self._family.names[index] == "graph"
            )
            if member is not None:
                what = f"seed {self._seed}, call {number} on {member.name}, {mode}: {case}"
                with self._noted(what):
                    self._call(member, case, mode, what)
                    if case.seed % 16 == 0:  # MPI matches it with nothing that waits in this rank
                        member.comm.Barrier()
            if self._rng.random() < 0.15:
                self._finish()
        self._finish()

    def complete(self) -> None:
        """Complete the requests that a broken-off sequence has left. Collective."""
        MPI.Request.Waitall(self._pending)
        self._pending.clear()

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failures.append(f"{what}: {type(error).__name__}: {error}")

    def _choose(self, choices: Any) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def _draw(self, number: int, size: int, mode: str, *, of_graph: bool) -> Case:
        row = self._choose([row for row in OPERATIONS.values() if of_graph or not row.of_neighbors])
        moves, on_gpus = not row.reduces, self._family.device != "cpu"
        name = self._choose(known(COVERED if moves else REDUCED))
        dtype, op = dtype_named(name), self._choose(legal_ops(name))
        count = self._choose(SMALL)
        if self._rng.random() < 0.04 and self._family.device != "threads":  # whose engine has small slots
            count = self._choose(SWITCH_POINTS) // dtype.itemsize + int(self._rng.integers(-1, 2))
        root, form, in_place = int(self._rng.integers(1 << 16)) % size, self._choose(FORMS), self._rng.random() < 0.3
        algorithm = self._choose(("auto", "auto", "mpi", *algorithms(row.name)))
        in_place = in_place and may_be_in_place(row)
        mixed = self._choose(("", "gpu", "gpu", "host")) if on_gpus else ""
        if algorithm == "mpi" and not moves and (op not in MPI_OPS or dtype not in MPI_TYPES):
            algorithm = "auto"
        if self._family.device == "threads" and algorithm != "mpi":
            algorithm = "auto"  # they have one engine
        elif self._family.device == "cuda" and row is ALLTOALLV and self._rng.random() < 0.6:
            form, in_place, algorithm, mixed = "arrays", False, "auto", ""
        offset = dtype.itemsize * int(self._rng.integers(4))
        travels = (
            row.quantizable and name in QUANTIZABLE and (moves or op in QUANTIZABLE_OPS) and self._rng.random() < 0.4
        )
        wire = (
            self._choose((*WIRE_DTYPES, (WIRE_DTYPES[0], None)) if row is ALLREDUCE else WIRE_DTYPES)
            if travels
            else None
        )
        tree = row.tree and op == "sum" and name in SUMMED and self._rng.random() < 0.4
        # Nothing is drawn from here on, because only members know the size.
        mixed = mixed if size > 1 else ""
        plain = algorithm != "mpi" and not mixed and self._family.device != "threads"
        wire, tree = wire if plain else None, tree and plain and wire is None and not 64 % size
        ordered = algorithm != "mpi" and mixed != "host" if on_gpus else algorithm not in ("auto", "mpi")
        # If the processor can, NumPy fuses products and sums of complex numbers, so their bits may differ.
        fused = self._family.device != "cuda" and dtype.kind == "c" and op == "prod"
        return Case(
            row.name,
            dtype,
            count // size if count >= 5000 and row.reduces and row.send == "blocks" else count,
            "tree" if tree else op if not moves else "sum",
            root,
            form,
            bool(in_place),
            algorithm,
            offset,
            seed=1000 * self._seed + number,
            wild=bool(tree) or (ordered and not fused),
            wire=wire,
            copies=mode != "persistent",
            mixed=mixed,
        )

    def _call(self, member: Member, case: Case, mode: str, what: str) -> None:
        groups = groups_of(member.comm)
        if groups is not None and len(groups) > 1 and member.comm.device != "cpu":
            # GPUs of several peer domains refuse wire_dtype and counts on the GPU, and perhaps a tree.
            form, op = "any" if case.form == "arrays" else case.form, "sum" if case.op == "tree" else case.op
            case = replace(case, wire=None, form=form, op=op)
        prepared = Prepared(replace(case, groups=groups), member.rank, member.size, self._xp)
        self._unchecked.append((what, member, prepared))
        if mode == "blocking":
            prepared.run(member.comm)
        elif mode == "nonblocking":
            self._pending.append(prepared.start(member.comm))
        else:
            request = prepared.prepare(member.comm)
            for again in range(3):
                if again:
                    prepared.renew(case.seed + 500 * again)
                request.Start()
                request.Wait()
                with self._noted(what):  # the other ranks start it again
                    prepared.check()
            request.Free()

    def _finish(self) -> None:
        """Complete all requests, in an order of each rank, and check all results. Collective; fails on all ranks."""
        way, seed = int(self._rng.integers(3)), int(self._rng.integers(1 << 16))
        shuffled = list(self._pending)
        np.random.default_rng([seed, MPI.COMM_WORLD.rank]).shuffle(shuffled)
        with self._noted("the wait for all requests"):
            if way == 0:
                MPI.Request.Waitall(shuffled)
            elif way == 1:
                for request in shuffled:
                    request.Wait()
            else:
                while shuffled:
                    shuffled = [request for request in shuffled if not request.Test()]
        for what, member, prepared in self._unchecked:
            with self._noted(what):
                member.comm.check()
                prepared.check()
        self._pending.clear()
        self._unchecked.clear()
        # All ranks stop at the same call, so that no rank waits for a rank that has failed.
        failures = [
            f"rank {rank}: {each}"
            for rank, said in enumerate(MPI.COMM_WORLD.allgather(self._failures))
            for each in said
        ]
        assert not failures, "\n".join(failures)
