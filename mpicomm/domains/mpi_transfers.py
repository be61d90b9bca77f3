"""Transfers: network messages between peer domains as messages of MPI, with deadlines and errors that name ranks.

Two transports give device memory to them: through pinned host memory, or directly to a CUDA-aware MPI.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpicomm.cluster.monitored_barrier import GRACE_S, abandoned
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.signature import Signature
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.domains.steps import NetworkMessage, NetworkStep, Transport, TransportName
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError, equal_error, name_ranks
from mpicomm.waiting import wait_until

# The groups of the communicator have smaller tags.
_WAIT_TAG = 13
_ERROR_TAG = 14
_TEXT_TAG = 15
_FIRST_TAG = 16
_LAST_TAG = 32767  # MPI promises tags up to this number
_ANSWER_S = 0.2
_SENDING_S = 0.05


class Transfers:
    """The transfers of one communicator over ``comm``, which also carries the messages of its groups.

    The tag of a message carries the hash of its call, so ranks in different calls notice. All messages of a call have
    one tag, so ranks must send and receive them in the same order. ``call_log`` is of the domain.
    """

    def __init__(self, comm: MPI.Intracomm, timeout_s: float, contacts: Sequence[int], call_log: CallLog) -> None:
        self.comm = comm
        self._timeout_s = timeout_s
        self._contacts = contacts
        self._call_log = call_log
        self._open: list[Direct] = []
        self._has_told = False
        self.failed = False
        """Whether this rank has given up a call: messages of it may still be in flight, or in no receive."""
        self.meanwhile: Callable[[], object] = lambda: None
        """The transfers call it now and then during a wait. An exception of it ends the wait."""

    def begin(self, make: Callable[[int], Direct], call: Signature) -> Callable[[], None]:
        """Make a transfer with the tag that ``make`` gets; return the function that waits for its end.

        That function raises `CollectiveTimeoutError` if a rank does not come within the deadline. It raises `PeerError`
        if a rank makes another call, or sends another length. If an awaited rank has given up the call, it raises the
        error of that rank: see `tell`.
        """
        tag = _FIRST_TAG + call.hash32 % (_LAST_TAG + 1 - _FIRST_TAG)
        try:
            transfer = make(tag)
        except MPI.Exception as error:
            raise self._given_up(_refused(call, error)) from None
        self._open.append(transfer)
        self._advance(call)
        return lambda: self._finish(transfer, call, tag)

    def tell(self, error: MpicommError) -> None:
        """Tell ranks of other domains that may wait for this rank why it has given up a call. Local.

        This rank may have waited for a rank of its domain. The error names the missing rank to the others. A
        second call does nothing.
        """
        if self._has_told:
            return
        self._has_told = True
        self._say(equal_error(error), _ERROR_TAG)
        # MPI sends messages, also buffered messages, only during its calls. The program may not call MPI after the
        # error.
        wait_until(lambda: False, _SENDING_S, lambda: self.comm.Iprobe(self.comm.rank, _ERROR_TAG))

    def _say(self, said: Any, tag: int) -> None:
        self.failed = True
        for rank in self._contacts:
            with contextlib.suppress(MPI.Exception):  # MPI knows that the rank is gone
                abandoned.append(self.comm.isend(said, rank, tag))

    def _advance(self, call: Signature) -> None:
        for transfer in list(self._open):
            try:
                over = transfer.advance()
            except LengthError as error:
                here = self.comm.rank
                raise self._given_up(
                    PeerError(f"{call}: {error} on rank {here}: pass counts that agree", ranks=[here])
                ) from None
            except MPI.Exception as error:
                raise self._given_up(_refused(call, error)) from None
            if over:
                self._open.remove(transfer)

    def _finish(self, transfer: Direct, call: Signature, own_tag: int) -> None:
        def ready() -> bool:
            self._advance(call)
            return transfer not in self._open

        def look_around() -> None:
            self.meanwhile()
            self._call_log.publish_wait(min(transfer.receiving() or transfer.sending(), default=-1))
            for rank in transfer.receiving() | transfer.sending():
                if self.comm.Iprobe(rank, _ERROR_TAG):
                    raise self._given_up(self.comm.recv(None, rank, _ERROR_TAG))
            for rank in sorted(transfer.receiving()):
                first = MPI.Status()
                if not self.comm.Iprobe(rank, MPI.ANY_TAG, first) or first.tag in (own_tag, _WAIT_TAG, _ERROR_TAG):
                    continue
                # That rank may have made the next call already, and its message of this call may just be arriving.
                if not wait_until(lambda rank=rank: ready() or rank not in transfer.receiving(), _ANSWER_S):  # type: ignore[misc]
                    raise self._given_up(self._different(call, rank, first.tag))

        try:
            if wait_until(ready, self._timeout_s, look_around):
                return
            # The awaited ranks may wait themselves, and say so at about this time.
            self._say(sorted(transfer.receiving() or transfer.sending()), _WAIT_TAG)
            if wait_until(ready, GRACE_S, look_around):
                return
            missing = self._missing(transfer.receiving() or transfer.sending())
        except MPI.Exception as error:  # Open MPI with ULFM refuses to look for messages of a rank that is gone
            raise self._given_up(_refused(call, error)) from None
        finally:
            self._call_log.publish_wait(-1)
        raise self._given_up(
            CollectiveTimeoutError(
                f"{call}: {name_ranks(missing)} did not arrive within {self._timeout_s:g} s; the communicator is "
                "unusable: create another",
                ranks=missing,
            )
        )

    def _missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the missing ranks. A rank that says that it waits is replaced by the ranks for which it waits."""
        missing: set[int] = set()
        for rank in ranks:
            said = self.comm.recv(None, rank, _WAIT_TAG) if self.comm.Iprobe(rank, _WAIT_TAG) else [rank]
            missing.update(said)
        return sorted(missing - {self.comm.rank} or set(ranks))

    def _different(self, call: Signature, rank: int, tag: int) -> PeerError:
        """Return the error for a rank in another call, which has sent a message with ``tag``, and tell it this call."""
        theirs = "a set-up, or Free"
        if tag >= _TEXT_TAG:
            theirs = "another call"
            abandoned.append(self.comm.isend(str(call), rank, _TEXT_TAG))
            if wait_until(lambda: self.comm.Iprobe(rank, _TEXT_TAG), _ANSWER_S):
                theirs = self.comm.recv(None, rank, _TEXT_TAG)
        own = f"rank {self.comm.rank}: {call}"
        return PeerError(f"ranks called different things: {own}; rank {rank}: {theirs}", ranks=[rank])

    def _given_up(self, error: MpicommError) -> MpicommError:
        """Abandon all transfers, and return the error to raise."""
        self.failed = True
        for transfer in self._open:
            transfer.give_up()
        self._open.clear()
        return error


