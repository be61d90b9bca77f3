"""SymmetricArray: an array of the same shape on every rank; all ranks of a node open each other's parts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mpicomm.cluster.process import close_after
from mpicomm.devices.cuda.types import Backend
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError
from mpicomm.session import Session
from mpicomm.sharing.segments import SharedSegments, SignalPad

_MOST_NBYTES = 2**63 - 1


def _only_of_local(operation: str) -> Callable[..., NoReturn]:
    def refuse(self: SymmetricArray, *arguments: object, **options: object) -> NoReturn:
        raise InvalidUsageError(
            f"{operation}: a SymmetricArray is no ndarray: use a.local, the ndarray of this rank, or a.peer(rank)"
        )

    return refuse


class SymmetricArray:
    """Memory of the same shape and dtype on every rank, mapped by all ranks of the node.

    ``comm.empty``, ``comm.zeros`` and ``comm.register`` create it. `local` and `peer` are NumPy arrays on the host and
    CuPy arrays on a GPU. Kernels and array expressions access a peer's memory as they access local memory. Only
    `signal` with `wait_signal`, barriers and events order the accesses of two ranks.

    The memory lives until `close` or the communicator's ``Free``, whichever comes first. It outlives the last reference
    to this object, because freeing is collective, and garbage collection is not. Afterwards the views on a GPU are
    invalid; the views on the host stay readable.

        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        with comm.zeros(8) as a:
            a.put(cp.ones(4), following, offset=4)
            a.signal(following)
            a.wait_signal(previous)
    """

    def __init__(
        self, owner: Session, segments: SharedSegments, pad: SignalPad, local: Any, number: int, *, registered: bool
    ) -> None:
        self._owner = owner
        self._segments = segments
        self._pad = pad
        self._number = number
        self._registered = registered
        self._local = local
        self._peers: dict[int, Any] = {}
        self._pointers: Any = None
        self.shape: tuple[int, ...] = local.shape
        self.dtype: np.dtype[Any] = local.dtype
        self.size: int = local.size
        self.nbytes: int = local.nbytes
        self.closed = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"device={self._owner.placement.here.device!r}"
        return f"<SymmetricArray shape={self.shape} dtype={self.dtype} {state}>"

    def __enter__(self) -> SymmetricArray:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)

    def __dlpack__(self, **options: Any) -> Any:
        return self.local.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.local.__dlpack_device__()
        return int(kind), int(number)

    # NumPy takes an object without __array__ for a scalar, and puts the object itself into results.
    __array__ = _only_of_local("NumPy")
    __getitem__ = __setitem__ = _only_of_local("indexing")
    __len__ = _only_of_local("len")
    __add__ = __radd__ = __sub__ = __rsub__ = _only_of_local("arithmetic")
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _only_of_local("arithmetic")
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _only_of_local("arithmetic")
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _only_of_local("arithmetic")
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __divmod__ = __rdivmod__ = _only_of_local("arithmetic")
    __neg__ = __pos__ = __abs__ = __invert__ = _only_of_local("arithmetic")
    __lt__ = __le__ = __gt__ = __ge__ = _only_of_local("comparison")

    __eq__ = __ne__ = _only_of_local("comparison")
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return True  # otherwise Python asks __len__

    def __reduce__(self) -> NoReturn:
        raise InvalidUsageError(
            "a SymmetricArray cannot be pickled: pass it to a call on buffers, such as Allreduce instead of allreduce, "
            "or pass a.local"
        )

    @property
    def local(self) -> Any:
        """This rank's part: a NumPy or CuPy ndarray of the memory itself."""
        self._require_open("local")
        return self._local

    def peer(self, rank: int) -> Any:
        """Return the part of ``rank``, mapped on this rank: a NumPy or CuPy ndarray of the memory itself. Local.

        Raises `InvalidUsageError` for a rank outside the communicator or on another node.
        """
        index = self._node_index(rank)
        if index == self._pad.rank:
            return self._local
        if index not in self._peers:
            self._peers[index] = self._owner.backend.view(self._segments[index], self.shape, self.dtype)
        return self._peers[index]

    @property
    def pointers(self) -> Any:
        """Address of every rank's part on this rank: uint64[size] on the device, 0 for ranks of other nodes.

        It is for kernels. Do not write to it, because every access returns the same array.
        """
        self._require_open("pointers")
        if self._pointers is None:
            table = [0] * len(self._owner.placement.places)
            for index, rank in enumerate(self._owner.placement.node_ranks):
                table[rank] = self._segments[index].pointer
            self._pointers = self._owner.backend.pointer_table(table)
        return self._pointers

    def put(self, src: Any, peer: int, *, offset: int = 0, stream: Any = None) -> None:
        """Copy ``src`` into the part of ``peer``, from element ``offset`` of the flattened array on. Local.

        ``src`` is a C-contiguous array of this dtype on this rank's device. Stream-ordered on a GPU, blocking on the
        host. A `signal` on the same stream tells the peer that the data has arrived. Raises `InvalidUsageError`.
        """
        index = self._node_index(peer)
        source = self._checked(src, "src")
        try:
            offset = operator.index(offset)  # some of NumPy's integers are too small for an address
        except TypeError:
            raise InvalidUsageError(f"offset={offset!r} is no int: use the index of an element") from None
        if not 0 <= offset <= self.size - source.size:
            raise InvalidUsageError(
                f"src has {source.size} elements and offset={offset}: they do not fit into {self.size} elements"
            )
        target = self._segments[index].pointer + offset * self.dtype.itemsize
        backend = self._owner.backend
        backend.copy(target, address_of(source), source.nbytes, backend.stream(stream, src))

    def get(self, peer: int, out: Any = None, *, stream: Any = None) -> Any:
        """Copy the whole part of ``peer`` into ``out``, or into a new array of this shape, and return it. Local.

        ``out`` is a writable C-contiguous array of this dtype and size on this rank's device. Stream-ordered on a GPU,
        blocking on the host. Raises `InvalidUsageError`.
        """
        index = self._node_index(peer)
        if out is None:
            out = np.empty_like(self._local)  # CuPy makes it if the part is a CuPy array
        target = self._checked(out, "out")
        if target.size != self.size:
            raise InvalidUsageError(f"out has {target.size} elements, the array {self.size}: pass an array of as many")
        if not _writable(target):
            raise InvalidUsageError("out is read-only: pass an array that can be written")
        backend = self._owner.backend
        backend.copy(address_of(target), self._segments[index].pointer, self.nbytes, backend.stream(stream, out))
        return out

    def signal(self, peer: int, *, stream: Any = None) -> None:
        """Release one `wait_signal` of ``peer`` for this rank and this array. Local; stream-ordered on a GPU.

        The peer sees all earlier work after its `wait_signal`: work of the stream on a GPU, or of this thread on the
        host, such as a `put`. Signals are counted, so several may be ahead of their waits.
        """
        index = self._node_index(peer)
        backend, pad = self._owner.backend, self._pad
        backend.signal(pad.sent(index), pad.remote_inbox(index), backend.stream(stream, self._local))

    def wait_signal(self, peer: int, *, stream: Any = None) -> None:
        """Wait for one `signal` of ``peer`` on this array. Local; blocking on the host, stream-ordered on a GPU.

        After ``timeout_s`` seconds it gives up, and the communicator is unusable. On the host it raises
        `CollectiveTimeoutError`, which names the peer. On a GPU the next call, or ``comm.check()``, raises it.
        """
        index = self._node_index(peer)
        backend, pad = self._owner.backend, self._pad
        try:
            backend.wait_signal(pad.expected(index), pad.inbox(index), peer, backend.stream(stream, self._local))
        except CollectiveTimeoutError as error:
            text = f"{error}; rank {peer} must call signal on the same array, {self!r}"
            raise CollectiveTimeoutError(text, ranks=error.ranks) from None

    def close(self) -> None:
        """Free the memory, after a wait for this rank's device. Collective, blocking. A second call does nothing.

        The caller still owns memory of ``register``; the peers only unmap it.
        """
        if not self.closed:
            self._owner.close_shared(self, "SymmetricArray")

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's part, unless the caller owns it; local."""
        if self._registered:
            return ()
        return (MemoryUse.of_kind("symmetric arrays", self._owner.kind, self._segments.own.nbytes),)

    def memories(self) -> Iterable[SharedSegments]:
        """Return the memory of all ranks; local."""
        return (self._segments,)

    def close_peers(self) -> None:
        """Unmap the peers' parts; local, the first step of a close."""
        self.closed = True
        self._owner.mappings.remove(self._number)
        self._peers.clear()
        self._local = self._pointers = None
        self._segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's part; local, the last step of a close, after every peer's `close_peers`."""
        self._segments.close_own()
        self._owner.pads.release(self._pad)

    def _require_open(self, name: str) -> None:
        if self.closed:
            raise InvalidUsageError(f"{name}: this SymmetricArray is closed; create another with comm.empty()")
        self._owner.require_usable(name)

    def _node_index(self, rank: int) -> int:
        self._require_open("peer access")
        return self._owner.placement.node_index_of(rank)

    def _checked(self, array: Any, name: str) -> Any:
        converted = self._owner.backend.asarray(array, name)
        if converted.dtype != self.dtype:
            raise InvalidUsageError(f"{name} has dtype {converted.dtype}, the array {self.dtype}: convert it first")
        _require_contiguous(converted, name)
        return converted


def shareable_array(backend: Backend, array: Any, name: str) -> Any:
    """Return an array of the caller as NumPy's or CuPy's. Raises `InvalidUsageError` if peers cannot access it."""
    view = backend.asarray(array, name)
    _require_contiguous(view, name)
    if not _writable(view):
        raise InvalidUsageError(f"{name} is read-only, and peers could write it: pass an array that can be written")
    return view


def _require_contiguous(array: Any, name: str) -> None:
    if not array.flags.c_contiguous:
        raise InvalidUsageError(
            f"{name} of shape {array.shape} with strides {array.strides} is not C-contiguous: copy it first "
            "(numpy.ascontiguousarray, cupy.ascontiguousarray)"
        )


def checked_shape(shape: int | Sequence[int], dtype: npt.DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype as NumPy does; raises `InvalidUsageError` for values that no array can have."""
    try:
        sizes = tuple(operator.index(n) for n in shape) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError:
        raise InvalidUsageError(f"shape={shape!r} is no shape: use an int or a tuple of ints") from None
    try:
        element = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        hint = f"; a shape is a tuple: {(*sizes, dtype)}" if isinstance(dtype, int) else ""
        raise InvalidUsageError(f"dtype={dtype!r} is no NumPy dtype: {error}{hint}") from None
    if element.subdtype is not None:
        raise InvalidUsageError(f"dtype={element} is itself an array: add its shape to the shape of the array")
    if element.hasobject or element.itemsize == 0:
        raise InvalidUsageError(f"dtype={element} holds no plain bytes of a fixed size: use a numeric dtype")
    if any(n < 0 for n in sizes):
        raise InvalidUsageError(f"shape={sizes} has a negative size: use 0 or more")
    nbytes = element.itemsize * math.prod(sizes)
    if nbytes > _MOST_NBYTES:
        raise InvalidUsageError(f"shape={sizes} of {element} has {nbytes} bytes, more than an address can count")
    return sizes, element


def _writable(array: Any) -> bool:
    # CuPy's flags have no writeable, because its arrays are always writable.
    return bool(getattr(array.flags, "writeable", True))


def address_of(array: Any) -> int:
    """Return the address of an array of NumPy or CuPy."""
    # NumPy's `data` is a memoryview, which some dtypes (bfloat16, dates) do not allow.
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
