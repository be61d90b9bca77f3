"""Contenders: mpicomm and its peers. All ranks open a peer together, and drop it together if it fails on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Machine
from mpicomm.bench.operations import Case, CaseBuffers, buffers
from mpicomm.bench.own import Mpicomm
from mpicomm.bench.peers import module_of, open_peer
from mpicomm.bench.peers.base import Peer, UnsupportedError
from mpicomm.collectives.wire import Wire

OWN = "mpicomm"
ORDINARY = "mpicomm-ordinary"
UNCODED = "mpicomm-uncoded"

T = TypeVar("T")


class PeerFailureError(Exception):
    """The error of a peer that failed on some rank. All ranks raise it."""


def together(comm: Communicator, step: Callable[[], T]) -> T:
    """Take a step on all ranks. If it fails on one rank, raise `PeerFailureError` on all ranks. Collective.

    This does not help ranks that wait, within the step, for a rank on which the step fails.
    """
    result: Any = None
    try:
        result, failure = step(), None
    except UnsupportedError as error:
        failure = str(error)
    except Exception as error:  # another library may raise any class
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    failures = comm.allgather(failure)
    rank = next((rank for rank, text in enumerate(failures) if text is not None), None)
    if rank is None:
        checked: T = result
        return checked
    everybody = all(text is not None for text in failures)
    raise PeerFailureError(failures[rank] if everybody else f"rank {rank}: {failures[rank]}")


@dataclass
class Contender:
    """A library, mpicomm or another, and its two arrays."""

    name: str
    peer: Peer
    first: Any
    second: Any
    error: float = 0.0
    """The most by which an element of each rank, of magnitude 1, may change on its way."""

    @property
    def own(self) -> bool:
        """Whether it is mpicomm. Failures of mpicomm end the run."""
        return self.name in (OWN, ORDINARY, UNCODED)

    def buffers(self, case: Case, shift: int = 0) -> CaseBuffers:
        """Return the buffers of a case, ``shift`` bytes into the two arrays."""
        first, second = self.first[shift:], self.second[shift:]
        return buffers(case, first, second, result_at_front=self.peer.result_at_front)


class Contenders:
    """All contenders, mpicomm first. ``absent`` has the reason for each missing peer."""

    def __init__(self, comm: Communicator, machine: Machine, nbytes: int) -> None:
        self._comm = comm
        self._machine = machine
        self._nbytes = nbytes
        self.present: list[Contender] = []
        self.absent: dict[str, str] = {}

    def open_own(self, kinds: Sequence[str], algorithm: str, wire: Wire | None = None) -> None:
        """Add mpicomm on symmetric arrays, on ordinary arrays, or on both. Elements travel as ``wire``. Collective.

        With ``wire`` the last contender is mpicomm without it, on arrays of the first kind.
        """
        for kind in kinds:
            self._open_own(ORDINARY if kind == "ordinary" and len(kinds) > 1 else OWN, kind, algorithm, wire)
        if wire is not None:
            self._open_own(UNCODED, kinds[0], algorithm, None)

    def _open_own(self, name: str, kind: str, algorithm: str, wire: Wire | None) -> None:
        peer = Mpicomm(self._comm, self._machine, symmetric=kind == "symmetric", algorithm=algorithm, wire=wire)
        contender = self._with_arrays(name, peer)
        contender.error = 0.0 if wire is None else wire.error
        self.present.append(contender)

    def open_peers(self, names: Sequence[str]) -> None:
        """Add the peers that all ranks can open. Collective."""
        for name in names:
            try:
                self.present.append(together(self._comm, lambda: self._open(name)))  # noqa: B023
            except PeerFailureError as failure:
                self.absent[name] = str(failure)

    def close(self) -> None:
        """Close all contenders, the last one first. Collective."""
        while self.present:
            contender = self.present.pop()
            contender.first = contender.second = None
            # A peer that fails to close keeps its results.
            with suppress(Exception) if not contender.own else nullcontext():
                contender.peer.close()

    def _open(self, name: str) -> Contender:
        if self._machine.stream is None and name != "mpi":
            raise UnsupportedError("it is for arrays on GPUs")
        # All ranks check before one of them waits for another rank.
        reasons = self._comm.allgather(module_of(name).missing())
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            raise UnsupportedError(reason)
        return self._with_arrays(name, open_peer(name, self._comm, self._machine))

    def _with_arrays(self, name: str, peer: Peer) -> Contender:
        first, second = peer.allocate(self._nbytes), peer.allocate(self._nbytes)
        with self._machine.current():
            for array in (first, second):
                array.fill(0)  # because calls that vary read bytes that no case has written, perhaps slow numbers
        self._machine.finish()
        return Contender(name, peer, first, second)