@dataclass(eq=False)
class MessageInFlight:
    """A network message in flight."""

    of: NetworkMessage
    request: MPI.Request | None = None
    """None until MPI has the message."""
    host: Any = None
    """The pinned memory through which it goes; None if MPI reads or writes the memory of the message."""
    copied: Any = None
    """A mark of the stream after the copy into pinned memory."""


class Direct:
    """The network messages of a step, from and into memory that MPI itself reads and writes. All methods are local."""

    def __init__(self, comm: MPI.Intracomm, network_step: NetworkStep, tag: int) -> None:
        self._comm = comm
        self._receives: list[MessageInFlight] = []
        self._sends: list[MessageInFlight] = []
        try:
            # Receives first, so that no message comes before its receive and needs memory of MPI.
            for each in network_step.receives:
                memory = MPI.memory.fromaddress(each.pointer, each.nbytes)
                self._receives.append(MessageInFlight(each, comm.Irecv([memory, MPI.BYTE], each.rank, tag)))
            for each in network_step.sends:
                memory = MPI.memory.fromaddress(each.pointer, each.nbytes)
                self._sends.append(MessageInFlight(each, comm.Isend([memory, MPI.BYTE], each.rank, tag)))
        except MPI.Exception:
            self.give_up()  # the messages before the message that MPI refuses
            raise

    def advance(self) -> bool:
        """Do all that needs no waiting; return whether all network messages have arrived."""
        self._receives = [message for message in self._receives if not self._arrived(message)]
        self._sends = [message for message in self._sends if message.request is None or not message.request.Test()]
        return not (self._receives or self._sends)

    def receiving(self) -> set[int]:
        """Return the ranks whose data has not arrived."""
        return {message.of.rank for message in self._receives}

    def sending(self) -> set[int]:
        """Return the ranks that have not taken their data."""
        return {message.of.rank for message in self._sends}

    def give_up(self) -> None:
        """Abandon the network messages, because a rank does not come.

        It cancels the receives, because the memory may get another owner. It keeps all requests, because MPI may still
        access their memory.
        """
        for message in self._receives:
            if message.request:  # a null request has ended with another length
                message.request.Cancel()
        abandoned.extend(message.request for message in (*self._receives, *self._sends) if message.request is not None)

    def _arrived(self, message: MessageInFlight) -> bool:
        status, rank, nbytes = MPI.Status(), message.of.rank, message.of.nbytes
        assert message.request is not None
        try:
            if not message.request.Test(status):
                return False
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise LengthError(f"rank {rank} sends more than the {nbytes} bytes that are expected") from None
            raise
        if status.Get_count(MPI.BYTE) != nbytes:
            raise LengthError(f"rank {rank} sends {status.Get_count(MPI.BYTE)} bytes, and {nbytes} are expected")
        return True


class LengthError(Exception):
    """A message has another length than its receive."""


