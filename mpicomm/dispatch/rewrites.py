"""Rewrites: turn a call with an epilogue, wire_dtype, packed or staged elements into a simpler call and a last step.

`start_exchange` carries a nonblocking call out as one exchange by MPI.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.activity.page import begin_mpi_call
from mpicomm.collectives import wire
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.operations import ALLGATHER, ALLREDUCE, ALLTOALL, EXSCAN, SCAN
from mpicomm.devices.host import array_at
from mpicomm.dispatch.reader import Reader
from mpicomm.errors import PeerError
from mpicomm.mpi.arguments import Operand, Span, require_same_device
from mpicomm.mpi.buffers import array_of, read
from mpicomm.mpi.host_calls import (
    NEEDS_HOST_COPY,
    NEEDS_MPI,
    HostCopies,
    log_host_staging,
    require_no_capture,
    warn_of_host_array,
)
from mpicomm.mpi.spec import Shape, items
from mpicomm.session import Session

Rewritten = tuple[Call, Callable[[], None]]
"""The call on other buffers, and the local step after it, which fills the buffers of the user."""
Rewrite = Callable[[Reader, Call], Rewritten]
_BYTE = np.dtype(np.uint8)
_ALIGNED_NBYTES = 16
_TEXT_NBYTES = 512  # longer calls differ by their hash
_abandoned: list[Any] = []
"""The memory of exchanges that no rank completes."""


def apply_epilogue(reader: Reader, call: Call) -> Rewritten:
    """Reduce, and then apply the epilogue on the host."""
    epilogue, receive, given = call.epilogue, call.receive, call.arguments
    assert epilogue is not None and receive is not None and call.send is not None
    made = array_at(receive.pointer, receive.nbytes, _BYTE).view(epilogue.result)
    reduced, target = made, given.receive
    if epilogue.converts:
        reduced = target = np.empty(call.send.total, epilogue.dtype)
    part = reader.make_call(call.operation, Arguments(given.send, target, given.op), call.algorithm)
    part.whole_call = call.signature  # with the epilogue, so that ranks compare it
    return part, partial(epilogue.apply_on_host, reduced, made)


def pack(reader: Reader, call: Call) -> Rewritten:
    """Move packed copies of derived datatypes, in a call with ``algorithm=``.

    Ranks with predefined datatypes take that algorithm, too. Without it all ranks go to MPI, which packs itself.
    """
    operation, given, pieces = call.operation, call.arguments, list[tuple[Any, Any]]()

    def packed(operand: Operand | None, argument: Any, *, receives: bool) -> Any:
        if operand is None or operand.mpi_type is None or operand.dtype is not None:
            return argument
        shape: Shape = operation.receive if receives else operation.send
        buffer, _, displs, _ = items(operand.spec, operand.name, shape)
        starts, counts = operand.displs or (displs or 0,), operand.counts or (operand.total,)
        lengths = [n * operand.mpi_type.size for n in counts]
        copy = np.empty(sum(lengths), _BYTE)
        for start, n, part in zip(starts, counts, np.split(copy, np.cumsum(lengths)[:-1]), strict=True):
            elements, as_bytes = [buffer, n, start, operand.mpi_type], [part, MPI.BYTE]
            if n:
                MPI.COMM_SELF.Sendrecv(elements, 0, 0, as_bytes, 0, 0)  # an output may keep what it has
                pieces.extend([(as_bytes, elements)] * receives)
        return copy if operand.counts is None else [copy, lengths]

    send = packed(call.send, given.send, receives=False)
    # The root of a broadcast only reads its buffer, which may be read-only.
    receives = operation.rooted != "bcast" or given.root != reader.session.placement.rank
    given = given._replace(send=send, receive=packed(call.receive, given.receive, receives=receives))

    def unpack() -> None:
        for as_bytes, elements in pieces:
            MPI.COMM_SELF.Sendrecv(as_bytes, 0, 0, elements, 0, 0)

    return reader.at_location(reader.make_call(operation, given, call.algorithm), "host"), unpack


def quantize(reader: Reader, call: Call) -> Rewritten:
    """Send elements quantized. NumPy quantizes, adds and dequantizes, with the bits of the kernels.

    Each rank computes all of its result from the quantized elements of all ranks, so it needs memory for them.
    """
    placement = reader.session.placement
    rank, size = placement.rank, len(placement.places)
    assert call.receive is not None and call.dtype is not None and call.wire is not None
    ranks, dtype, wire_dtype = range(size), call.dtype, call.wire.dtype
    quantizes_result = call.operation is ALLREDUCE and call.wire.quantizes_result

    def view(span: Span) -> npt.NDArray[Any]:
        return array_at(span.pointer, span.count, dtype)

    whole = None if call.send is None else view(call.send.whole())
    outputs = [view(Span(call.receive.pointer, call.receive.count))]
    if not call.operation.reduces:
        outputs = [view(call.receive.block(peer)) for peer in ranks]
        operation, given = ALLGATHER, [outputs[rank] if whole is None else whole]
    elif call.operation.send == "blocks":
        assert call.send is not None
        operation, given = ALLTOALL, [view(call.send.block(peer)) for peer in ranks]
        outputs[0] = outputs[0][: given[0].size]
    else:
        assert whole is not None
        operation, given = ALLGATHER, [whole]
    sent = np.empty((len(given), wire.quantized_nbytes(given[0].size)), np.uint8)
    for block, message in zip(given, sent, strict=True):
        wire.quantize(block, wire_dtype, message)
    received = np.empty((size, sent.shape[1]), np.uint8)
    # MPI would neither notice that ranks call different things, nor limit the wait.
    part = reader.make_call(operation, Arguments(sent.reshape(-1), received.reshape(-1)), "one_shot")
    part.whole_call = call.signature

    def finish() -> None:
        values = np.empty(given[0].size, np.float32)
        with np.errstate(all="ignore"):
            if not call.operation.reduces:
                for output, message in zip(outputs, received, strict=True):
                    wire.dequantize(message, wire_dtype, values)
                    np.copyto(output, values, casting="unsafe")
                return
            wire.dequantize(received[0], wire_dtype, values)
            for message in received[1:]:
                wire.dequantize(message, wire_dtype, values, adds=True)
            if call.op == "avg":
                values /= np.float32(size)
            if quantizes_result:
                wire.quantize(values, wire_dtype, received[0])
                wire.dequantize(received[0], wire_dtype, values)
            np.copyto(outputs[0], values, casting="unsafe")

    return part, finish


def stage_device_arrays(reader: Reader, call: Call) -> Rewritten:
    """Carry a call out on copies of this rank's device arrays in pinned memory. Blocking.

    MPI carries it out wherever the arrays are, or only the root's second buffer is a device array: see
    `mpicomm.dispatch.location_votes`. The other ranks may pass host arrays. So this rank makes MPI's call in the same
    form: MPI does not match a blocking collective with a nonblocking or persistent one. Nothing is set up here, because
    ranks with host arrays would not take part.
    """
    copies, given = copy_to_host(reader, call)
    return reader.make_call(call.operation, given, call.algorithm), copies.copy_back


def stage_host_arrays(reader: Reader, call: Call) -> Rewritten:
    """Carry a call on GPUs out on pinned copies of this rank's host arrays, which kernels read and write.

    Each call allocates its own pinned memory, so that calls on several streams do not overwrite each other's data.
    Raises `InvalidUsageError` in a capture.
    """
    session, operation = reader.session, call.operation.name
    backend, device = session.gpu(operation), session.placement.here.device
    assert isinstance(device, int)
    stream = backend.stream(call.stream, call.device_array)
    require_no_capture(operation, backend, stream, NEEDS_HOST_COPY)  # before CUDA allocates, which a capture forbids
    warn_of_host_array(operation)
    send = MPI.IN_PLACE if call.arguments.send is MPI.IN_PLACE else call.given.send
    given = call.given._replace(send=send, counts=call.arguments.counts)
    results = list[tuple[int, npt.NDArray[Any]]]()
    for operand, receives in call.host_operands:
        begin, end = min(begin for begin, _ in operand.extents), max(end for _, end in operand.extents)
        shift = begin % _ALIGNED_NBYTES  # the elements keep their alignment, because kernels rely on it
        copy = backend.pinned(end - begin + shift)[shift:]
        # It includes memory that receives, because the gaps between its elements must come back unchanged.
        ctypes.memmove(copy.ctypes.data, begin, copy.nbytes)
        is_output = operand.name != "sendbuf"
        spec = given.receive if is_output else given.send
        memory = read(array_of(spec), receives, operand.name)
        pointer = memory.pointer + copy.ctypes.data - begin
        staged: Any = replace(memory, pointer=pointer, on_device=True, device=device, owner=copy, exported=None)
        spec = [staged, *spec[1:]] if isinstance(spec, (list, tuple)) else staged
        given = given._replace(receive=spec) if is_output else given._replace(send=spec)
        results += [(begin, copy)] * receives
    part = reader.make_call(call.operation, given, call.algorithm, "gpu")
    part.stream, part.device_array, part.has_voted = call.stream, call.device_array, call.has_voted or call.joins
    part.synchronizes = True

    def copy_back() -> None:
        for pointer, copy in results:
            ctypes.memmove(pointer, copy.ctypes.data, copy.nbytes)

    return part, copy_back


def copy_to_host(reader: Reader, call: Call) -> tuple[HostCopies, Arguments]:
    """Stage the device arrays of a call on the host; return the copies, and the arguments with them. Blocking.

    Raises `InvalidUsageError` in a capture, and for an array of another GPU. In a call on device arrays it also raises
    the error of earlier calls.
    """
    session = reader.session
    operation, given = call.operation.name, call.arguments
    backend = session.gpu(operation)
    for operand in call.operands:
        require_same_device(f"{operation}: {operand.name}", operand.device, backend.device)
    stream = backend.stream(call.stream, call.device_array)
    if call.on_device:
        session.require_usable(operation)
        require_no_capture(operation, backend, stream, NEEDS_MPI)
        log_host_staging(operation, "only MPI can carry it out, or algorithm= asks for it")
    else:
        require_no_capture(operation, backend, stream, NEEDS_HOST_COPY)
        warn_of_host_array(operation)
    copies, send, receive = HostCopies(backend, stream), given.send, given.receive
    # MPI ignores, as `Call` does, what other ranks pass for the root's buffer.
    if call.send is not None:
        send = copies.stage(send, writable=False, name="sendbuf", operand=call.send)
    if call.receive is not None:
        receive = copies.stage(receive, writable=True, name="recvbuf", operand=call.receive)
    copies.wait()
    return copies, given._replace(send=send, receive=receive)


def start_exchange(call: Call, comm: MPI.Intracomm, session: Session) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Start a call; return a test of whether all data has arrived, and the function that then completes the call.

    No start waits for a rank. MPI moves the data of all ranks in one nonblocking exchange over ``comm``. NumPy then
    computes the result in rank order, with the bits of mapped memory. A reduction needs memory for the data of all
    ranks. Each rank also sends its signature, so that `PeerError` names calls that differ. A wait has no limit, as in
    MPI.
    """
    begin_mpi_call(session.row.words, call.operation.number)
    rank, size = comm.rank, comm.size
    scratch = np.empty(call.blocks.nbytes, _BYTE)
    exchange = call.operation.one_shot(call.buffers(scratch.ctypes.data))
    lengths = [exchange.nbytes_with(peer) if peer != rank else (0, 0) for peer in range(size)]
    sent, received = zip(*lengths, strict=True)
    starts = [sum(received[:peer]) for peer in range(size)]
    arrived = np.empty(sum(received), _BYTE)
    text = call.signature.hash32.to_bytes(8, "little") + str(call.signature).encode()
    signature = np.frombuffer(text[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0"), _BYTE)
    signatures = np.empty((size, _TEXT_NBYTES), _BYTE)
    addresses = [span.pointer if span and n else 0 for span, n in zip(exchange.sends, sent, strict=True)]
    base = min((address for address in addresses if address), default=0)
    displs = [address - base if address else 0 for address in addresses]
    blocks = [MPI.memory.fromaddress(base, max(map(add, displs, sent))), sent, displs, MPI.BYTE]
    comparison = MPI.Intracomm.Iallgather(comm, signature, signatures)
    movement = MPI.Intracomm.Ialltoallv(comm, blocks, [arrived, received, starts, MPI.BYTE])

    def has_arrived() -> bool:
        if not comparison.Test():
            return False
        if (signatures != signature).any():
            _abandoned.append((movement, call, arrived, scratch))  # MPI may still write there
            calls = [bytes(each[8:]).rstrip(b"\0").decode(errors="ignore") for each in signatures]
            named = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise PeerError(f"ranks called different things: {named}", ranks=range(size))
        return movement.Test()

    # As in the schedules of several domains, a prefix is reduced in the order of all ranks.
    domains = [range(size)] if call.operation in (SCAN, EXSCAN) else session.placement.domains

    def finish() -> None:
        with np.errstate(all="ignore"):
            _complete_exchange(exchange, rank, [arrived.ctypes.data + start for start in starts], domains)

    return has_arrived, finish


def _complete_exchange(exchange: Exchange, rank: int, arrived: Sequence[int], domains: Sequence[Sequence[int]]) -> None:
    """Complete an exchange whose data of each rank is at an address. Local. ``domains`` are reduced one by one."""
    itemsize, own = exchange.dtype.itemsize, exchange.sends[rank]
    for peer, block in enumerate(exchange.receives):
        source = arrived[peer] if peer != rank else own and own.pointer
        if block is not None and block.count and source and source != block.pointer:
            ctypes.memmove(block.pointer, source, block.count * itemsize)
    reduction = exchange.reduction
    if reduction is not None and reduction.output.count:
        addresses = {source: arrived[source] for source in reduction.sources}
        if reduction.own is not None:
            addresses[rank] = reduction.own.pointer
        count, dtype = reduction.output.count, exchange.dtype
        output = array_at(reduction.output.pointer, count, dtype)
        parts = [[array_at(addresses[each], count, dtype) for each in ranks if each in addresses] for ranks in domains]
        if len(parts) == 1:
            Reducer(reduction.op, dtype).reduce(parts[0], output)
        else:
            from mpicomm.domains.reductions import reduce_on_host  # few programs need it

            reduce_on_host(reduction.op, parts, output)
    if exchange.move is not None:
        ctypes.memmove(exchange.move[1].pointer, exchange.move[0].pointer, exchange.move[1].count * itemsize)
