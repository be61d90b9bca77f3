"""Messages in the order of streams: matched by nothing else, without MPI and the host, so that graphs can hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpi4py import MPI

from mpicomm.collectives.arguments import Operand, parse, require_separate
from mpicomm.collectives.dispatcher import Collectives, require_here
from mpicomm.collectives.exchange import Message, Span
from mpicomm.domain import Domain
from mpicomm.errors import InvalidUsageError


class End(NamedTuple):
    """What goes to a rank with a tag, or comes from it, and what the caller calls these three."""

    buf: Any
    rank: int
    tag: int
    names: tuple[str, str, str]


NO_SEND = End(None, MPI.PROC_NULL, 0, ("sendbuf", "dest", "sendtag"))
NO_RECEIVE = End(None, MPI.PROC_NULL, MPI.ANY_TAG, ("recvbuf", "source", "recvtag"))


class InStreamOrder:
    """The messages of one communicator that kernels match, see kernels/sendrecv.cu; ``collectives`` sets them up."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def exchange(
        self, operation: str, stream: Any, send: End = NO_SEND, receive: End = NO_RECEIVE, status: Any = None
    ) -> None:
        """Enqueue a message to one rank and one from another; collective the first time, else local; does not block."""

        def read(domain: Domain) -> tuple[Message | None, Message | None]:
            sent, received = _operand(operation, send, domain), _operand(operation, receive, domain, receives=True)
            if sent is not None and received is not None:
                require_separate(sent, received)
            return _message(operation, send, sent, domain), _message(operation, receive, received, domain)

        route = (send.rank, send.tag, receive.rank, receive.tag)
        self._collectives.message(operation, stream, (send.buf, receive.buf), route, read)
        if status is not None:
            status.Set_source(receive.rank)
            status.Set_tag(receive.tag)  # MPI.ANY_TAG stays: what the sender's was, the host does not learn
            status.Set_elements(MPI.BYTE, 0 if receive.rank == MPI.PROC_NULL else _span(_parse(receive, True)).count)
            status.Set_cancelled(False)


def _parse(end: End, writable: bool) -> Operand:
    """Understand the buffer of an end."""
    return parse(end.buf, writable=writable, name=end.names[0])


def _operand(operation: str, end: End, domain: Domain, *, receives: bool = False) -> Operand | None:
    """Understand and check one end, None of PROC_NULL."""
    if end.rank == MPI.PROC_NULL:
        return None
    operand = _parse(end, receives)
    if not operand.on_device or operand.dtype is None:
        what = "of a derived datatype" if operand.on_device else "a host array"
        raise InvalidUsageError(
            f"{operation}: {operand.name} is {what}, and messages in the order of streams are plain device arrays: use "
            'algorithm="auto" outside of CUDA graphs'
        )
    require_here(operation, operand, domain)
    _, rank_name, tag_name = end.names
    if receives and end.rank == MPI.ANY_SOURCE:
        raise InvalidUsageError(
            f"{operation}: {rank_name}=MPI.ANY_SOURCE needs the host to match messages: name the rank, or use "
            'algorithm="auto" outside of CUDA graphs'
        )
    if end.tag < 0 and not (receives and end.tag == MPI.ANY_TAG):
        raise InvalidUsageError(f"{operation}: {tag_name}={end.tag} is negative: use 0 or more")
    return operand


def _message(operation: str, end: End, operand: Operand | None, domain: Domain) -> Message | None:
    if operand is None:
        return None
    try:
        peer = domain.placement.node_index_of(end.rank)
    except InvalidUsageError as error:
        raise InvalidUsageError(f"{operation}: {str(error).replace('peer=', end.names[1] + '=', 1)}") from None
    return Message(peer, _span(operand), None if end.tag == MPI.ANY_TAG else end.tag)


def _span(operand: Operand) -> Span:
    assert operand.dtype is not None
    return Span(operand.pointer, operand.total * operand.dtype.itemsize)
