"""Transfers: network messages between peer domains as messages of MPI, with deadlines and errors that name ranks.

Two transports give device memory to them: through pinned host memory, or directly to a CUDA-aware MPI.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
_FLUSH_S = 0.05


class Transfers:
    """The transfers of one communicator over ``comm``, which also carries the messages of its groups.

    The tag of a message carries the hash of its call, so ranks in different calls notice. All messages of a call have
    one tag, so ranks must send and receive them in the same order. ``call_log`` is of the domain.
    """

    def __init__(self, comm: MPI.Intracomm, timeout_s: float, peers: Sequence[int], call_log: CallLog) -> None:
        self.comm = comm
        self._timeout_s = timeout_s
        self._peers = peers
        self._call_log = call_log
        self._active: list[DirectTransfer] = []
        self._awaited_by: dict[int, list[int]] = {}  # by ranks that have waited for their deadline
        self._error_published = False
        self.has_stray_messages = False
        """Whether messages of a call that this rank has given up may be in flight, or in no receive."""
        self.on_poll: Callable[[], object] = lambda: None
        """Is called now and then during a wait. An exception of it ends the wait."""

    def start(
        self,
        network_step: NetworkStep,
        call: Signature,
        make: Callable[[MPI.Intracomm, NetworkStep, int], DirectTransfer] | None = None,
    ) -> Callable[[], None]:
        """Start the messages of a step; return the function that waits for them. ``make`` makes the transfer.

        That function raises `CollectiveTimeoutError` if a rank does not come within the deadline. It raises `PeerError`
        if a rank makes another call, or sends another length. If an awaited rank has given up the call, it raises the
        error of that rank: see `publish_error`.
        """
        tag = _FIRST_TAG + call.hash32 % (_LAST_TAG + 1 - _FIRST_TAG)
        try:
            transfer = (make or DirectTransfer)(self.comm, network_step, tag)
        except MPI.Exception as error:
            raise self._cancel_all(_refused(call, error)) from None
        self._active.append(transfer)
        self._progress(call)
        return lambda: self._wait(transfer, call, tag)

    def publish_error(self, error: MpicommError) -> None:
        """Send the error of a call that this rank has given up to ranks of other domains that may wait for it. Local.

        This rank may have waited for a rank of its own domain, which the error names. A second call does nothing.
        """
        if self._error_published:
            return
        self._error_published = True
        self._send_to_peers(equal_error(error), _ERROR_TAG)
        # MPI sends messages, also buffered messages, only during its calls. The program may not call MPI after the
        # error.
        wait_until(lambda: False, _FLUSH_S, lambda: self.comm.Iprobe(self.comm.rank, _ERROR_TAG))

    def _send_to_peers(self, content: Any, tag: int) -> None:
        self.has_stray_messages = True
        for rank in self._peers:
            with contextlib.suppress(MPI.Exception):  # MPI knows that the rank is gone
                abandoned.append(self.comm.isend(content, rank, tag))

    def _progress(self, call: Signature) -> None:
        for transfer in list(self._active):
            try:
                done = transfer.progress()
            except LengthError as error:
                here = self.comm.rank
                raise self._cancel_all(
                    PeerError(f"{call}: {error} on rank {here}: pass counts that agree", ranks=[here])
                ) from None
            except MPI.Exception as error:
                raise self._cancel_all(_refused(call, error)) from None
            if done:
                self._active.remove(transfer)

    def _wait(self, transfer: DirectTransfer, call: Signature, own_tag: int) -> None:
        def done() -> bool:
            self._progress(call)
            return transfer not in self._active

        def poll_errors() -> None:
            self.on_poll()
            self._call_log.publish_wait(min(transfer.sources() or transfer.targets(), default=-1))
            for rank in transfer.sources() | transfer.targets():
                if self.comm.Iprobe(rank, _ERROR_TAG):
                    raise self._cancel_all(self.comm.recv(None, rank, _ERROR_TAG))
                while self.comm.Iprobe(rank, _WAIT_TAG):
                    self._awaited_by[rank] = self.comm.recv(None, rank, _WAIT_TAG)
            for rank in sorted(transfer.sources()):
                first = MPI.Status()
                if not self.comm.Iprobe(rank, MPI.ANY_TAG, first) or first.tag in (own_tag, _WAIT_TAG, _ERROR_TAG):
                    continue
                # That rank may have made the next call already, and its message of this call may just be arriving.
                if not wait_until(lambda rank=rank: done() or rank not in transfer.sources(), _ANSWER_S):  # type: ignore[misc]
                    raise self._cancel_all(self._mismatch(call, rank, first.tag))

        try:
            if wait_until(done, self._timeout_s, poll_errors):
                return
            # The awaited ranks may wait themselves. Then they send this at about the same time.
            self._send_to_peers(sorted(transfer.sources() or transfer.targets()), _WAIT_TAG)
            if wait_until(done, GRACE_S, poll_errors):
                self._send_to_peers([], _WAIT_TAG)
                return
            missing = self._missing(transfer.sources() or transfer.targets())
        except MPI.Exception as error:  # Open MPI with ULFM refuses to probe for messages of a rank that is gone
            raise self._cancel_all(_refused(call, error)) from None
        finally:
            self._call_log.publish_wait(-1)
        raise self._cancel_all(
            CollectiveTimeoutError(
                f"{call}: {name_ranks(missing)} did not arrive within {self._timeout_s:g} s; the communicator is "
                "unusable: create another",
                ranks=missing,
            )
        )

    def _missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the missing ranks: for an awaited rank that waits itself, the ranks for which it waits."""
        missing = {each for rank in ranks for each in self._awaited_by.get(rank) or [rank]}
        return sorted(missing - {self.comm.rank} or set(ranks))

    def _mismatch(self, call: Signature, rank: int, tag: int) -> PeerError:
        """Return the error for a rank in another call, which has sent a message with ``tag``, and send it this call."""
        other_call = "a set-up, or Free"
        if tag >= _TEXT_TAG:
            other_call = "another call"
            abandoned.append(self.comm.isend(str(call), rank, _TEXT_TAG))
            if wait_until(lambda: self.comm.Iprobe(rank, _TEXT_TAG), _ANSWER_S):
                other_call = self.comm.recv(None, rank, _TEXT_TAG)
        here = f"rank {self.comm.rank}: {call}"
        return PeerError(f"ranks called different things: {here}; rank {rank}: {other_call}", ranks=[rank])

    def _cancel_all(self, error: MpicommError) -> MpicommError:
        """Cancel all transfers, and return the error to raise."""
        self.has_stray_messages = True
        for transfer in self._active:
            transfer.cancel()
        self._active.clear()
        return error


