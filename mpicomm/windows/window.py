"""Window: MPI's one-sided calls on memory that all ranks have mapped, in the order of streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.devices.base import Link
from mpicomm.kernels.window import SWAPPED_SIZES
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.windows.buffers import LocalBuffer, Target, read_buffer, read_target
from mpicomm.windows.dynamic import DynamicMemory
from mpicomm.windows.known_calls import KnownAccesses, KnownCall, key_of
from mpicomm.windows.memory import WindowMemory
from mpicomm.windows.staging import Staging
from mpicomm.windows.steps import GpuSteps
from mpicomm.windows.synchronisation import Synchronisation
from mpicomm.windows.updates import Update, as_pairs, name_of, require_alike, require_bytes, require_one, update_of


class Window(Synchronisation):
    """The parts of all ranks, and the epochs of this rank. All methods are local, except `fence`.

    Calls are stream-ordered on a GPU: they return when their steps are enqueued. They block on the host. Every fault of
    an argument raises before the first step, so nothing is written then.
    """

    def __init__(
        self, memory: WindowMemory, array: Any, group: Callable[[], MPI.Group], links: Callable[[], Sequence[Link]]
    ) -> None:
        super().__init__(memory, array, group, links)
        self._staging = Staging(self._gpu, self.steps)
        # The memory of a dynamic window has no fixed parts.
        self._known = KnownAccesses() if self._gpu is not None and not isinstance(memory, DynamicMemory) else None

    def put(self, origin: Any, target_rank: int, target: Any, stream: Any) -> None:
        """Copy ``origin`` into the part of ``target_rank``."""
        known = self._begin_known("Win.Put", "put", origin, None, target_rank, target, stream)
        if known is None:
            local = self.start_put("Win.Put", origin, target_rank, target, stream)
            self._learn("put", origin, target_rank, target, local, None)
        else:
            (address, pointer, _, nbytes, _), where = known
            self.steps.copy(address, pointer, nbytes, where)
            self.streams.after_access(where, captures=False)

    def get(self, origin: Any, target_rank: int, target: Any, stream: Any) -> None:
        """Copy from the part of ``target_rank`` into ``origin``."""
        known = self._begin_known("Win.Get", "get", origin, None, target_rank, target, stream)
        if known is None:
            local = self.start_get("Win.Get", origin, target_rank, target, stream)
            self._learn("get", origin, target_rank, target, local, None)
        else:
            (address, pointer, _, nbytes, _), where = known
            self.steps.copy(pointer, address, nbytes, where)
            self.streams.after_access(where, captures=False)

    def accumulate(
        self, what: str, origin: Any, result: Any, target_rank: int, target: Any, op: MPI.Op, stream: Any
    ) -> None:
        """Update the part of ``target_rank``, each element atomically; see `start_accumulate`."""
        known = self._begin_known(what, key_of(op), origin, result, target_rank, target, stream)
        if known is None:
            self.start_accumulate(what, origin, result, target_rank, target, op, stream)
        else:
            self._update_known(*known)

    def start_put(self, what: str, origin: Any, target_rank: int, target: Any, stream: Any) -> LocalBuffer | None:
        """Do as `put`, and return the buffer; None for MPI.PROC_NULL."""
        return self._access(what, origin, target_rank, target, stream, self._move_out, writable=False)

    def start_get(self, what: str, origin: Any, target_rank: int, target: Any, stream: Any) -> LocalBuffer | None:
        """Do as `get`, and return the buffer; None for MPI.PROC_NULL."""
        return self._access(what, origin, target_rank, target, stream, self._move_in, writable=True)

    def _access(
        self,
        what: str,
        origin: Any,
        target_rank: int,
        target: Any,
        stream: Any,
        move: Callable[[LocalBuffer, Target, int], None],
        *,
        writable: bool,
    ) -> LocalBuffer | None:
        """Read the arguments of `put` or `get`, and ``move`` the elements. Return the buffer as `start_put` does."""
        if self._is_nowhere(what, target_rank):
            return None
        local = read_buffer(origin, self._backend, writable=writable, name="origin")
        there = read_target(target, target_rank, self.memory, local, what)
        self.epochs.require_access(what, target_rank)
        if local.nbytes:
            where, captures = self._begin_access(stream, local)
            move(local, there, where)
            self.streams.after_access(where, captures=captures)
        return local

    def start_accumulate(
        self, what: str, origin: Any, result: Any, target_rank: int, target: Any, op: MPI.Op, stream: Any
    ) -> LocalBuffer | None:
        """Do as `accumulate`, and return a buffer; None for MPI.PROC_NULL.

        ``result`` gets the previous elements, or is None.
        """
        if self._is_nowhere(what, target_rank):
            return None
        name = name_of(op, what)
        before = None if result is None else self._read_pairs(result, "result", writable=True)
        values = None
        if name != "no_op" or before is None:
            values = self._read_pairs(origin, "origin")
        local = before or values if values is None else values
        assert local is not None
        there = read_target(target, target_rank, self.memory, local, what, as_pairs)
        if before is not None and values is not None:
            require_bytes(before, values.nbytes, "origin", what)
        if not local.nbytes:
            self.epochs.require_access(what, target_rank)
            return local
        update = update_of(name, there.elements, what)
        for each in (values, before):
            if each is not None:
                require_alike(there.elements, each, what)
        self.require_atomics(what, 1 << target_rank)
        self.steps.require_updatable(update, there, what)
        self.epochs.require_access(what, target_rank)
        if before is not None or name != "no_op":
            where, captures = self._begin_access(stream, local)
            self._update(update, there, values, before, where)
            self.streams.after_access(where, captures=captures)
        if values is not None and not update.reads_only:
            self._learn(key_of(op), origin, target_rank, target, values, update)
        return local

    def fetch_and_op(
        self, what: str, origin: Any, result: Any, target_rank: int, target_disp: int, op: MPI.Op, stream: Any
    ) -> None:
        """Do as `accumulate` with one element."""
        known = self._begin_known(what, key_of(op), origin, result, target_rank, target_disp, stream, 1)
        if known is not None:
            self._update_known(*known)
            return
        if self._is_nowhere(what, target_rank):
            return
        before = self._read_pairs(result, "result", writable=True)
        require_one(before, what)
        if origin is not None:  # mpi4py compares an origin also if the operation does not read it
            value = self._read_pairs(origin, "origin")
            require_one(value, what)
            require_alike(before.elements, value, what)
        self.start_accumulate(what, origin, result, target_rank, (target_disp, 1), op, stream)

    def compare_and_swap(
        self, what: str, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int, stream: Any
    ) -> None:
        """Store ``origin`` if an element equals ``compare``. ``result`` gets the previous element."""
        if self._is_nowhere(what, target_rank):
            return
        before = read_buffer(result, self._backend, writable=True, name="result")
        value = read_buffer(origin, self._backend, writable=False, name="origin")
        expected = read_buffer(compare, self._backend, writable=False, name="compare")
        there = read_target((target_disp, 1), target_rank, self.memory, before, what)
        for each in (before, value, expected):
            require_one(each, what)
            require_alike(there.elements, each, what)
        if there.elements.nbytes not in SWAPPED_SIZES:
            raise RefusedByMpiError(
                f"{what}: elements of {there.elements.dtype} have {there.elements.nbytes} bytes: pass an integer, a "
                "logical value or a byte",
                MPI.ERR_TYPE,
            )
        update = update_of("replace", there.elements, what)
        self.require_atomics(what, 1 << target_rank)
        self.steps.require_updatable(update, there, what)
        self.epochs.require_access(what, target_rank)
        where, captures = self._begin_access(stream, before)
        places = self._staging.places([value, expected, before], there.elements.nbytes, where)
        self.steps.compare_and_swap(
            there,
            self._staging.packed(value, where, places[0]),
            self._staging.packed(expected, where, places[1]),
            places[2] or before.pointer,
            where,
        )
        if places[2]:
            self._staging.unpack(before, places[2], where)
        self.streams.after_access(where, captures=captures)

    def _update(
        self, update: Update, there: Target, values: LocalBuffer | None, before: LocalBuffer | None, stream: int
    ) -> None:
        places = self._staging.places([values, before], update.dtype.itemsize, stream)
        source = 0 if values is None or update.reads_only else self._staging.packed(values, stream, places[0])
        result = 0 if before is None else places[1] or before.pointer
        self.steps.accumulate(update, there, source, result, stream)
        if before is not None and places[1]:
            self._staging.unpack(before, result, stream)

    def _update_known(self, call: KnownCall, stream: int) -> None:
        """Carry out a known update."""
        address, pointer, previous, nbytes, update = call
        assert update is not None
        update(address, pointer, previous, nbytes, stream)
        self.streams.after_access(stream, captures=False)

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
    ) -> tuple[KnownCall, int] | None:
        """Return the steps of a known call and its stream, as `_begin_access` does.

        Return None for a call that is not known, or whose stream captures a graph.
        """
        call = None if self._known is None else self._known.find(operation, origin, result, target_rank, target, count)
        if call is None or self._gpu is None:
            return None
        self.require_usable(what)
        self.epochs.require_access(what, target_rank)
        where = self._gpu.eager_stream(stream, array_of(origin))
        if where is None:
            return None
        self.streams.before_access(where, captures=False)
        return call, where

    def _learn(
        self,
        operation: Any,
        origin: Any,
        target_rank: int,
        target: Any,
        local: LocalBuffer | None,
        update: Update | None,
    ) -> None:
        """Learn the form of a call that has passed all checks. ``local`` is the buffer ``origin``."""
        if self._known is None or operation is None or local is None or not local.on_device:
            return
        assert isinstance(self.steps, GpuSteps)
        part = self.memory.parts[target_rank]
        launches = None if update is None else self.steps.run_update(update)
        place = self.memory.pointers[target_rank], part.nbytes, part.disp_unit
        self._known.add(operation, origin, target_rank, target, place, local.nbytes, launches)

    def _move_out(self, local: LocalBuffer, there: Target, stream: int) -> None:
        steps, layout = self.steps, there.elements.layout
        if layout is None:
            if local.elements.layout is None:
                steps.copy(there.address, local.pointer, local.nbytes, stream)
            elif self._staging.reaches(local):
                steps.gather(local.elements.layout, local.pointer, there.address, stream)
            else:
                steps.copy(there.address, self._staging.packed(local, stream), local.nbytes, stream)
        else:
            steps.scatter(layout, there.address, self._staging.packed(local, stream), stream)

    def _move_in(self, local: LocalBuffer, there: Target, stream: int) -> None:
        steps, layout = self.steps, there.elements.layout
        if local.elements.layout is None and self._staging.reaches(local):
            if layout is None:
                steps.copy(local.pointer, there.address, local.nbytes, stream)
            else:
                steps.gather(layout, there.address, local.pointer, stream)
            return
        source = there.address
        if layout is not None:
            source = steps.scratch(local.nbytes, stream)
            steps.gather(layout, there.address, source, stream)
        self._staging.unpack(local, source, stream)

    def completion(self, local: LocalBuffer | None, stream: Any) -> Callable[[], bool]:
        """Return a function that says whether the last call on ``local`` is done."""
        if local is None:
            return lambda: True
        return self._backend.completion(self._resolve(stream, self._array_of(local))[0])

    def prepare_thread(self) -> None:
        """Prepare a thread of mpicomm for work on the device."""
        self._backend.prepare_thread()

    def _read_pairs(self, spec: Any, name: str, *, writable: bool = False) -> LocalBuffer:
        """Read a buffer whose elements may be pairs."""
        local = read_buffer(spec, self._backend, writable=writable, name=name)
        local.elements = as_pairs(local.elements)
        return local

    def _begin_access(self, stream: Any, local: LocalBuffer) -> tuple[int, bool]:
        """Return the stream of an access, after the last synchronisation, and whether it captures a graph.

        The caller calls ``after_access`` later.
        """
        where, captures = self._resolve(stream, self._array_of(local))
        self.streams.before_access(where, captures=captures)
        return where, captures

    def _array_of(self, local: LocalBuffer) -> Any:
        """Return the array whose library says which stream is current."""
        return local.array if local.on_device else self.array

    def _is_nowhere(self, what: str, target_rank: int) -> bool:
        self.require_usable(what)
        if target_rank == MPI.PROC_NULL:
            return True
        self.require_rank(what, "target_rank", target_rank)
        return False
