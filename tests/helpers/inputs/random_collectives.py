"""Random sequences of collectives, blocking, nonblocking and persistent, on communicators that share ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import ALLTOALLV, OPERATIONS
from mpicomm.collectives.wire import CODED, CODED_OPS, CODES
from mpicomm.mpi.types import COVERED
from tests.helpers.inputs.communicator_calls import FORMS, OF_ONE_TYPE, Case, Prepared, algorithms, legal_ops
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.communicators import communicator, groups_of

REDUCED = ("bool", "int32", "uint8", "float16", "bfloat16", "float32", "float64", "complex64")
SMALL = (0, 1, 3, 17, 17, 17, 4097)
SWITCH_POINTS = (256 * 1024, 1024 * 1024)


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
    """Communicators that share ranks: all ranks, a duplicate, two halves, and each smaller number of ranks.

    ``members`` has None for a communicator that this rank does not belong to.
    """

    def __init__(self, device: str) -> None:
        world = communicator(device)
        self._all: list[MPI.Comm] = [world, world.Dup(), world.Split(world.rank % 2, -world.rank)]
        group = world.Get_group()
        for size in range(1, world.size):
            ranks = [(size + index) % world.size for index in range(size)]
            part = group.Incl(ranks)
            self._all.append(world.Create_group(part, size) if world.rank in ranks else MPI.COMM_NULL)
            part.Free()
        group.Free()
        self.world = world
        names = ["world", "dup", "half", *(f"{size} ranks" for size in range(1, world.size))]
        self.members = [
            Member(name, comm, comm.rank, comm.size) if isinstance(comm, mpicomm.Communicator) else None
            for name, comm in zip(names, self._all, strict=True)
        ]

    def free(self) -> None:
        """Free all of them. Collective."""
        for member in reversed(self.members):
            if member is not None:
                member.comm.Free()


class Player:
    """Plays one sequence. Every rank draws the same choices for a call, whether it takes part in the call or not.

    ``rng`` draws them, by default a generator with that seed.
    """

    def __init__(self, family: Family, seed: int, xp: Any, rng: Any = None) -> None:
        self._family, self._seed, self._xp = family, seed, xp
        self._rng = np.random.default_rng(seed) if rng is None else rng
        self._pending: list[MPI.Request] = []
        self._unchecked: list[tuple[str, Member, Prepared]] = []
        self._failures: list[str] = []

    def play(self, calls: int) -> None:
        """Make so many calls, and check all results. Collective."""
        for number in range(calls):
            member = self._choose(self._family.members)
            mode = self._choose(["blocking", "blocking", "nonblocking", "nonblocking", "persistent"])
            case = self._draw(number, 1 if member is None else member.size, mode)
            if member is not None:
                what = f"seed {self._seed}, call {number} on {member.name}, {mode}: {case}"
                try:
                    self._call(member, case, mode, what)
                except Exception as error:
                    self._failures.append(f"{what}: {type(error).__name__}: {error}")
            if self._rng.random() < 0.15:
                self._finish()
        self._finish()

    def complete(self) -> None:
        """Complete the requests that a broken-off sequence has left. Collective."""
        MPI.Request.Waitall(self._pending)
        self._pending.clear()

    def _choose(self, choices: Any) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def _draw(self, number: int, size: int, mode: str) -> Case:
        row = self._choose([OPERATIONS[name] for name in OF_ONE_TYPE])
        moves = not row.reduces
        name = self._choose(known(COVERED if moves else REDUCED))
        dtype, op = dtype_named(name), self._choose(legal_ops(name))
        count = self._choose(SMALL)
        if self._rng.random() < 0.04:
            count = self._choose(SWITCH_POINTS) // dtype.itemsize + int(self._rng.integers(-1, 2))
        root, form, in_place = int(self._rng.integers(1 << 16)) % size, self._choose(FORMS), self._rng.random() < 0.3
        algorithm = self._choose(("auto", "auto", *algorithms(row.name)))
        in_place = in_place and row.rooted != "bcast"
        if row is ALLTOALLV and self._rng.random() < 0.6:
            form, in_place, algorithm = "arrays", False, "auto"
        offset = dtype.itemsize * int(self._rng.integers(4))
        ordered = algorithm != "auto" or self._family.world.device != "cpu"
        # If the processor can, NumPy fuses products and sums of complex numbers, so their bits may differ.
        fused = self._family.world.device == "cpu" and dtype.kind == "c" and op == "prod"
        travels = row.coded and name in CODED and (moves or op in CODED_OPS) and self._rng.random() < 0.4
        return Case(
            row.name,
            dtype,
            count // size if count >= 5000 and row.reduces and row.send == "blocks" else count,
            op if not moves else "sum",
            root,
            form,
            bool(in_place),
            algorithm,
            offset,
            seed=1000 * self._seed + number,
            wild=ordered and not fused,
            wire=self._choose(CODES) if travels else None,
        )

    def _call(self, member: Member, case: Case, mode: str, what: str) -> None:
        groups = groups_of(member.comm)
        if groups is not None and len(groups) > 1 and member.comm.device != "cpu":
            # GPUs of several peer domains refuse both.
            case = replace(case, wire=None, form="counted" if case.form == "arrays" else case.form)
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
                prepared.check()
            request.Free()

    def _finish(self) -> None:
        """Complete all requests, in one of MPI's ways, and check all results. Collective; fails on all ranks."""
        way = int(self._rng.integers(3))
        order = self._rng.permutation(1 << 10)
        shuffled = [self._pending[index] for index in order if index < len(self._pending)]
        if way == 0:
            MPI.Request.Waitall(shuffled)
        elif way == 1:
            for request in shuffled:
                request.Wait()
        else:
            while shuffled:
                shuffled = [request for request in shuffled if not request.Test()]
        for what, member, prepared in self._unchecked:
            try:
                member.comm.check()
                prepared.check()
            except Exception as error:
                self._failures.append(f"{what}: {type(error).__name__}: {error}")
        self._pending.clear()
        self._unchecked.clear()
        # All ranks stop at the same call, so that no rank waits for a rank that has failed.
        failures = [
            f"rank {rank}: {each}"
            for rank, said in enumerate(MPI.COMM_WORLD.allgather(self._failures))
            for each in said
        ]
        assert not failures, "\n".join(failures)
