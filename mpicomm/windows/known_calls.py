"""Known calls: calls of a window that differ from an earlier call only in addresses and counts.

An earlier call with the same operation, target rank and type of elements has passed all checks. So a known call checks
only addresses, counts and the epoch. Any doubt leaves the call to `Window`, which raises the errors.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.mpi.plain_arrays import plain_array
from mpicomm.windows.steps import RunUpdate

# These are plain tuples, because a tuple without names takes a third of the time to make.
_Form = tuple[int, int, int, int, "RunUpdate | None"]
"""The facts that calls of one form have in common: the address of the part of the target rank, its bytes and its
displacement unit, the bytes of an element, and the launches of an update."""
KnownCall = tuple[int, int, int, int, "RunUpdate | None"]
"""The address of the elements of the target rank, the address of the origin, the address for previous elements or 0,
the number of bytes, and the launches of an update."""


class KnownAccesses:
    """The forms of the calls of a window of a GPU whose buffers are plain arrays."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], _Form] = {}

    def find(
        self, operation: Any, origin: Any, result: Any, target_rank: Any, target: Any, count: int | None = None
    ) -> KnownCall | None:
        """Return the steps of a call; None if its form is not known, or if it is wrong.

        ``operation`` is "put", "get", or the key of an operation of MPI. Without a result, ``result`` is None. If the
        call takes a certain number of elements, ``count``, its target is a displacement.
        """
        datatype = 0
        if type(target) is not int:
            place = _place_of(target) if count is None else None
            if place is None:
                return None
            target, count, datatype = place
        plain = plain_array(origin)
        if plain is None or len(plain) != 3:
            return None
        pointer, elements, kind = plain
        form = self._forms.get((operation, target_rank, kind, datatype))
        if form is None or (count is not None and elements != count):
            return None
        part, nbytes_of_part, disp_unit, itemsize, update = form
        start, nbytes, previous = target * disp_unit, elements * itemsize, 0
        if start < 0 or nbytes == 0 or start + nbytes > nbytes_of_part:
            return None
        if result is not None:
            plain = plain_array(result)
            if plain is None or plain[1:] != (elements, kind):
                return None
            previous = plain[0]
        address = part + start
        # GPUs update elements at multiples of their size.
        if update is not None and (address | pointer | previous) % itemsize:
            return None
        return address, pointer, previous, nbytes, update

    def add(
        self,
        operation: Any,
        origin: Any,
        target_rank: int,
        target: Any,
        part: tuple[int, int, int],
        nbytes: int,
        update: RunUpdate | None,
    ) -> None:
        """Learn the form of a call that has passed all checks.

        ``part`` has the address of the part of the target rank, its bytes and its displacement unit. ``nbytes`` are the
        bytes of ``origin``.
        """
        plain, place = plain_array(origin), _place_of(target)
        if plain is None or len(plain) != 3 or not plain[1]:
            return
        itemsize = nbytes // plain[1]
        if place is not None and place[2]:
            datatype = target[2]
            if not datatype.is_predefined or datatype.size != itemsize or datatype.extent != itemsize:
                return
        self._forms[operation, target_rank, plain[2], place[2] if place else 0] = *part, itemsize, update


def _place_of(target: Any) -> tuple[int, int | None, int] | None:
    """Return the displacement, the count and MPI's handle of the datatype in a target; None and 0 for none.

    Return None for a target in an unusual form.
    """
    if target is None or type(target) is int:
        return target or 0, None, 0
    if type(target) not in (tuple, list) or not 2 <= len(target) <= 3:
        return None
    disp, count, *datatypes = target
    if type(disp) is not int or type(count) is not int or any(type(each) is not MPI.Datatype for each in datatypes):
        return None
    return disp, count, datatypes[0].handle if datatypes else 0


def key_of(op: Any) -> int | None:
    """Return the key of an operation of MPI; None for an operation of the user."""
    return op.handle if type(op) is MPI.Op else None
