"""Window: MPI's one-sided calls on memory that all ranks have mapped, in the order of streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from mpi4py.MPI import SUM

from mpicomm.kernels.window import SWAPPED_SIZES
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.descriptors import descriptor_of
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.requests import DeferredRequest, ProgressThread
from mpicomm.windows.buffers import (
    LocalBuffer,
    Update,
    as_pairs,
    operation_name,
    parse_target,
    read_buffer,
    read_target,
    require_same_type,
    require_single_element,
    update_of,
)
from mpicomm.windows.memory import DynamicMemory, WindowMemory
from mpicomm.windows.steps import RunUpdate
from mpicomm.windows.synchronisation import Synchronisation

# These are plain tuples, because a tuple without names takes a third of the time to make.
_Form = tuple[int, int, int, int, "RunUpdate | None"]
"""The facts that calls of one form have in common: the address of the part of the target rank, its bytes and its
displacement unit, the bytes of an element, and the launches of an update."""
_KnownCall = tuple[int, int, int, int, "RunUpdate | None", int]
"""The address of the elements of the target rank, the address of the origin, the address for previous elements or 0,
the number of bytes, the launches of an update, and the stream."""


class WindowCalls(Synchronisation):
    """The calls on memory that all ranks have mapped. All are local, except `Fence`.

    Calls are stream-ordered: they return when their steps are enqueued. Every fault of an argument raises before the
    first step, so nothing is written then.

    A call is *known* if it differs only in addresses and counts from an earlier call, which has passed all checks.
    """

    def _begin(self, memory: WindowMemory, array: Any, group: MPI.Group) -> None:
        super()._begin(memory, array, group)
        self._forms: dict[tuple[Any, ...], _Form] = {}  # of known calls, by operation, target rank and types
        self._progress_thread = ProgressThread(self_driven=True)

    def Put(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy ``origin`` into the part of ``target_rank``. Local, stream-ordered."""
        known = self._begin_known("Win.Put", "put", origin, None, target_rank, target, stream)
        if known is None:
            self._move("Win.Put", origin, target_rank, target, stream, puts=True)
        else:
            address, pointer, _, nbytes, _, resolved = known
            self._steps.copy(address, pointer, nbytes, resolved)
            self._order.after_access(resolved, captures=False)

    def Get(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy from the part of ``target_rank`` into ``origin``. Local, stream-ordered."""
        known = self._begin_known("Win.Get", "get", origin, None, target_rank, target, stream)
        if known is None:
            self._move("Win.Get", origin, target_rank, target, stream, puts=False)
        else:
            address, pointer, _, nbytes, _, resolved = known
            self._steps.copy(pointer, address, nbytes, resolved)
            self._order.after_access(resolved, captures=False)

    def Rput(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Put`; return its request."""
        local = self._move("Win.Rput", origin, target_rank, target, stream, puts=True)
        return self._request_of(local, stream)

    def Rget(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Get`; return its request."""
        local = self._move("Win.Rget", origin, target_rank, target, stream, puts=False)
        return self._request_of(local, stream)

    def Accumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = SUM, *, stream: Any = None
    ) -> None:
        """Combine the part of ``target_rank`` with ``origin``, each element atomically. Local, stream-ordered.

        ``op`` is an operation of MPI on single elements, MPI.REPLACE, MPI.NO_OP, or an `Op`. Sums of float32 on a GPU
        take subnormal numbers for zero. Raises `InvalidUsageError` if the link to the rank carries no atomics.
        """
        self._accumulate("Win.Accumulate", origin, None, target_rank, target, op, stream)

    def Raccumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = SUM, *, stream: Any = None
    ) -> MPI.Request:
        """Start `Accumulate`; return its request."""
        local = self._update_elements("Win.Raccumulate", origin, None, target_rank, target, op, stream)
        return self._request_of(local, stream)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: MPI.Op = SUM, *, stream: Any = None
    ) -> None:
        """Do as `Accumulate`, and copy the previous elements into ``result``. Local, stream-ordered."""
        self._accumulate("Win.Get_accumulate", origin, result, target_rank, target, op, stream)

    def Rget_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: MPI.Op = SUM, *, stream: Any = None
    ) -> MPI.Request:
        """Start `Get_accumulate`; return its request."""
        local = self._update_elements("Win.Rget_accumulate", origin, result, target_rank, target, op, stream)
        return self._request_of(local, stream)

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: MPI.Op = SUM, *, stream: Any = None
    ) -> None:
        """Do as `Get_accumulate` with one element. Local, stream-ordered."""
        what = "Win.Fetch_and_op"
        known = self._begin_known(what, _key_of(op), origin, result, target_rank, target_disp, stream, 1)
        if known is not None:
            self._update_known(known)
            return
        if self._is_proc_null(what, target_rank):
            return
        before = self._read_pairs(result, "result", writable=True)
        require_single_element(before, what)
        if origin is not None:  # mpi4py compares an origin also if the operation does not read it
            value = self._read_pairs(origin, "origin")
            require_single_element(value, what)
            require_same_type(before.elements, value, what)
        self._update_elements(what, origin, result, target_rank, (target_disp, 1), op, stream)

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0, *, stream: Any = None
    ) -> None:
        """Store ``origin`` if the element equals ``compare``, bit by bit; copy the previous element into ``result``.

        Local, stream-ordered.
        """
        what = "Win.Compare_and_swap"
        if self._is_proc_null(what, target_rank):
            return
        before = read_buffer(result, self._backend, writable=True, name="result")
        value = read_buffer(origin, self._backend, writable=False, name="origin")
        expected = read_buffer(compare, self._backend, writable=False, name="compare")
        remote = read_target((target_disp, 1), target_rank, self._memory, before, what)
        for each in (before, value, expected):
            require_single_element(each, what)
            require_same_type(remote.elements, each, what)
        if remote.elements.nbytes not in SWAPPED_SIZES:
            raise RefusedByMpiError(
                f"{what}: elements of {remote.elements.dtype} have {remote.elements.nbytes} bytes: pass an integer, a "
                "logical value or a byte",
                MPI.ERR_TYPE,
            )
        update = update_of("replace", remote.elements, what)
        self._require_atomics(what, 1 << target_rank)
        self._steps.require_updatable(update, remote, what)
        self._require_access(what, target_rank)
        resolved, captures = self._begin_access(stream, before)
        steps, buffers = self._steps, (value, expected, before)
        new, old, previous = (
            steps.device_address(each, resolved, remote.elements.nbytes, index) for index, each in enumerate(buffers)
        )
        steps.pack(value, new, resolved)
        steps.pack(expected, old, resolved)
        steps.compare_and_swap(remote, new, old, previous, resolved)
        steps.unpack(before, previous, resolved)
        self._order.after_access(resolved, captures=captures)

    def _request_of(self, local: LocalBuffer | None, stream: Any) -> MPI.Request:
        """Return the request of a call on ``local``, which is enqueued; None for MPI.PROC_NULL."""
        is_done: Callable[[], bool] = lambda: True  # noqa: E731
        if local is not None:
            is_done = self._backend.completion(self._order.resolve(stream, self._array_of(local))[0])
        work = DeferredRequest.of(is_done, lambda: None)
        if not work.advance():
            work.kept = local
            self._progress_thread.add(work, self._backend.prepare_thread)
        return work

    def _accumulate(
        self, what: str, origin: Any, result: Any, target_rank: int, target: Any, op: MPI.Op, stream: Any
    ) -> None:
        known = self._begin_known(what, _key_of(op), origin, result, target_rank, target, stream)
        if known is None:
            self._update_elements(what, origin, result, target_rank, target, op, stream)
        else:
            self._update_known(known)

    def _move(
        self, what: str, origin: Any, target_rank: int, target: Any, stream: Any, *, puts: bool
    ) -> LocalBuffer | None:
        """Carry out `Put` (``puts``) or `Get`, and return the buffer; None for MPI.PROC_NULL."""
        if self._is_proc_null(what, target_rank):
            return None
        local = read_buffer(origin, self._backend, writable=not puts, name="origin")
        remote = read_target(target, target_rank, self._memory, local, what)
        self._require_access(what, target_rank)
        if local.nbytes:
            resolved, captures = self._begin_access(stream, local)
            steps, layout, address = self._steps, remote.elements.layout, remote.address
            if layout is None and puts:
                steps.pack(local, address, resolved)
            elif layout is None:
                steps.unpack(local, address, resolved)
            elif puts:
                packed = steps.device_address(local, resolved)
                steps.pack(local, packed, resolved)
                steps.move(layout, address, packed, resolved, unpacks=True)
            else:
                packed = steps.device_address(local, resolved)
                steps.move(layout, address, packed, resolved)
                steps.unpack(local, packed, resolved)
            self._order.after_access(resolved, captures=captures)
            self._cache_form("put" if puts else "get", origin, target_rank, target, local, None)
        return local

    def _update_elements(
        self, what: str, origin: Any, result: Any, target_rank: int, target: Any, op: MPI.Op, stream: Any
    ) -> LocalBuffer | None:
        """Carry out an accumulate, and return a buffer; None for MPI.PROC_NULL.

        ``result`` gets the previous elements, or is None.
        """
        if self._is_proc_null(what, target_rank):
            return None
        name = operation_name(op, what)
        before = None if result is None else self._read_pairs(result, "result", writable=True)
        values = None
        if name != "no_op" or before is None:
            values = self._read_pairs(origin, "origin")
        local = before if values is None else values
        assert local is not None
        remote = read_target(target, target_rank, self._memory, local, what, pairs=True)
        if before is not None and values is not None and before.nbytes != values.nbytes:
            raise RefusedByMpiError(
                f"{what}: result has {before.nbytes} bytes, and origin has {values.nbytes}: pass as many elements",
                MPI.ERR_COUNT,
            )
        if not local.nbytes:
            self._require_access(what, target_rank)
            return local
        update = update_of(name, remote.elements, what)
        for each in (values, before):
            if each is not None:
                require_same_type(remote.elements, each, what)
        self._require_atomics(what, 1 << target_rank)
        self._steps.require_updatable(update, remote, what)
        self._require_access(what, target_rank)
        if before is not None or name != "no_op":
            resolved, captures = self._begin_access(stream, local)
            steps, itemsize, source, previous = self._steps, update.dtype.itemsize, 0, 0
            if values is not None:
                source = steps.device_address(values, resolved, itemsize)
                steps.pack(values, source, resolved)
            if before is not None:
                previous = steps.device_address(before, resolved, itemsize, index=1)
            steps.accumulate(update, remote, source, previous, resolved)
            if before is not None:
                steps.unpack(before, previous, resolved)
            self._order.after_access(resolved, captures=captures)
        if values is not None and name != "no_op":
            self._cache_form(_key_of(op), origin, target_rank, target, values, update)
        return local

    def _update_known(self, call: _KnownCall) -> None:
        """Carry out a known update."""
        address, pointer, previous, nbytes, update, stream = call
        assert update is not None
        update(address, pointer, previous, nbytes, stream)
        self._order.after_access(stream, captures=False)

    def _begin_known(
        self,
        what: str,
        operation: Any,
        origin: Any,
        result: Any,
        target_rank: int,
        target: Any,
        stream: Any,
        count: int | None = None,
    ) -> _KnownCall | None:
        """Begin a known call as `_begin_access` does, after a check of its addresses, its counts and the epoch.

        Return None for a call that is not known, is wrong, or whose stream captures a graph. ``operation`` is "put",
        "get", or the key of an operation of MPI. Without a result, ``result`` is None. If the call takes a certain
        number of elements, ``count``, its target is a displacement.
        """
        disp, datatype = target, None
        if type(target) is not int:
            if count is not None:
                return None
            disp, count, datatype = parse_target(target)
            if type(disp) is not int or not (count is None or type(count) is int):
                return None
        plain = descriptor_of(origin)
        if plain is None or len(plain) != 3:
            return None
        pointer, elements, kind = plain
        form = self._forms.get((operation, target_rank, kind, _key_of_type(datatype)))
        if form is None or (count is not None and elements != count):
            return None
        part, nbytes_of_part, disp_unit, itemsize, update = form
        start, nbytes, previous = disp * disp_unit, elements * itemsize, 0
        if start < 0 or nbytes == 0 or start + nbytes > nbytes_of_part:
            return None
        if result is not None:
            plain = descriptor_of(result)
            if plain is None or plain[1:] != (elements, kind):
                return None
            previous = plain[0]
        address = part + start
        # GPUs update elements at multiples of their size.
        if update is not None and (address | pointer | previous) % itemsize:
            return None
        self._require_usable(what)
        self._require_access(what, target_rank)
        resolved = self._backend.eager_stream(stream, array_of(origin))
        if resolved is None:
            return None
        self._order.before_access(resolved, captures=False)
        return address, pointer, previous, nbytes, update, resolved

    def _cache_form(
        self, key: Any, origin: Any, target_rank: int, target: Any, local: LocalBuffer, update: Update | None
    ) -> None:
        """Cache the form of a call that has passed all checks. ``local`` is the buffer ``origin``.

        ``key`` is the ``operation`` of `_begin_known`.
        """
        # The memory of a dynamic window has no fixed parts.
        if key is None or not local.on_device or isinstance(self._memory, DynamicMemory):
            return
        plain, datatype = descriptor_of(origin), parse_target(target)[2]
        if plain is None or len(plain) != 3 or not plain[1]:
            return
        itemsize = local.nbytes // plain[1]
        type_key = _key_of_type(datatype)
        if type_key == "" or (
            type(datatype) is MPI.Datatype
            and not (datatype.is_predefined and datatype.size == datatype.extent == itemsize)
        ):
            return
        launches = None if update is None else self._steps.run_update(update)
        part = self._memory.parts[target_rank]
        form = self._memory.pointers[target_rank], part.nbytes, part.disp_unit, itemsize, launches
        self._forms[key, target_rank, plain[2], type_key] = form

    def _read_pairs(self, spec: Any, name: str, *, writable: bool = False) -> LocalBuffer:
        """Read a buffer whose elements may be pairs."""
        local = read_buffer(spec, self._backend, writable=writable, name=name)
        local.elements = as_pairs(local.elements)
        return local

    def _begin_access(self, stream: Any, local: LocalBuffer) -> tuple[int, bool]:
        """Return the stream of an access, after the last synchronisation, and whether it captures a graph.

        The caller calls ``after_access`` later.
        """
        resolved, captures = self._order.resolve(stream, self._array_of(local))
        self._order.before_access(resolved, captures=captures)
        return resolved, captures

    def _array_of(self, local: LocalBuffer) -> Any:
        """Return the array whose library has the current stream."""
        return local.array if local.on_device else self._array

    def _is_proc_null(self, what: str, target_rank: int) -> bool:
        self._require_usable(what)
        if target_rank == MPI.PROC_NULL:
            return True
        self._require_rank(what, "target_rank", target_rank)
        return False


def _key_of(op: Any) -> int | None:
    """Return the key of an operation of MPI; None for an operation of the user."""
    return op.handle if type(op) is MPI.Op else None


def _key_of_type(datatype: Any) -> Any:
    """Return the key of a datatype, or of its name; "" for an argument whose calls have no form."""
    if datatype is None or type(datatype) is str:
        return datatype
    return datatype.handle if type(datatype) is MPI.Datatype else ""  # datatypes have no hash
