"""PlanCache: the plans of calls on device arrays, by the arguments of the calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mpi4py import MPI

from mpicomm.collectives.operations import ALLTOALLV, REDUCE_SCATTER, Operation
from mpicomm.devices.cuda.stream_threads import synchronized_side_stream
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.descriptors import (
    ArrayDescriptor,
    BlocksDescriptor,
    as_integers,
    buffer_key,
    is_descriptor,
    items_key,
    of_library,
    type_key,
)
from mpicomm.mpi.requests import DeferredRequest, ProgressThread

if TYPE_CHECKING:
    from mpicomm.collectives.call import Call
    from mpicomm.collectives.exchange import Message
    from mpicomm.collectives.gpu.algorithms.base import AnyPlan
    from mpicomm.collectives.gpu.call_templates import CallTemplate
    from mpicomm.collectives.gpu.plan import Plan
    from mpicomm.collectives.wire import Wire
    from mpicomm.devices.cuda.events import EventPool, LocalEvent, Mark
    from mpicomm.epilogues.base import Epilogue
    from mpicomm.session import Session
    from mpicomm.sharing.segments import Mappings

_MAX_CACHED = 1024  # kinds that are kept, and calls of a kind
_REPEATS = 8  # calls with the same arrays before they get a separate plan, which takes as long as some 20 calls


class Engine(Protocol):
    """An engine for device arrays: `DeviceEngine`, which explains its methods, or one for several peer domains."""

    completions: EventPool
    """The events that callers pass to `enqueue`."""

    def prepare_call(self, call: Call, mappings: Mappings, requested: str) -> AnyPlan: ...

    def prepare_barrier(self) -> AnyPlan: ...

    def require_same(self, text: str) -> None: ...

    def prepare_messages(self, text: str, sent: Message | None, received: Message | None) -> Plan: ...

    def enqueue(
        self, plan: Any, stream: int, event: LocalEvent | Mark | None = None, host_barrier: bool = False
    ) -> bool: ...


@dataclass(slots=True)
class _CallKind:
    """The calls of one kind: an operation on plain arrays of two kinds. The calls differ in addresses and counts."""

    op: MPI.Op | None
    """The cache keeps it alive, because another object could otherwise get its id, a part of the key."""
    template: CallTemplate | None
    """It fills in new calls; None if calls of the kind have to be read one by one."""
    calls: dict[Hashable, AnyPlan | int]
    """The plans of repeated calls by their buffers. Other calls have the number of times that they were filled in."""


class PlanCache:
    """Plans by the arguments of their calls. A plan depends on nothing else.

    Reading and checking arguments takes ten times as long as enqueueing a kernel, and programs repeat their calls. The
    cache recognises only arrays of CuPy and PyTorch. It recognises them by their memory, because the objects are often
    new and can change in place. It recognises counts and displacements by value. It recognises datatypes by name, as
    predefined types of MPI, or by their layout. The handle of a derived datatype is no key, because MPI may reuse it
    for another datatype.

    The cache looks up a call by its kind, then by its arrays. A new call of a known kind fills its template.
    """

    def __init__(self, session: Session, engine: Engine) -> None:
        self._session = session
        self._mappings = session.mappings
        self.engine = engine
        self._kinds: dict[Hashable, _CallKind] = {}
        self._by_key: dict[Hashable, AnyPlan] = {}
        self._version = self._mappings.version
        self._cupy = of_library("cupy", "ndarray")
        self._progress_thread = ProgressThread(self_driven=True)

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
    ) -> AnyPlan | None:
        """Return a call that was made before, or that has a known kind; None for all other calls."""
        sent: Any
        received: Any
        epilogue_key, arrays = (wire or (), ()) if epilogue is None else epilogue.key()
        try:
            # The same as `_descriptors`, inlined, because nearly every call comes here and this takes half the time.
            cupy = self._cupy
            if operation is REDUCE_SCATTER:
                sent, received = _descriptors(operation, send, receive, counts)
            elif type(send) is type(receive) is cupy and send._c_contiguous and receive._c_contiguous:
                data, output = send.data, receive.data
                sent = data.ptr, send.size, (send.dtype, data.device_id)
                received = output.ptr, receive.size, (receive.dtype, output.device_id)
            elif operation.send == "typed" and type(send) is type(receive) in (list, tuple):
                return self._find_typed(operation, algorithm, send, receive)
            else:
                sent, received = _descriptors(operation, send, receive, counts)
            if received is None:
                return None
            return self.find_described(operation, algorithm, sent, received, op, root, epilogue_key, arrays)
        except (TypeError, ValueError, IndexError):  # a root that is a list, for example; `Call` refuses it
            return None

    def _find_typed(self, operation: Operation, algorithm: str, send: Any, receive: Any) -> AnyPlan | None:
        """As `find`, for lists of an array, counts, displacements (or a pair of both) and a datatype for each block.

        A repeated call is found by its numbers and layouts, because to read them as blocks takes several times as long.
        """
        specs, key, x, y = (send, receive), None, send[0], receive[0]
        if len(send) == len(receive) == 3:
            specs = (x, *send[1], send[2]), (y, *receive[1], receive[2])
        are_contiguous = type(x) is type(y) is self._cupy and x._c_contiguous and y._c_contiguous
        if are_contiguous and len(specs[0]) == len(specs[1]) == 4:
            facts: list[Any] = [operation, algorithm]
            for array, counts, displs, datatypes in specs:
                facts += array.data.ptr, array.size, array.dtype, array.data.device_id
                facts += (*counts,), (*displs,), (*map(type_key, datatypes),)
            key = (*facts,)
            known = self.find_by_key(key)
            if known is not None:
                return known
        sent, received = buffer_key(send), buffer_key(receive)
        plan = sent and received and self.find_described(operation, algorithm, sent, received, None, 0)
        if plan is not None and key:
            self.add_by_key(key, plan)
        return plan

    def find_described(
        self,
        operation: Operation | str,
        algorithm: str,
        sent: ArrayDescriptor | BlocksDescriptor,
        received: ArrayDescriptor | BlocksDescriptor,
        op: MPI.Op | None,
        root: int,
        epilogue_key: Hashable = (),
        arrays: tuple[Any, ...] = (),
    ) -> AnyPlan | None:
        """As `find`, for buffers as `descriptor_of` reads them. Raises `TypeError` for a root that is a list.

        ``epilogue_key`` and ``arrays`` are the result of `Epilogue.key`. Without an epilogue they are the wire or (),
        and no arrays.
        """
        if self._mappings.version != self._version:
            self._drop_addresses()
        key, call = (operation, sent[2], received[2], id(op), root, epilogue_key, algorithm), (sent, received, *arrays)
        kind = self._kinds.get(key)
        if kind is None:
            return None
        calls, template = kind.calls, kind.template
        if template is None:
            plan = calls.get(call)
            assert not isinstance(plan, int)
            return plan
        number = len(calls)
        kept = calls.setdefault(call, 1)  # one look-up for a new call, too
        if not isinstance(kept, int):
            return kept
        if len(calls) == number:
            if kept >= _REPEATS:
                return None  # a repeated call gets a separate plan, because a graph launches faster
            calls[call] = kept + 1
        elif number >= _MAX_CACHED:
            _evict(calls)
        is_filled = template.fill(*call) if arrays else template.fill(sent, received)
        return template if is_filled else None

    def find_by_key(self, key: Hashable) -> AnyPlan | None:
        """Return the plan that `add_by_key` has kept; None if there is none that may be used."""
        if self._mappings.version != self._version:
            self._drop_addresses()
        return self._by_key.get(key)

    def add_by_key(self, key: Hashable, plan: AnyPlan) -> None:
        """Keep a plan of `find_described` under a key that identifies memory and arguments of the call. Local."""
        if plan.lasts:
            if len(self._by_key) >= _MAX_CACHED:
                self._by_key.clear()
            self._by_key[key] = plan

    def find_message(self, operation: str, send: Any, receive: Any, route: tuple[int, int, int, int]) -> AnyPlan | None:
        """Return a message in stream order that was sent before, or whose kind was; None for all others.

        ``route`` is its destination, the tag there, its source, and the tag from there.
        """
        try:
            sent, received = buffer_key(send), buffer_key(receive)
            if sent is None or received is None:
                return None
            return self.find_described(operation, "stream", sent, received, None, 0, route)
        except TypeError:  # a rank that is a list, for example; who reads the message refuses it
            return None

    def enqueue(
        self,
        plan: AnyPlan,
        stream: Any,
        send: Any,
        receive: Any,
        event: LocalEvent | Mark | None = None,
        blocking: bool = False,
        vote: Callable[[], None] | None = None,
    ) -> bool:
        """Enqueue the plan of a call with these buffers, as `DeviceEngine.enqueue` does. Local.

        A ``blocking`` collective may wait as `_enqueue_after_barrier` does, and has no ``event``. ``vote`` publishes
        that the call is on GPUs. It is called when nothing can refuse the call any more. Raises the error of an earlier
        call, and `InvalidUsageError` if the communicator was freed.
        """
        session = self._session
        session.require_usable(plan)
        array = receive if plan.by_output else send
        if type(array) is not self._cupy:
            array = array_of(array)
        backend: Any = session.backend
        resolved = backend.stream(stream, array)
        if vote is not None:
            vote()
        if blocking and backend.needs_host_barrier(resolved, array):
            pending = self._enqueue_after_barrier(plan, resolved, array)
        else:
            pending = self.engine.enqueue(plan, resolved, event)
        # No library knows which stream next uses memory that an address names.
        if blocking and (backend.completes or (plan.by_address and stream is None)):
            backend.complete(resolved)
        return pending

    def start(
        self, plan: AnyPlan, stream: Any, send: Any, receive: Any, vote: Callable[[], None] | None = None
    ) -> DeferredRequest:
        """Enqueue the plan of a nonblocking call, as `enqueue` does; return its request. Local."""
        backend, mark = self._session.backend, self.engine.completions.acquire()
        is_enqueued = self.enqueue(plan, stream, send, receive, mark, vote=vote)
        done = mark.is_done if is_enqueued else partial(bool, True)
        return self._progress_thread.add(DeferredRequest.of(done, backend.check), backend.prepare_thread)

    def enqueue_on(
        self, plan: AnyPlan, stream: int, event: LocalEvent | Mark | None = None, *, is_user: bool = False
    ) -> bool:
        """As `enqueue`, on the stream with this address. Return whether ``event`` is recorded after the call. Local.

        ``is_user`` is whether an earlier call has registered this thread as a user of the stream.
        """
        session: Any = self._session
        session.require_usable(plan)
        if not is_user:
            session.backend.add_user(stream)
        return self.engine.enqueue(plan, stream, event)

    def _enqueue_after_barrier(self, plan: AnyPlan, stream: int, array: Any) -> bool:
        """Enqueue the plan of a blocking collective of a program with several threads, after a barrier on the host.

        Without the barrier another thread could wait for the whole device, hence for the kernel, which waits for its
        peers. A peer may need work of that thread before it can come to the collective. If several threads use the
        stream, the collective runs on a side stream, and this thread waits for it.
        """
        backend: Any = self._session.backend
        if backend.needs_side_stream(stream, array):
            with synchronized_side_stream(backend, stream) as side:
                return self.engine.enqueue(plan, side, host_barrier=True)
        return self.engine.enqueue(plan, stream, host_barrier=True)

    def add(self, plan: AnyPlan, call: tuple[Any, ...], *, by_output: bool, read: Call | None = None) -> None:
        """Keep the plan of a call with the arguments of `find`, if the cache can recognise them; local.

        ``read`` is the same call, as read. With it, `find` also finds other calls of its kind from now on.
        """
        plan.by_output = by_output
        plan.by_address = read is not None and any(operand.memory.by_address for operand in read.operands)
        operation, algorithm, send, receive, op, root, counts, epilogue, wire = call
        epilogue_key, arrays = (wire or (), ()) if epilogue is None else epilogue.key()
        if epilogue_key is None:
            return
        sent, received = _descriptors(operation, send, receive, counts)
        if received is None:
            return
        kind = self._kind_of((operation, sent[2], received[2], id(op), root, epilogue_key, algorithm), op)
        template_of, plan.template_of = plan.template_of, None  # it refers to the arrays of the call
        # The same memory passed twice means in place, and so do two empty arrays. Other calls with two arrays of these
        # kinds have another form.
        is_kind = is_descriptor(sent) and is_descriptor(received)
        if kind.template is None and is_kind and read is not None and (send is MPI.IN_PLACE or not read.in_place):
            template = template_of and template_of()
            if template is not None and template.takes(sent, received, *arrays):
                kind.template = template
        _store(kind, (sent, received, *arrays), plan)

    def add_message(
        self,
        plan: Plan,
        operation: str,
        send: Any,
        receive: Any,
        route: tuple[int, int, int, int],
        to_peer: Message | None,
        from_peer: Message | None,
    ) -> None:
        """Keep the plan of a message with the arguments of `find_message`, if they can be recognised; local.

        ``to_peer`` and ``from_peer`` are the messages of the call. From now on `find_message` also finds others of its
        kind.
        """
        sent, received = buffer_key(send), buffer_key(receive)
        if sent is None or received is None:
            return
        kind = self._kind_of((operation, sent[2], received[2], id(None), 0, route, "stream"), None)
        ends = (sent, to_peer), (received, from_peer)
        # The lengths of blocks add up in another way, and an empty message does not tell the bytes of an element.
        if kind.template is None and all(len(plain) == 3 and (end is None or end.span.count) for plain, end in ends):
            assert plan.template_of is not None
            kind.template = plan.template_of(*(0 if end is None else end.span.count // plain[1] for plain, end in ends))
        _store(kind, (sent, received), plan)

    def _kind_of(self, key: Hashable, op: MPI.Op | None) -> _CallKind:
        """Return the kind with this key, perhaps a new one without calls."""
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MAX_CACHED:
                self._kinds.clear()
            kind = self._kinds[key] = _CallKind(op, None, {})
        return kind

    def _drop_addresses(self) -> None:
        """Forget all addresses: symmetric memory may have become ordinary memory, or the other way round."""
        self._version = self._mappings.version
        self._by_key.clear()
        for kind in self._kinds.values():
            kind.calls.clear()


def _store(kind: _CallKind, call: tuple[Any, ...], plan: AnyPlan) -> None:
    if kind.template is not None:
        kind.template.by_output, kind.template.by_address = plan.by_output, plan.by_address
    if len(kind.calls) >= _MAX_CACHED:
        _evict(kind.calls)
    kind.calls[call] = plan


def _evict(calls: dict[Hashable, AnyPlan | int]) -> None:
    """Drop the calls that were only filled in, and if many are left, all calls."""
    plans = {call: kept for call, kept in calls.items() if not isinstance(kept, int)}
    calls.clear()
    if len(plans) < _MAX_CACHED // 2:
        calls.update(plans)


def _descriptors(
    operation: Operation, send: Any, receive: Any, counts: Sequence[int] | None
) -> tuple[Any, ArrayDescriptor | BlocksDescriptor | None]:
    """Return both buffers as `buffer_key` reads them; None for the second if they cannot be recognised."""
    if operation is ALLTOALLV:
        # Kernels read counts of an Alltoallv that lie on the device, so the plan does not depend on their values.
        given = buffer_key(send, counts_on_device=True)
        return given, None if given is None else buffer_key(receive, counts_on_device=True)
    in_place = operation is REDUCE_SCATTER and send is MPI.IN_PLACE
    sent: Any = buffer_key(receive if in_place else send)
    if operation is REDUCE_SCATTER:  # recvcounts cut the input
        # Without counts the ranks exchange their counts in every call, and the counts may have changed.
        if counts is None or sent is None or receive is MPI.IN_PLACE:
            return None, None
        cut = as_integers(counts)
        if cut is not None and len(sent) == 3:
            sent = (*sent, cut, None)
        else:
            shares = items_key(counts)
            sent = None if shares is None else (*sent[:2], (sent[2:], "items"), shares, None)
    return sent, None if sent is None else buffer_key(send if in_place else receive)
