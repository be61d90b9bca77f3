"""Messages: how the point-to-point calls of one communicator on GPUs are carried out.

What MPI gets stands for the arguments of the call: for a device array that is sent, a description of where its data
lies, or a host copy; for a buffer that receives, its `Landing`. So MPI does all matching, and blocks as it always does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.cluster.placement import Placement
from mpicomm.errors import InvalidUsageError
from mpicomm.messages.description import LEAST_PIECE_NBYTES, NBYTES, THRESHOLD_NBYTES
from mpicomm.messages.device import MessageDevice
from mpicomm.messages.incoming import Incoming
from mpicomm.messages.landing import Landing
from mpicomm.messages.matched import Matched, Stash
from mpicomm.messages.memory import Memory
from mpicomm.messages.outgoing import Outgoing, Sending, copied, describe, packed, say_once
from mpicomm.mpi.arguments import Operand, parse
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.host_copies import announce
from mpicomm.mpi.location import is_on_device, refuse_stream
from mpicomm.mpi.requests import Completer, DeferredRequest, Work

Send = Callable[..., Any]
"""One of MPI's methods: of a buffer, a destination and a tag."""


class Messages:
    """The messages of communicator ``comm``. ``gpu`` gives its device, locally; nothing here is collective.

    ``described`` says whether messages of device arrays may be described, that is, whether memory of this node's GPUs
    is opened by IPC handles; then receives into host arrays, too, have to look whether a description has come.
    """

    def __init__(self, comm: MPI.Intracomm, placement: Placement, gpu: Callable[[str], MessageDevice]) -> None:
        here = placement.here
        self.on_gpu = isinstance(here.device, int)
        self.described = self.on_gpu and here.handle == "ipc"
        self._comm = comm
        self._gpu = gpu
        self._kind = here.handle
        self._rank = placement.rank
        self._near = frozenset(placement.node_ranks)
        self._secret = placement.secret if self.described else None
        self.memory = Memory(placement.rank, here.timeout_s)
        # Not that of collectives: what comes into host memory blocks its thread until the sender's device has sent it,
        # and that may wait for a collective which this rank begins only when an earlier one is complete.
        self._completer = Completer()
        self.stash = Stash(self, comm, self._secret)

    def send(self, operation: str, send: Send, buf: Any, dest: int, tag: int, stream: Any) -> None:
        """Send a device array as ``send`` does; its memory may be used again by later work of the stream."""
        device = self._ready(operation)
        operand = parse(buf, writable=False, name="buf")
        outgoing = self._outgoing(device, operand, dest, self._stream(operation, device, stream, buf))
        with outgoing.withdrawn_on_failure():
            send(outgoing.spec, dest, tag)

    def start_send(self, operation: str, send: Send, buf: Any, dest: int, tag: int, stream: Any) -> DeferredRequest:
        """Start to send a device array as ``send`` does; the request is complete when its memory may be used again."""
        device = self._ready(operation)
        operand = parse(buf, writable=False, name="buf")
        resolved = self._stream(operation, device, stream, buf)
        side = None
        if operand.nbytes > LEAST_PIECE_NBYTES:  # as in `exchange`: what comes later on the stream goes on meanwhile
            side = device.side_streams.take(device.side_streams.mark(resolved))
            resolved = side
        try:
            outgoing = self._outgoing(device, operand, dest, resolved)
            with outgoing.withdrawn_on_failure():
                request = send(outgoing.spec, dest, tag)
            sending = Sending(outgoing, request, device.completion(resolved))
        finally:
            if side is not None:
                device.side_streams.give_back(side)
        return self._request(Work(sending.done, device.check), device)

    def receive(
        self, operation: str, receive: Callable[[Any, MPI.Status], None], buf: Any, status: Any, stream: Any
    ) -> None:
        """Receive into ``buf`` as ``receive`` does: into a device array in the order of the stream."""
        if type(buf) is np.ndarray:  # what most receives into host memory are; a look at the length is enough for most
            refuse_stream(operation, stream)
            status = MPI.Status() if status is None else status
            receive(buf, status)
            if status.Get_count(MPI.BYTE) == NBYTES:
                landing, device = self._landing(operation, buf)
                self._bring(landing, device, status, None)
            return
        landing, device = self._landing(operation, buf)
        if not landing.on_device:
            refuse_stream(operation, stream)
        resolved = self._stream(operation, device, stream, buf) if landing.on_device else None
        status = MPI.Status() if status is None else status
        receive(landing.spec, status)
        self._bring(landing, device, status, resolved)

    def start_receive(
        self,
        operation: str,
        begin: Callable[[Any], tuple[MPI.Request, Matched | None]],
        buf: Any,
        stream: Any,
        *,
        always: bool = False,
        replace: bool = False,
        before: Callable[[], bool] = lambda: True,
    ) -> MPI.Request:
        """Start to receive as ``begin`` does; the request is complete when the message is in ``buf``."""
        landing, device = self._landing(operation, buf, replace=replace)
        streams = device.side_streams
        mark = None
        if landing.on_device:
            mark = streams.mark(self._stream(operation, device, stream, buf))
        else:
            refuse_stream(operation, stream)
        request, matched = begin(landing.spec)
        if landing.is_mpis and matched is None and not always:
            return request
        incoming = Incoming(landing, device, request, matched, mark, before)
        return self._request(Work(incoming.done, device.check, incoming.status, incoming.cancel), device)

    def exchange(
        self,
        operation: str,
        send: tuple[Any, int, int],
        receive: Callable[[Any, MPI.Status], None],
        buf: Any,
        status: Any,
        stream: Any,
        *,
        replace: bool = False,
    ) -> None:
        """Send one buffer, to a rank, with a tag, and receive into another; ``replace``: into the same."""
        sendbuf, dest, tag = send
        landing, device = self._landing(operation, buf, replace=replace)
        on_device = landing.on_device or is_on_device(sendbuf)
        if not on_device:
            refuse_stream(operation, stream)
        resolved = self._stream(operation, device, stream, buf if landing.on_device else sendbuf) if on_device else None
        streams, side = device.side_streams, None
        if landing.on_device and landing.nbytes > LEAST_PIECE_NBYTES and not replace:
            # What comes does not wait until what goes has been copied: the two buffers are apart. Less than a piece is
            # copied in less time than another stream costs.
            assert resolved is not None
            side = streams.take(streams.mark(resolved))
        try:
            outgoing = Outgoing(sendbuf)
            if is_on_device(sendbuf):
                assert resolved is not None
                operand = parse(sendbuf, writable=False, name="sendbuf")
                outgoing = self._outgoing(device, operand, dest, resolved)
            with outgoing.withdrawn_on_failure():
                request = MPI.Intracomm.Isend(self._comm, outgoing.spec, dest, tag)
            status = MPI.Status() if status is None else status
            try:
                receive(landing.spec, status)
            finally:
                request.Wait()
            self._bring(landing, device, status, resolved if side is None else side)
            if side is not None and resolved is not None:
                streams.follow(resolved, streams.mark(side))
        finally:
            if side is not None:
                streams.give_back(side)

    def taking(self, source: int, tag: int) -> Callable[[Any, MPI.Status], None]:
        """Return a function that receives as MPI's Recv does, after a look at what probes have matched."""

        def receive(spec: Any, status: MPI.Status) -> None:
            kept = self.stash.take(source, tag)
            if kept is not None:
                kept.take(spec, status)
            else:
                MPI.Intracomm.Recv(self._comm, spec, source, tag, status)

        return receive

    def beginning(self, source: int, tag: int) -> Callable[[Any], tuple[MPI.Request, Matched | None]]:
        """Return a function that receives as MPI's Irecv does, after a look at what probes have matched."""

        def begin(spec: Any) -> tuple[MPI.Request, Matched | None]:
            kept = self.stash.take(source, tag)
            if kept is not None:
                return kept.begin(spec)
            return MPI.Intracomm.Irecv(self._comm, spec, source, tag), None

        return begin

    def _request(self, work: Work, device: MessageDevice) -> DeferredRequest:
        return DeferredRequest(self._completer.add(work, device.prepare_thread))

    def _landing(self, operation: str, buf: Any, *, replace: bool = False) -> tuple[Landing, MessageDevice]:
        device = self._ready(operation)
        return Landing(buf, device, self.memory.transfers(device), self._secret, replace=replace), device

    def _outgoing(self, device: MessageDevice, operand: Operand, dest: int, stream: int) -> Outgoing:
        transfers = self.memory.transfers(device)
        if operand.dtype is None:
            return copied(device, operand.spec, stream)
        nbytes = operand.nbytes
        if nbytes > THRESHOLD_NBYTES and dest >= 0:  # not MPI.PROC_NULL
            if dest not in self._near:
                announce("Send", "the ranks are on several nodes")
            elif self._secret is None:
                say_once(f"memory is opened as {self._kind!r}, not by IPC handles")
            elif described := describe(transfers, operand, nbytes, self._secret, self._rank, stream):
                return described
        return packed(device, operand, nbytes, stream)

    def _bring(self, landing: Landing, device: MessageDevice, status: MPI.Status, stream: int | None) -> None:
        landing.arrived(status)
        if not landing.brings:
            return
        if stream is not None:
            landing.bring(status, stream)
            return
        side = device.side_streams.take()  # for host memory; blocking, so nothing has to be ordered with it
        try:
            landing.bring(status, side)
        finally:
            device.side_streams.give_back(side)

    def _ready(self, operation: str) -> MessageDevice:
        device = self._gpu(operation)
        device.check()
        return device

    def in_capture(self, operation: str, stream: Any, *buffers: Any) -> bool:
        """Return whether a call on these buffers is to become part of a CUDA graph; local, of communicators of GPUs."""
        array = next((buf for buf in buffers if is_on_device(buf)), None)
        if array is None:
            return False
        device = self._gpu(operation)
        return device.is_capturing(device.stream(stream, array_of(array)))

    @staticmethod
    def _stream(operation: str, device: MessageDevice, stream: Any, buf: Any) -> int:
        resolved = device.stream(stream, array_of(buf))
        if device.is_capturing(resolved):
            raise InvalidUsageError(
                f"{operation} cannot be part of a CUDA graph, as MPI matches messages on the host: use Send, Recv or "
                "Sendrecv, or call it outside the capture"
            )
        return resolved