def _refused(call: Signature, error: MPI.Exception) -> PeerError:
    """Return the error for a message that MPI refuses. MPI refuses if it knows that a rank is gone."""
    return PeerError(f"{call}: MPI reports that a rank is gone, or that its network is: {error}")


CHUNK_NBYTES = 2 << 20
"""The bytes of one message: while MPI carries a chunk, the copy engines copy the next chunk."""


class CudaAwareTransport(Transport):
    """The `Transport` that gives device memory to an MPI that takes device pointers. It blocks the host."""

    name: TransportName = "mpi"
    capturable = False

    def __init__(self, transfers: Transfers, backend: GpuBackend) -> None:
        self.transfers, self.backend = transfers, backend

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; it blocks until the work of the stream is done, because MPI knows no streams."""
        self.backend.synchronize(stream)
        self.backend.check()
        comm = self.transfers.comm
        return self.transfers.begin(lambda tag: Direct(comm, network_step, tag), call)

    def tell(self, error: MpicommError) -> None:
        self.transfers.tell(error)


class PinnedTransport(CudaAwareTransport):
    """The `Transport` that copies to pinned host memory, from which MPI sends chunk by chunk. It blocks the host."""

    name: TransportName = "pinned"

    def __init__(self, transfers: Transfers, backend: GpuBackend) -> None:
        super().__init__(transfers, backend)
        self.out, self.into = backend.side_streams.take(), backend.side_streams.take()
        self.outgoing: deque[tuple[MessageInFlight, int]] = deque()
        """Chunks that MPI does not have yet, and their tags. MPI gets them in this order, because the messages of a
        call have one tag."""
        self.landing: deque[tuple[Any, Any]] = deque()
        """Marks after copies, and the pinned memory that the device may read before: the pool must not reuse it."""

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; the function that it returns blocks until the network messages have arrived."""
        side = self.backend.side_streams
        behind = side.mark(stream)
        side.follow(self.out, behind)  # this stream reads memory that earlier work writes
        side.follow(self.into, behind)  # this stream overwrites memory that earlier work may read
        wait = self.transfers.begin(lambda tag: _Pinned(self, network_step, tag), call)

        def finish() -> None:
            side.wait(behind)
            self.backend.check()
            wait()
            side.wait_stream(stream, self.into)  # later work reads the data that the copies bring

        return finish

    def close(self) -> None:
        self.landing.clear()
        for stream in (self.out, self.into):
            self.backend.side_streams.give_back(stream)


class _Pinned(Direct):
    """`Direct` messages of pinned memory, in chunks. Copies bring them from the device, and to the device."""

    def __init__(self, transport: PinnedTransport, network_step: NetworkStep, tag: int) -> None:
        super().__init__(transport.transfers.comm, NetworkStep(), tag)
        self._transport, self._backend = transport, transport.backend
        for chunk in _chunks_of(network_step.sends):
            host = self._backend.pinned(chunk.nbytes)
            self._backend.copy(host.ctypes.data, chunk.pointer, chunk.nbytes, transport.out)
            copied = self._backend.side_streams.mark(transport.out)
            self._sends.append(MessageInFlight(chunk, host=host, copied=copied))
        transport.outgoing.extend((message, tag) for message in self._sends)
        try:
            for chunk in _chunks_of(network_step.receives):
                host = self._backend.pinned(chunk.nbytes)
                request = self._comm.Irecv([host, MPI.BYTE], chunk.rank, tag)
                self._receives.append(MessageInFlight(chunk, request, host))
        except MPI.Exception:
            self.give_up()  # the messages before the message that MPI refuses
            raise

    def advance(self) -> bool:
        """Send the chunks that are in pinned memory, and copy the chunks that have arrived; see `Direct`."""
        passed = self._backend.side_streams.passed
        outgoing, landing = self._transport.outgoing, self._transport.landing
        while landing and passed(landing[0][0]):
            landing.popleft()
        while outgoing and passed(outgoing[0][0].copied):
            message, tag = outgoing.popleft()
            message.request = self._comm.Isend([message.host, MPI.BYTE], message.of.rank, tag)
        return super().advance()

    def _arrived(self, message: MessageInFlight) -> bool:
        if not super()._arrived(message):
            return False
        into = self._transport.into
        self._backend.copy(message.of.pointer, message.host.ctypes.data, message.of.nbytes, into)
        self._transport.landing.append((self._backend.side_streams.mark(into), message.host))
        return True

    def give_up(self) -> None:
        super().give_up()
        self._transport.outgoing.clear()


def _chunks_of(messages: tuple[NetworkMessage, ...]) -> Iterator[NetworkMessage]:
    for rank, pointer, nbytes in messages:
        for start in range(0, nbytes, CHUNK_NBYTES):
            yield NetworkMessage(rank, pointer + start, min(CHUNK_NBYTES, nbytes - start))
