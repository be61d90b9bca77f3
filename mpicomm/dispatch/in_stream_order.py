"""Messages in stream order: kernels match them, without MPI and the host, so that CUDA graphs can hold them."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.collectives.exchange import Message
from mpicomm.dispatch.engines import Engines
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand, Span, parse, require_disjoint, require_same_device
from mpicomm.session import Session

End = tuple[Any, int, int]
"""A buffer, the rank that gets or fills it, and the tag. It is a plain tuple, because every message makes two."""

_NO_SEND: End = (None, MPI.PROC_NULL, 0)
_NO_RECEIVE: End = (None, MPI.PROC_NULL, MPI.ANY_TAG)
# The names of each call's arguments, first of the sent message, then of the received message.
_NAMES = {
    "Send": (("buf", "dest", "tag"), ("", "", "")),
    "Recv": (("", "", ""), ("buf", "source", "tag")),
    "Sendrecv": (("sendbuf", "dest", "sendtag"), ("recvbuf", "source", "recvtag")),
}


def exchange(
    engines: Engines, operation: str, stream: Any, send: End | None, receive: End | None, status: Any = None
) -> None:
    """Enqueue a message to one rank and a message from another rank, which sendrecv.cu matches. Stream-ordered.

    The first call of a communicator sets up the engine, and is collective over the node. Later calls are local. It
    fills ``status`` with the length and the source that the caller names, because the host does not see the message.
    """
    send, receive = send or _NO_SEND, receive or _NO_RECEIVE
    (sendbuf, dest, sendtag), (recvbuf, source, recvtag) = send, receive
    route = dest, sendtag, source, recvtag
    gpu = engines.gpu
    plan = None if gpu is None else gpu.find_message(operation, sendbuf, recvbuf, route)
    if gpu is None or plan is None:
        # After the first message a call waits for no rank: other ranks may enqueue theirs in another order.
        session, (outward, inward) = engines.session, _NAMES[operation]
        if gpu is None:
            session.set_up(operation)
        sent = _read_end(operation, send, outward, session)
        received = _read_end(operation, receive, inward, session, receives=True)
        if sent is not None and received is not None:
            require_disjoint(sent[0], received[0])
        messages = sent and sent[1], received and received[1]
        session.require_usable(operation)
        gpu = engines.on_gpu(operation)
        made = plan = gpu.engine.prepare_messages(operation, *messages)
        plan.by_output = sendbuf is None
        gpu.add_message(made, operation, sendbuf, recvbuf, route, *messages)
    gpu.enqueue(plan, stream, sendbuf, recvbuf)
    if status is not None:
        status.Set_source(source)
        status.Set_tag(recvtag)  # MPI.ANY_TAG stays: the host does not learn the sender's tag
        nothing = source == MPI.PROC_NULL
        nbytes = 0 if nothing else parse(recvbuf, writable=True, name="recvbuf").packed_nbytes
        status.Set_elements(MPI.BYTE, nbytes)
        status.Set_cancelled(False)


def _read_end(
    operation: str, end: End, names: tuple[str, str, str], session: Session, *, receives: bool = False
) -> tuple[Operand, Message] | None:
    """Parse and check one end of a call. Return None for MPI.PROC_NULL."""
    buf, rank, tag = end
    name, rank_name, tag_name = names
    if rank == MPI.PROC_NULL:
        return None
    operand = parse(buf, writable=receives, name=name)
    if not operand.on_device:
        raise InvalidUsageError(
            f"{operation}: {name} is a host array, and kernels carry messages in stream order: use a device array, or "
            'algorithm="auto" outside of CUDA graphs'
        )
    require_same_device(f"{operation}: {name}", operand.device, session.backend.device)
    if receives and rank == MPI.ANY_SOURCE:
        raise InvalidUsageError(
            f"{operation}: {rank_name}=MPI.ANY_SOURCE needs the host, which matches messages: name the rank, or use "
            'algorithm="auto" outside of CUDA graphs'
        )
    if tag < 0 and not (receives and tag == MPI.ANY_TAG):
        raise InvalidUsageError(f"{operation}: {tag_name}={tag} is negative: use 0 or more")
    try:
        peer = session.placement.domain_index_of(rank)
    except InvalidUsageError as error:
        raise InvalidUsageError(f"{operation}: {str(error).replace('peer=', rank_name + '=', 1)}") from None
    elements = None if operand.derived is None else operand.derived[0]
    pointer = operand.pointer if elements is None else 0
    span = Span(pointer, operand.packed_nbytes)
    return operand, Message(peer, span, None if tag == MPI.ANY_TAG else tag, elements)
