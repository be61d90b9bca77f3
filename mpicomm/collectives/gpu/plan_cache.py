"""PlanCache: finds the plans of calls on device arrays again by the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm.collectives.operations import ALLTOALLV, REDUCE_SCATTER, Operation
from mpicomm.devices.cuda.beside import beside
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.plain_arrays import (
    PlainArray,
    PlainBlocks,
    has_template_kind,
    key_of_numbers,
    known_buffer,
    of_library,
    plain_integers,
)

if TYPE_CHECKING:
    from mpicomm.collectives.call import Call
    from mpicomm.collectives.exchange import Message
    from mpicomm.collectives.gpu.call_templates import CallTemplate
    from mpicomm.collectives.gpu.plan import AnyPlan, Engine
    from mpicomm.collectives.wire import Wire
    from mpicomm.devices.cuda.events import LocalEvent
    from mpicomm.epilogues.base import Epilogue
    from mpicomm.session import Session

_MOST = 1024  # calls of a form that are kept, and calls without a form
_MOST_FORMS = 256
_TIMES = 8  # calls with the same arrays before they get a separate plan, which takes as long as some 20 calls


@dataclass(slots=True)
class KnownCall:
    """A call that was made before."""

    plan: AnyPlan
    op: MPI.Op | None
    """The operation. The cache keeps it alive, because another object could otherwise get its id, a part of the key."""
    by_output: bool
    """Whether the library of the receive buffer decides the stream, because MPI ignores the send buffer."""
    by_address: bool = False
    """Whether an address names a buffer. The caller's later work on the buffer may be on any stream."""


@dataclass(slots=True)
class _Form:
    """The calls of one form: an operation on plain arrays of two kinds. The calls differ in addresses and counts."""

    fill: Callable[..., bool]
    """See `CallTemplate.fill`."""
    filled: KnownCall
    """The call that was filled in last."""
    calls: dict[Hashable, KnownCall | int]
    """The plans of repeated calls by their buffers. Other calls have the number of times that they were filled in."""


