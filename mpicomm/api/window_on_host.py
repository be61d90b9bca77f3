"""The calls of a window of host memory: MPI's, after checks of what MPI does not see or does not name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import is_custom
from mpicomm.kernels.window import MOVING
from mpicomm.mpi.arguments import is_on_device, refuse_stream
from mpicomm.mpi.buffers import is_host_view
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.spec import index_of
from mpicomm.mpi.types import is_covered, is_narrow
from mpicomm.windows.buffers import as_pairs, elements_of, operation_name, target_elements, update_of
from mpicomm.windows.memory import Part, require_inside

_CHECKED = (
    "Put Get Rput Rget Accumulate Raccumulate Get_accumulate Rget_accumulate Fetch_and_op Compare_and_swap "
    "Fence Post Start Complete Wait Test Lock Unlock Lock_all Unlock_all Flush Flush_all Flush_local Flush_local_all "
    "Sync"
)
_BUFFERS = ("origin", "compare", "result")
_LOGICALS = (MPI.LOGICAL, MPI.LOGICAL1, MPI.LOGICAL2, MPI.LOGICAL4, MPI.LOGICAL8, MPI.LOGICAL16)  # NumPy has none
_INTEGERS = ("assertion", "rank", "lock_type", "target_rank", "target_disp")


class HostWindowCalls(MPI.Win):
    """The calls of ``MPI.Win``. They have the results and the requests of MPI, and take no ``stream=``.

    Elements outside of the part of a rank raise `InvalidUsageError`, as far as the call names them plainly. So do
    accumulates of floats of 16 bits or fewer, and operations that are not defined for the elements.
    """

    _parts: Mapping[int, Part] = {}
    """The parts by rank; empty if MPI alone knows them."""

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Return the part of ``rank`` of `Allocate_shared`, a NumPy array of bytes, and its disp_unit. Local."""
        memory, disp_unit = super().Shared_query(index_of(rank, "rank", "Win.Shared_query"))
        return np.asarray(memory), disp_unit

    def tomemory(self) -> Any:
        """Return this rank's part: a NumPy array of bytes. Local."""
        return np.asarray(super().tomemory())

    def Attach(self, memory: Any) -> None:
        """Add host memory to a window of `Create_dynamic`; see mpi4py."""
        require_on_host("Attach", None, memory=memory)
        super().Attach(memory)


def require_on_host(what: str, stream: Any, **buffers: Any) -> None:
    """Raise `InvalidUsageError` for a buffer in device memory, which MPI cannot access, and for a stream."""
    refuse_stream(f"Win.{what}", stream)
    for name, buffer in buffers.items():
        if (type(buffer) is not ndarray or buffer.base is not None) and is_on_device(buffer):
            raise InvalidUsageError(
                f"Win.{what}: {name} lies in device memory, and the window in host memory, where MPI carries the call "
                "out: copy it to the host, or create the window with device memory"
            )


