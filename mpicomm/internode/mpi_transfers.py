"""Transfers: parcels between cliques as messages of MPI, with a deadline and with errors that name ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpi4py import MPI

from mpicomm.cluster.agreement import abandoned
from mpicomm.collectives.signature import Signature
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError
from mpicomm.internode.steps import Parcel, Wire
from mpicomm.waiting import wait_until

# The groups of the communicator have the tags before these.
_TEXT_TAG = 15
_FIRST_TAG = 16
_LAST_TAG = 32767  # MPI promises tags up to this number
_ANSWER_S = 1.0


class Transfer(Protocol):
    """Parcels that are under way."""

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether all parcels have arrived. Local."""

    def receiving(self) -> set[int]:
        """Return the ranks whose data has not arrived. Local."""

    def sending(self) -> set[int]:
        """Return the ranks that have not taken their data. Local."""

    def give_up(self) -> None:
        """Leave the parcels to themselves: a rank does not come. Local."""


class Transfers:
    """The transfers of one communicator over ``comm``, which carries the messages of its groups, too.

    A message carries the hash of its call in its tag, so ranks in different calls notice. All messages of a call have
    one tag, so they must be sent and received in the same order.
    """

    def __init__(self, comm: MPI.Intracomm, timeout_s: float) -> None:
        self.comm = comm
        self._timeout_s = timeout_s
        self._open: list[Transfer] = []
        self.meanwhile: Callable[[], object] = _nothing
        """Called now and then during a wait. An exception of it ends the wait."""

    @staticmethod
    def tag_of(call: Signature) -> int:
        """Return the tag of a call's messages."""
        return _FIRST_TAG + call.hash32 % (_LAST_TAG + 1 - _FIRST_TAG)

    def begin(self, transfer: Transfer, call: Signature) -> Callable[[], None]:
        """Let a transfer advance; return the function that waits until it is over.

        That function raises `CollectiveTimeoutError` where a rank does not come within the deadline, and `PeerError`
        where a rank makes another call, or sends another length.
        """
        self._open.append(transfer)
        self._advance(call)
        return lambda: self._finish(transfer, call)

    def _advance(self, call: Signature) -> None:
        for transfer in list(self._open):
            try:
                over = transfer.advance()
            except MPI.Exception as error:
                raise self._given_up(
                    PeerError(
                        f"{call}: a rank of {_names(transfer.receiving())} sends another length than rank "
                        f"{self.comm.rank} expects ({error}): pass counts that agree",
                        ranks=sorted(transfer.receiving()),
                    )
                ) from None
            if over:
                self._open.remove(transfer)

    def _finish(self, transfer: Transfer, call: Signature) -> None:
        other: list[int] = []

        def ready() -> bool:
            self._advance(call)
            return transfer not in self._open

        def look_around() -> None:
            self.meanwhile()
            other.extend(rank for rank in sorted(transfer.receiving()) if self._is_elsewhere(rank, call))
            if other:
                raise self._given_up(self._different(call, other))

        if not wait_until(ready, self._timeout_s, look_around):
            missing = sorted(transfer.receiving() or transfer.sending())
            raise self._given_up(
                CollectiveTimeoutError(
                    f"{call}: {_names(missing)} did not arrive within {self._timeout_s:g} s; the communicator is "
                    "unusable from here on",
                    ranks=missing,
                )
            )

    def _is_elsewhere(self, rank: int, call: Signature) -> bool:
        """Return whether a rank has sent a message of another call before its message of this one."""
        status = MPI.Status()
        return self.comm.Iprobe(rank, MPI.ANY_TAG, status) and status.tag != self.tag_of(call)

    def _different(self, call: Signature, ranks: Sequence[int]) -> PeerError:
        """Tell ranks in other calls the call of this rank, and return the error with the calls that they tell."""
        abandoned.extend(self.comm.isend(str(call), rank, _TEXT_TAG) for rank in ranks)
        calls = [f"rank {self.comm.rank}: {call}"]
        for rank in ranks:
            told = wait_until(lambda rank=rank: self.comm.Iprobe(rank, _TEXT_TAG), _ANSWER_S)  # type: ignore[misc]
            calls.append(f"rank {rank}: {self.comm.recv(None, rank, _TEXT_TAG) if told else 'another call'}")
        return PeerError(f"ranks called different things: {'; '.join(calls)}", ranks=ranks)

    def _given_up(self, error: MpicommError) -> MpicommError:
        self._give_up()
        return error

    def _give_up(self) -> None:
        for transfer in self._open:
            transfer.give_up()
        self._open.clear()


@dataclass(frozen=True)
class _Message:
    rank: int
    nbytes: int
    request: MPI.Request


class Direct:
    """A transfer from and into memory that MPI reads and writes itself."""

    def __init__(self, comm: MPI.Intracomm, wire: Wire, tag: int) -> None:
        # Receives first, so that no message comes before its receive and needs memory of MPI.
        self._receives = [_Message(p.rank, p.nbytes, comm.Irecv(memory_of(p), p.rank, tag)) for p in wire.receives]
        self._sends = [_Message(p.rank, p.nbytes, comm.Isend(memory_of(p), p.rank, tag)) for p in wire.sends]

    def advance(self) -> bool:
        """Let MPI advance; see `Transfer`."""
        self._receives = [message for message in self._receives if not arrived(message.request, message.nbytes)]
        self._sends = [message for message in self._sends if not message.request.Test()]
        return not self._receives and not self._sends

    def receiving(self) -> set[int]:
        """See `Transfer`."""
        return {message.rank for message in self._receives}

    def sending(self) -> set[int]:
        """See `Transfer`."""
        return {message.rank for message in self._sends}

    def give_up(self) -> None:
        """Keep the requests, because MPI may still write to their memory; see `Transfer`."""
        abandoned.extend(message.request for message in (*self._receives, *self._sends))


def _nothing() -> None: ...


def memory_of(parcel: Parcel) -> Any:
    """Return a parcel's memory as MPI takes it."""
    return [MPI.memory.fromaddress(parcel.pointer, parcel.nbytes), MPI.BYTE]


def arrived(request: MPI.Request, nbytes: int) -> bool:
    """Return whether a message has arrived; raises `MPI.Exception` where it has another length than ``nbytes``."""
    status = MPI.Status()
    if not request.Test(status):
        return False
    if status.Get_count(MPI.BYTE) != nbytes:
        raise MPI.Exception(MPI.ERR_TRUNCATE)
    return True


def _names(ranks: Sequence[int] | set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