class PlanCache:
    """Plans by the arguments of their calls. A plan depends on nothing else.

    Reading and checking arguments takes ten times as long as enqueueing a kernel, and programs repeat their calls. The
    cache recognises only arrays of CuPy and PyTorch. It recognises them by their memory, because the objects are often
    new and can change in place. It recognises counts and displacements by value. It recognises datatypes by name, as
    predefined types of MPI, or by their layout. The handle of a derived datatype is no key, because MPI may reuse it
    for another datatype.

    The cache first looks up a collective on plain arrays by its form. A new call of a known form fills the plan of the
    form.
    """

    def __init__(self, session: Session, engine: Engine) -> None:
        self._session = session
        self._mappings = session.mappings
        self.engine = engine
        self._forms: dict[Hashable, _Form] = {}
        self._others: dict[Hashable, KnownCall] = {}
        """The calls without a form, by all of their arguments."""
        self._version = self._mappings.version
        self._cupy = of_library("cupy", "ndarray")

    def find(
        self,
        operation: Operation,
        algorithm: str,
        send: Any,
        receive: Any,
        op: MPI.Op | None,
        root: int,
        counts: Sequence[int] | None,
        epilogue: Epilogue | None = None,
        wire: Wire | None = None,
    ) -> KnownCall | None:
        """Return a call that was made before, or that has a known form; None for all other calls."""
        sent: Any
        received: Any
        finish, arrays = (wire or (), ()) if epilogue is None else epilogue.key()
        try:
            # The same as `_plain`, inlined, because nearly every call comes here and this takes half the time.
            cupy = self._cupy
            if operation is REDUCE_SCATTER:
                sent, received = _plain(operation, send, receive, counts)
            elif type(send) is type(receive) is cupy and send._c_contiguous and receive._c_contiguous:
                data, output = send.data, receive.data
                sent = data.ptr, send.size, (send.dtype, data.device_id)
                received = output.ptr, receive.size, (receive.dtype, output.device_id)
            else:
                sent, received = _plain(operation, send, receive, counts)
            if received is None:
                return None
            return self.find_plain(operation, algorithm, sent, received, op, root, finish, arrays)
        except TypeError:  # a root that is a list, for example; `Call` refuses it
            return None

    def find_plain(
        self,
        operation: Operation | str,
        algorithm: str,
        sent: PlainArray | PlainBlocks,
        received: PlainArray | PlainBlocks,
        op: MPI.Op | None,
        root: int,
        finish: Hashable = (),
        arrays: tuple[Any, ...] = (),
    ) -> KnownCall | None:
        """As `find`, for buffers as `plain_array` reads them. Raises `TypeError` for a root that is a list.

        ``finish`` and ``arrays`` are the result of `Epilogue.key`. Without an epilogue ``finish`` is the wire, or ().
        """
        if self._mappings.version != self._version:
            self._forget_memory()
        kinds = operation, sent[2], received[2], id(op), root, finish, algorithm
        form, call = self._forms.get(kinds), (sent, received, *arrays)
        if form is None:
            return self._of_key((kinds, call))
        calls = form.calls
        number = len(calls)
        kept = calls.setdefault(call, 1)  # one look-up for a new call, too
        if not isinstance(kept, int):
            return None if kept.plan.is_old else kept
        if len(calls) == number:
            if kept >= _TIMES:
                return None  # a repeated call gets a separate plan, because a graph launches faster
            calls[call] = kept + 1
        elif number >= _MOST:
            _make_room(calls)
        is_filled = form.fill(*call) if arrays else form.fill(sent, received)
        return form.filled if is_filled else None

    def find_message(
        self, operation: str, send: Any, receive: Any, route: tuple[int, int, int, int]
    ) -> KnownCall | None:
        """Return a message in stream order that was sent before, or whose kind was; None for all others.

        ``route`` is its destination, the tag there, its source, and the tag from there.
        """
        try:
            sent, received = known_buffer(send), known_buffer(receive)
            if sent is None or received is None:
                return None
            return self.find_plain(operation, "stream", sent, received, None, 0, route)
        except TypeError:  # a rank that is a list, for example; who reads the message refuses it
            return None

    def enqueue(
        self,
        call: KnownCall,
        stream: Any,
        send: Any,
        receive: Any,
        event: LocalEvent | None = None,
        blocking: bool = False,
        vote: Callable[[], None] | None = None,
    ) -> bool:
        """Enqueue the plan of a call with these buffers again, as `DeviceEngine.enqueue` does. Local.

        A ``blocking`` collective may wait as `carry_out` does, and has no ``event``. ``vote`` says that the call is on
        GPUs, when it certainly is made. Raises the error of an earlier call, and `InvalidUsageError` if the
        communicator was freed.
        """
        session, plan = self._session, call.plan
        session.require_usable(plan)
        array = receive if call.by_output else send
        if type(array) is not self._cupy:
            array = array_of(array)
        backend: Any = session.backend
        resolved = backend.stream(stream, array)
        if vote is not None:
            vote()
        # As `carry_out`, without its call, because each known call comes here.
        if blocking and backend.meets(resolved, array):
            pending = self._meet(plan, resolved, array)
        else:
            pending = self.engine.enqueue(plan, resolved, event)
        # No library knows which stream next uses memory that an address names.
        if blocking and (backend.completes or (call.by_address and stream is None)):
            backend.complete(resolved)
        return pending

    def enqueue_on(self, call: KnownCall, stream: int, event: LocalEvent | None = None) -> bool:
        """As `enqueue`, on the stream with this address. Return whether ``event`` is recorded after the call. Local."""
        session: Any = self._session
        plan = call.plan
        session.require_usable(plan)
        session.backend.note(stream)
        return self.engine.enqueue(plan, stream, event)

    def carry_out(self, plan: AnyPlan, stream: int, array: Any) -> None:
        """Enqueue the plan of a blocking collective on ``array``."""
        backend: Any = self._session.backend
        if backend.meets(stream, array):
            self._meet(plan, stream, array)
        else:
            self.engine.enqueue(plan, stream)

    def _meet(self, plan: AnyPlan, stream: int, array: Any) -> bool:
        """Enqueue the plan of a blocking collective; wait beside a stream that several threads use.

        If several threads use the device, the ranks meet on the host before a kernel waits on the GPU. Otherwise
        another thread could wait for the whole device, hence for the kernel. A peer may need work of that thread before
        it can come to the collective.
        """
        backend: Any = self._session.backend
        if backend.waits_beside(stream, array):
            with beside(backend, stream) as side:
                return self.engine.enqueue(plan, side, meets=True)
        return self.engine.enqueue(plan, stream, meets=True)

    def add(
        self,
        plan: AnyPlan,
        call: tuple[Any, ...],
        *,
        by_output: bool,
        read: Call | None = None,
    ) -> None:
        """Keep the plan of a call with the arguments of `find`, if the cache can recognise them; local.

        ``read`` is the same call, as read. With it, `find` also finds other calls of its form from now on.
        """
        operation, algorithm, send, receive, op, root, counts, epilogue, wire = call
        finish, arrays = (wire or (), ()) if epilogue is None else epilogue.key()
        if finish is None:
            return
        by_address = read is not None and any(operand.by_address for operand in read.operands)
        known = KnownCall(plan, op, by_output, by_address)
        sent, received = _plain(operation, send, receive, counts)
        if received is None:
            return
        kinds = operation, sent[2], received[2], id(op), root, finish, algorithm
        # The same memory passed twice means in place, and so do two empty arrays. Other calls with two arrays of these
        # kinds have another form.
        has_form = kinds in self._forms or not (has_template_kind(sent) and has_template_kind(received))
        if not has_form and read is not None and (send is MPI.IN_PLACE or not read.in_place):
            filled = self.engine.template(read, self._mappings, algorithm)
            if filled is not None and filled.takes(sent, received, *arrays):
                self._add_form(kinds, filled, known)
        self._keep_plain(kinds, (sent, received, *arrays), known)

    def add_message(
        self,
        plan: AnyPlan,
        operation: str,
        send: Any,
        receive: Any,
        route: tuple[int, int, int, int],
        to_peer: Message | None,
        from_peer: Message | None,
        *,
        by_output: bool,
    ) -> None:
        """Keep the plan of a message with the arguments of `find_message`, if they can be recognised; local.

        ``to_peer`` and ``from_peer`` are the messages of the call. From now on `find_message` also finds others of its
        kind.
        """
        known = KnownCall(plan, None, by_output)
        sent, received = known_buffer(send), known_buffer(receive)
        if sent is None or received is None:
            return
        kinds = operation, sent[2], received[2], id(None), 0, route, "stream"
        ends = (sent, to_peer), (received, from_peer)
        # The lengths of blocks add up in another way, and an empty message does not tell the bytes of an element.
        if kinds not in self._forms and all(len(plain) == 3 and (end is None or end.span.count) for plain, end in ends):
            send_nbytes, receive_nbytes = (0 if end is None else end.span.count // plain[1] for plain, end in ends)
            filled = self.engine.message_template(operation, to_peer, from_peer, (send_nbytes, receive_nbytes))
            self._add_form(kinds, filled, known)
        self._keep_plain(kinds, (sent, received), known)

    def _add_form(self, kinds: Hashable, plan: CallTemplate, known: KnownCall) -> None:
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        self._forms[kinds] = _Form(plan.fill, replace(known, plan=plan), {})

    def _keep_plain(self, kinds: Hashable, call: tuple[Any, ...], known: KnownCall) -> None:
        form = self._forms.get(kinds)
        if form is None:
            self._keep((kinds, call), known)
        else:
            if len(form.calls) >= _MOST:
                _make_room(form.calls)
            form.calls[call] = known

    def _keep(self, key: Hashable, known: KnownCall) -> None:
        if key is not None:
            if len(self._others) >= _MOST:
                self._others.clear()
            self._others[key] = known

    def _forget_memory(self) -> None:
        """Forget all addresses: symmetric memory may have become ordinary memory, or the other way round."""
        self._version = self._mappings.version
        self._others.clear()
        for form in self._forms.values():
            form.calls.clear()

    def _of_key(self, key: Hashable) -> KnownCall | None:
        if self._mappings.version != self._version:
            self._forget_memory()
        known = self._others.get(key)
        return None if known is None or known.plan.is_old else known


def _make_room(calls: dict[Hashable, KnownCall | int]) -> None:
    """Drop the calls that were only filled in, and if many are left, all calls."""
    plans = {call: kept for call, kept in calls.items() if not isinstance(kept, int)}
    calls.clear()
    if len(plans) < _MOST // 2:
        calls.update(plans)


def _plain(
    operation: Operation, send: Any, receive: Any, counts: Sequence[int] | None
) -> tuple[Any, PlainArray | PlainBlocks | None]:
    """Return both buffers as `known_buffer` reads them; None for the second if they cannot be recognised."""
    if operation is ALLTOALLV:
        # Kernels read counts of an Alltoallv that lie on the device, so the plan does not depend on their values.
        given = known_buffer(send, counts_on_device=True)
        return given, None if given is None else known_buffer(receive, counts_on_device=True)
    in_place = operation is REDUCE_SCATTER and send is MPI.IN_PLACE
    sent: Any = known_buffer(receive if in_place else send)
    if operation is REDUCE_SCATTER:  # recvcounts cut the input
        # Without counts the ranks exchange their counts in every call, and the counts may have changed.
        if counts is None or sent is None or receive is MPI.IN_PLACE:
            return None, None
        cut = plain_integers(counts)
        if cut is not None and len(sent) == 3:
            sent = (*sent, cut, None)
        else:
            shares = key_of_numbers(counts)
            sent = None if shares is None else (*sent[:2], (sent[2:], "items"), shares, None)
    return sent, None if sent is None else known_buffer(send if in_place else receive)