@dataclass(eq=False)
class InFlightMessage:
    """A network message in flight."""

    message: NetworkMessage
    request: MPI.Request | None = None
    """None until MPI has the message."""
    host: Any = None
    """The pinned memory through which it goes; None if MPI reads or writes the memory of the message."""
    copied: Any = None
    """A mark of the stream after the copy into pinned memory."""


class DirectTransfer:
    """The network messages of a step, from and into memory that MPI itself reads and writes. All methods are local."""

    def __init__(self, comm: MPI.Intracomm, network_step: NetworkStep, tag: int) -> None:
        self._comm = comm
        self._receives: list[InFlightMessage] = []
        self._sends: list[InFlightMessage] = []
        try:
            # Receives first, so that no message comes before its receive and needs memory of MPI.
            for message in network_step.receives:
                memory = MPI.memory.fromaddress(message.pointer, message.nbytes)
                self._receives.append(InFlightMessage(message, comm.Irecv([memory, MPI.BYTE], message.rank, tag)))
            for message in network_step.sends:
                memory = MPI.memory.fromaddress(message.pointer, message.nbytes)
                self._sends.append(InFlightMessage(message, comm.Isend([memory, MPI.BYTE], message.rank, tag)))
        except MPI.Exception:
            self.cancel()  # the messages before the message that MPI refuses
            raise

    def progress(self) -> bool:
        """Do all that needs no waiting; return whether all network messages have arrived."""
        self._receives = [each for each in self._receives if not self._arrived(each)]
        self._sends = [each for each in self._sends if each.request is None or not each.request.Test()]
        return not (self._receives or self._sends)

    def sources(self) -> set[int]:
        """Return the ranks whose data has not arrived."""
        return {each.message.rank for each in self._receives}

    def targets(self) -> set[int]:
        """Return the ranks that have not received their data."""
        return {each.message.rank for each in self._sends}

    def cancel(self) -> None:
        """Cancel the receives, because a rank is missing, and the memory may get another owner.

        All requests are kept, because MPI may still access their memory.
        """
        for each in self._receives:
            if each.request:  # a null request has ended with another length
                each.request.Cancel()
        abandoned.extend(each.request for each in (*self._receives, *self._sends) if each.request is not None)

    def _arrived(self, receive: InFlightMessage) -> bool:
        status, rank, nbytes = MPI.Status(), receive.message.rank, receive.message.nbytes
        assert receive.request is not None
        try:
            if not receive.request.Test(status):
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
        return self.transfers.start(network_step, call)

    def publish_error(self, error: MpicommError) -> None:
        self.transfers.publish_error(error)


