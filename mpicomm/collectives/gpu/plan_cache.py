"""KnownCalls: collectives on device arrays that were made before, recognised by their arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicomm.mpi.buffers import array_of

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.engine import DeviceEngine
    from mpicomm.collectives.gpu.plan import Plan
    from mpicomm.session import Session

_MOST = 1024  # calls that are kept
_PLAIN = frozenset((int, str, type(None)))  # types of what is known by itself; no subclasses, to which True belongs


class KnownCall(NamedTuple):
    """A call that was made before."""

    plan: Plan
    op: MPI.Op | None
    """The operation: while it lives, nothing else has its id."""
    by_output: bool
    """Whether the receive buffer says which library's stream is meant; the other one may be anything, and ignored."""


class KnownCalls:
    """Plans by the arguments of the calls they carry out, all of what a plan depends on.

    To read and check the arguments takes ten times as long as to enqueue a kernel, and programs call the same again and
    again. Only CuPy's and PyTorch's arrays are recognised, by what they say of their memory: the objects themselves are
    often new, and can be changed in place. Of what comes with them, counts and displacements are, and types by their
    name or as one of MPI's own: what a derived one is, its handle does not say for good.
    """

    def __init__(self, session: Session, engine: DeviceEngine) -> None:
        self._session = session
        self._engine = engine
        self._calls: dict[Hashable, KnownCall] = {}
        self._version = session.mappings.version
        self._cupy = _of_library("cupy", "ndarray")
        self._identify: dict[type, Callable[[Any], Hashable]] = {
            type(None): id,
            type(MPI.IN_PLACE): id,
            self._cupy: _identify_cupy,
        }

    def find(
        self,
        operation: str,
        algorithm: str,
        send: Any,
        receive: Any,
        op: MPI.Op | None,
        root: Hashable,
        counts: Sequence[int] | None,
    ) -> KnownCall | None:
        """Return a call that was made before; None if it was not.

        Of a message ``root`` is its ends and tags.
        """
        version = self._session.mappings.version
        if version != self._version:  # symmetric memory may be ordinary now, or the other way round
            self._version = version
            self._calls.clear()
        try:
            return self._calls.get(self._key(operation, algorithm, send, receive, op, root, counts))
        except TypeError:  # a root that is a list, say, of which `Call` says what is wrong
            return None

    def enqueue(self, call: KnownCall, stream: Any, send: Any, receive: Any) -> bool:
        """Enqueue the plan of a call with these buffers again; return as `DeviceEngine.enqueue`. Local.

        Raises as any call does: what went wrong with earlier ones, and where the communicator was freed.
        """
        session, plan = self._session, call.plan
        session.require_usable(plan.text)
        resolved = session.backend.stream(stream, array_of(receive if call.by_output else send))
        return self._engine.enqueue(plan, resolved, again=True)

    def begin(self, call: KnownCall, stream: Any, send: Any, receive: Any) -> Callable[[], bool]:
        """As `enqueue`; return a function that says whether it is done, callable in any thread."""
        return self._engine.completion() if self.enqueue(call, stream, send, receive) else lambda: True

    def add(
        self,
        plan: Plan,
        call: tuple[str, str, Any, Any, MPI.Op | None, Hashable, Sequence[int] | None],
        *,
        by_output: bool,
    ) -> None:
        """Keep the plan of a call, that of `find`, if it can be recognised; local."""
        key = self._key(*call)
        if key is not None:
            if len(self._calls) >= _MOST:
                self._calls.clear()
            self._calls[key] = KnownCall(plan, call[4], by_output)

    def _key(
        self,
        operation: str,
        algorithm: str,
        send: Any,
        receive: Any,
        op: MPI.Op | None,
        root: Hashable,
        counts: Sequence[int] | None,
    ) -> Hashable:
        """Return what a call is known by, None if it cannot be."""
        if type(send) is type(receive) is self._cupy and operation != "Reduce_scatter":
            # As below, spelled out: it is on the way of nearly every call, and takes half the time.
            return (
                operation,
                send.data.ptr,
                send.size,
                send.dtype,
                send._c_contiguous or (send.shape, send.strides),
                receive.data.ptr,
                receive.size,
                receive.dtype,
                receive._c_contiguous or (receive.shape, receive.strides),
                id(op),
                root,
                algorithm,
            )
        if operation == "Reduce_scatter" and counts is None and send is not MPI.IN_PLACE:
            return None  # the ranks tell each other, in every call, how much they want
        sent, received, shares = self._identity_of(send), self._identity_of(receive), _identify_said(counts)
        if sent is None or received is None or shares is None:
            return None
        return operation, sent, received, shares, id(op), root, algorithm

    def _identity_of(self, argument: Any) -> Hashable:
        """Return what a buffer argument is known by, None if it cannot be."""
        if type(argument) in (list, tuple) and argument:
            array, length = self._identity_of(argument[0]), len(argument)
            said = None if array is None else _identify_said(argument[1] if length == 2 else tuple(argument[1:]))
            return None if said is None else (array, length, said)
        identify = self._identify.get(type(argument)) or self._find(type(argument))
        return None if identify is None else identify(argument)

    def _find(self, array: type) -> Callable[[Any], Hashable] | None:
        if array is _of_library("torch", "Tensor"):
            self._identify[array] = _identify_torch
        return self._identify.get(array)


def _of_library(library: str, name: str) -> Any:
    """Return a class of a library, None if that is not imported: then nobody can have an object of it."""
    return getattr(sys.modules.get(library), name, None)


def _identify_cupy(array: Any) -> Hashable:
    # Of contiguous memory nothing but its size matters. `array.flags`, which is public, takes eight times as long.
    return array.data.ptr, array.size, array.dtype, array._c_contiguous or (array.shape, array.strides)


def _identify_torch(tensor: Any) -> Hashable:
    if not tensor.is_cuda:  # empty ones of the host are at the same address as those of a GPU
        return None
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # sparse, say, of which `read` says that it cannot be taken
        return None
    return (
        pointer,
        tensor.numel(),
        tensor.dtype,
        tensor.is_contiguous() or (tensor.shape, tensor.stride()),
        # One of these is refused, although its memory may be that of another tensor, which is known.
        tensor.requires_grad or tensor.is_conj() or tensor.is_neg(),
    )


def _identify_said(said: Any) -> Hashable:
    """Return what counts, displacements and types are known by, None if they cannot be: as they are now."""
    kind = type(said)
    if kind is list or kind is tuple:  # which mean different things
        if _PLAIN.issuperset(map(type, said)):
            return kind, *said
        parts = tuple(map(_identify_said, said))
        return None if None in parts else (kind, parts)
    if kind is np.ndarray:
        return (kind, said.dtype.str, said.shape, said.tobytes()) if said.dtype.kind in "iu" else None
    if kind is MPI.Datatype:
        return (kind, said.handle) if said.is_predefined else None
    return (kind, said) if kind in _PLAIN or isinstance(said, np.integer) else None