def _checked(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of MPI behind the checks of its arguments.

    It is compiled from text, as the methods of dataclasses are: ``*arguments`` would cost a third of the time of a Put.
    """
    mpi = getattr(MPI.Win, name)
    parameters = [*inspect.signature(mpi).parameters.values()][1:]
    names = ", ".join(["self", *(each.name for each in parameters)])
    defaults = {f"{each.name}_": each.default for each in parameters if each.default is not each.empty}
    heads = [f"{each.name}={each.name}_" if f"{each.name}_" in defaults else each.name for each in parameters]
    buffers = [each.name for each in parameters if each.name in _BUFFERS]
    lines = [f"def {name}({', '.join(['self', *heads, '*', 'stream=None'])}):"]
    if not buffers:
        lines += ["    if stream is not None:", f"        refuse_stream('Win.{name}', stream)"]
    lines.append("    try:")
    if buffers:
        last, shown = buffers[-1], ", ".join(f"{each}={each}" for each in buffers)
        target = next(each.name for each in parameters if each.name in ("target", "target_disp"))
        lines += [
            "        part = self._parts.get(target_rank)",
            "        if (stream is not None or part is None or",
            *(
                f"         type({x}) is not ndarray or {x}.base is not None and not is_host_view({x}) or"
                for x in buffers
            ),
            f"                ({last}.nbytes > part[0] if {target} is None else",
            f"                 type({target}) is not int or not 0 <= {target} * part[1] <= part[0] - {last}.nbytes)):",
            f"            require_on_host({name!r}, stream, {shown})",
            "            if part is not None:",
            f"                _require_inside({name!r}, part, {last}, target_rank, "
            f"{'target' if target == 'target' else '(target_disp, 1)'})",
        ]
    if "op" in names.split(", "):
        lines += [
            "        if type(op) is not Op or type(origin) is not ndarray or (op.handle, origin.dtype) not in _legal:",
            f"            _require_legal('Win.{name}', op, origin, target_rank)",
        ]
    lines.append(f"        return mpi({names})")
    if buffers:
        as_bits = ", ".join(f"_as_bits({each.name})" if each.name in buffers else each.name for each in parameters)
        lines += ["    except BufferError:", f"        return mpi(self, {as_bits})"]
    lines += [
        "    except TypeError:",
        f"        _name_wrong_argument({name!r}, {', '.join(f'{each.name}={each.name}' for each in parameters)})",
        "        raise",
    ]
    scope: dict[str, Any] = {**globals(), **defaults, "mpi": mpi, "Op": MPI.Op, "is_host_view": is_host_view}
    exec("\n".join(lines), scope)
    method: Callable[..., Any] = functools.wraps(mpi)(scope[name])
    return method


_legal: set[tuple[int, np.dtype[Any]]] = set()
"""Operations of MPI by handle, with the element types of arrays that MPI combines by them."""


def _require_legal(what: str, op: Any, origin: Any, rank: Any) -> None:
    """Raise for an operation that MPI does not define for the elements of ``origin``, or gets wrong.

    Before MPI, because MPICH and Open MPI end the process for some of these, and MPICH adds float16 as integers.
    """
    if not isinstance(op, MPI.Op) or rank == MPI.PROC_NULL:
        return  # mpi4py refuses it, or does nothing
    name = operation_name(op, what)
    if name in MOVING:
        return  # any type; and MPI reads no origin of NO_OP
    if is_custom(name):
        raise RefusedByMpiError(
            f"{what}: op={op!r}: MPI has no operations of programs in its windows: make the window on a "
            "communicator of GPUs (place='device'), or pass an operation that MPI defines",
            MPI.ERR_OP,
        )
    elements = as_pairs(elements_of(origin, "origin", only_type=True))
    if elements.dtype is None and elements.datatype in _LOGICALS and name in ("land", "lor", "lxor"):
        return
    try:
        dtype = update_of(name, elements, what).dtype
    except RefusedByMpiError:
        if elements_of(origin, "origin").count:
            raise
        return  # mpi4py's default is SUM, also for no bytes, of which MPI combines none
    if is_narrow(dtype):
        raise RefusedByMpiError(
            f"{what}: op={name} of {dtype}: MPI gets it wrong or lacks it in windows of host memory: make the window "
            "on a communicator of GPUs (place='device'), or pass float32",
            MPI.ERR_TYPE,
        )
    if type(origin) is ndarray:
        _legal.add((op.handle, origin.dtype))


def _as_bits(buffer: Any) -> Any:
    """Return a buffer of floats that MPI lacks, such as bfloat16, as integers, which MPI moves; others as they are."""
    if type(buffer) in (list, tuple) and buffer:
        return [_as_bits(buffer[0]), *buffer[1:]]
    if isinstance(buffer, ndarray) and buffer.dtype.isbuiltin == 2 and is_covered(buffer.dtype):
        return buffer.view(f"u{buffer.dtype.itemsize}")
    return buffer


def _require_inside(name: str, part: Part, buffer: Any, rank: int, target: Any) -> None:
    """Raise `RefusedByMpiError` if a call reaches beyond the part of ``rank``, which MPI need not notice.

    ``buffer`` has the elements of the target unless the target names them.
    """
    try:
        disp, elements = target_elements(target, elements_of(buffer, "origin"), name)
    except (TypeError, InvalidUsageError):
        return  # MPI names what it refuses, and moves types that NumPy lacks
    require_inside(f"Win.{name}", part, rank, disp, elements.bounds)


def _name_wrong_argument(name: str, /, **given: Any) -> None:
    """Raise a `TypeError` that names the wrong argument of a call that MPI refused by one that does not."""
    for each in _INTEGERS:
        if each in given:
            index_of(given[each], each, f"Win.{name}")
    for each, cls, example in (("group", MPI.Group, "win.Get_group().Incl(...)"), ("op", MPI.Op, "MPI.SUM")):
        if each in given and not isinstance(given[each], cls):
            raise TypeError(f"Win.{name}: {each}={given[each]!r} is no MPI.{cls.__name__}: pass {example}")


for _name in _CHECKED.split():
    setattr(HostWindowCalls, _name, _checked(_name))