class PinnedTransport(CudaAwareTransport):
    """The `Transport` that copies to pinned host memory, from which MPI sends chunk by chunk. It blocks the host."""

    name: TransportName = "pinned"

    def __init__(self, transfers: Transfers, backend: GpuBackend) -> None:
        super().__init__(transfers, backend)
        self.out, self.into = backend.side_streams.acquire(), backend.side_streams.acquire()
        self.outgoing: deque[tuple[InFlightMessage, int]] = deque()
        """Chunks that MPI does not have yet, and their tags. MPI gets them in this order, because the messages of a
        call have one tag."""
        self.copying: deque[tuple[Any, Any]] = deque()
        """Marks after copies, and the pinned memory that the device may access before: the pool must not reuse it."""

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; the function that it returns blocks until the network messages have arrived."""
        side = self.backend.side_streams
        behind = side.mark(stream)
        side.wait_event(self.out, behind)  # this stream reads memory that earlier work writes
        side.wait_event(self.into, behind)  # this stream overwrites memory that earlier work may read
        wait = self.transfers.start(network_step, call, partial(_PinnedTransfer, self))

        def finish() -> None:
            side.wait(behind)
            self.backend.check()
            wait()
            side.wait_stream(stream, self.into)  # later work reads the data that the copies bring

        return finish

    def close(self) -> None:
        self.copying.clear()
        for stream in (self.out, self.into):
            self.backend.side_streams.release(stream)


class _PinnedTransfer(DirectTransfer):
    """A `DirectTransfer` of pinned memory, in chunks. Copies bring them from the device, and to the device."""

    def __init__(self, transport: PinnedTransport, comm: MPI.Intracomm, network_step: NetworkStep, tag: int) -> None:
        super().__init__(comm, NetworkStep(), tag)
        self._transport, self._backend = transport, transport.backend
        for chunk in _chunks_of(network_step.sends):
            host = self._backend.pinned(chunk.nbytes)
            self._backend.copy(host.ctypes.data, chunk.pointer, chunk.nbytes, transport.out)
            copied = self._backend.side_streams.mark(transport.out)
            self._sends.append(InFlightMessage(chunk, host=host, copied=copied))
        transport.outgoing.extend((message, tag) for message in self._sends)
        try:
            for chunk in _chunks_of(network_step.receives):
                host = self._backend.pinned(chunk.nbytes)
                request = self._comm.Irecv([host, MPI.BYTE], chunk.rank, tag)
                self._receives.append(InFlightMessage(chunk, request, host))
        except MPI.Exception:
            self.cancel()  # the messages before the message that MPI refuses
            raise

    def progress(self) -> bool:
        """Send the chunks that are in pinned memory, and copy the chunks that have arrived; see `DirectTransfer`."""
        passed = self._backend.side_streams.is_done
        outgoing, copying = self._transport.outgoing, self._transport.copying
        while copying and passed(copying[0][0]):
            copying.popleft()
        while outgoing and passed(outgoing[0][0].copied):
            send, tag = outgoing.popleft()
            send.request = self._comm.Isend([send.host, MPI.BYTE], send.message.rank, tag)
        return super().progress()

    def _arrived(self, receive: InFlightMessage) -> bool:
        if not super()._arrived(receive):
            return False
        into, message = self._transport.into, receive.message
        self._backend.copy(message.pointer, receive.host.ctypes.data, message.nbytes, into)
        self._transport.copying.append((self._backend.side_streams.mark(into), receive.host))
        return True

    def cancel(self) -> None:
        super().cancel()
        outgoing = self._transport.outgoing
        self._transport.copying.extend((send.copied, send.host) for send, _ in outgoing)
        outgoing.clear()


def _chunks_of(messages: tuple[NetworkMessage, ...]) -> Iterator[NetworkMessage]:
    for rank, pointer, nbytes in messages:
        for start in range(0, nbytes, CHUNK_NBYTES):
            yield NetworkMessage(rank, pointer + start, min(CHUNK_NBYTES, nbytes - start))
