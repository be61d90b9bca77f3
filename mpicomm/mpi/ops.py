"""Operations of reductions: those of MPI that the engines know, `AVG`, and `Op` for expressions of the user."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import custom_op, is_custom
from mpicomm.mpi import types
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.types import is_narrow, numpy_dtype

if TYPE_CHECKING:
    from mpicomm.expressions.expression import Expression

_WIDE = np.dtype(np.float32)
_made: dict[tuple[str, str, bool], Op] = {}


class Op(MPI.Op):
    """A reduction operation that an expression defines: ``Op("max(abs(a), abs(b))", name="absmax", commute=True)``.

    In the expression ``a`` is the reduction of the ranks before, and ``b`` the contribution of the next rank. NVRTC
    compiles it into the kernels for arrays of GPUs. NumPy computes it on host arrays. It is an MPI.Op, so all
    reductions take it: Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan and Exscan, blocking, nonblocking
    and persistent. Plain mpi4py can call it, too, also in reductions of numbers and arrays as objects (``allreduce``).

    **Order.** A Communicator reduces in rank order, ``f(f(x0, x1), x2)``, with the same bits on all ranks. The
    operation has to be associative, as in MPI, in three cases: if MPI carries the call out, with ``algorithm="ring"``,
    and over several peer domains, because each domain reduces first. ``commute=True`` says that the order does not
    matter either, and MPI and the ring use that. Without it the ranks of each peer domain must follow each other,
    except in Scan and Exscan.

    **Expressions** are Python's, with the names a and b and with numbers, computed in the element type:

    - ``+ - *``, and ``** n`` with a constant n from 1 to 64, which multiplies: on integers, floats and complex numbers;
    - ``/``, ``** x`` for other exponents, ``ceil exp floor log sqrt tanh``: on floats;
    - ``// %``, which round down as in Python and give 0 if b is 0, ``<< >> ~``: on integers;
    - ``& | ^``: on integers and bool; ``conj``: on complex numbers; ``abs``: on integers and floats;
    - ``min max`` (NaN wins) and ``< <= > >=``: on bool, integers and floats; ``== !=``: on all;
    - ``and or not``, ``x if c else y`` and ``where(c, x, y)``: on all. A number is true unless it is 0. Comparisons,
      ``and``, ``or`` and ``not`` give the numbers 1 and 0.

    Integers wrap. Floats of 16 bits or fewer are computed in float32 and rounded once. The host gets the same bits as a
    GPU, except for exp, log, tanh, ``** x`` and products of complex numbers. Their last bits may differ.

    Equal arguments give the same object. MPI holds few operations (mpi4py: 32), and `Free` gives one back. The
    constructor is *local*. It raises `InvalidUsageError` for anything else in the expression, and TypeError for
    arguments of other types. A call raises `InvalidUsageError` for element types on which the expression is not
    defined. If ranks pass different expressions, the call raises `PeerError` on all ranks.
    """

    _expression: Expression
    _name: str
    _commute: bool

    def __new__(cls, expression: str, *, name: str = "", commute: bool = False) -> Op:
        """Return the operation of these arguments; see the class."""
        parsed = custom_op(expression)
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} is no text: pass a name such as 'absmax'")
        if not isinstance(commute, (bool, np.bool_)):
            raise TypeError(f"commute={commute!r} is no bool: pass True if the order of operands does not matter")
        key = parsed.text, name, bool(commute)
        if key not in _made:
            try:
                made = super().__new__(cls, MPI.Op.Create(partial(_reduce, parsed), bool(commute)))
            except RuntimeError as error:
                raise InvalidUsageError(
                    f"op={expression!r}: {error}: call Free of operations that are not used"
                ) from error
            made._expression, made._name, made._commute = parsed, name, bool(commute)
            _made[key] = made
        return _made[key]

    @property
    def expression(self) -> str:
        """The expression in its normal form, the same for all ways to write it."""
        return self._expression.text

    @property
    def commute(self) -> bool:
        """Whether the order of operands does not matter."""
        return self._commute

    def __call__(self, x: Any, y: Any) -> Any:
        """Return the reduction of two numbers, or of two arrays element by element. Reductions of objects need it."""
        # NumPy would take a text for the name of a type. Numbers of Python stay, because their types give way.
        dtype = np.result_type(*(np.asarray(each) if isinstance(each, (str, bytes)) else each for each in (x, y)))
        self._expression.require_defined(dtype.name)
        a, b = np.broadcast_arrays(np.asarray(x, dtype), np.asarray(y, dtype))
        with np.errstate(all="ignore"):
            reduced = _reduced(self._expression, np.atleast_1d(a), np.atleast_1d(b)).astype(dtype).reshape(a.shape)
        return reduced[()] if any(isinstance(each, (np.ndarray, np.generic)) for each in (x, y)) else reduced.tolist()

    def Free(self) -> None:
        """Give the operation back to MPI. Local. The program must not use it afterwards."""
        _made.pop((self._expression.text, self._name, self._commute), None)
        super().Free()

    def __repr__(self) -> str:
        return f"mpicomm.Op({self._expression.text!r}, name={self._name!r}, commute={self._commute})"

    def __reduce__(self) -> Any:
        return partial(Op, name=self._name, commute=self._commute), (self._expression.text,)


def _reduce(expression: Expression, a: Any, b: Any, datatype: MPI.Datatype) -> None:
    """Reduce ``a`` and ``b`` into ``b``, as MPI's callback. An error here ends the program, as mpi4py says."""
    dtype = numpy_dtype(datatype)
    if dtype is None:
        raise InvalidUsageError(f"op={expression.text!r}: it is for plain element types, not for {datatype.name}")
    expression.require_defined(dtype.name)
    result = np.frombuffer(b, dtype)
    np.copyto(result, _reduced(expression, np.frombuffer(a, dtype), result), casting="unsafe")


def _reduced(expression: Expression, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values of the expression; those of narrow floats are of `_WIDE`."""
    wide = _WIDE if is_narrow(a.dtype) else a.dtype
    with np.errstate(all="ignore"):
        values: npt.NDArray[Any] = expression.tree.evaluate(
            wide, {"a": a.astype(wide, copy=False), "b": b.astype(wide, copy=False)}
        )
        return values


class Average(MPI.Op):
    """The type of `AVG`, an MPI.Op that MPI does not know, so MPI refuses it like ``MPI.OP_NULL``."""

    def __repr__(self) -> str:
        return "mpicomm.AVG"

    def __reduce__(self) -> str:
        return "AVG"  # copies and unpickled objects are the same object


class TreeSum(MPI.Op):
    """The type of `TREE`, which MPI does not know either."""

    def __repr__(self) -> str:
        return 'MPI.SUM with order="tree"'

    def __reduce__(self) -> str:
        return "TREE"


AVG = Average()
"""``op=mpicomm.AVG``: the sum of all contributions divided by their number, for floats and complex numbers."""
TREE = TreeSum()
"""The sum of a binary tree over the ranks: ``MPI.SUM`` with ``order="tree"``."""


def tree_sum(x: Any, axis: int = 0) -> Any:
    """Return the sum of an array along ``axis``, in the order of a binary tree. Local, on the array's current stream.

    Slices 0 and 1, 2 and 3, ... are added, then pairs of these sums, and so on, as ``order="tree"`` adds the ranks. The
    slices are this rank's leaves, so their number has to be a power of two. ``x`` is an array of NumPy, CuPy or
    PyTorch, and so is the sum, which has one axis less. Floats of 16 bits or fewer are added in float32, and the sum is
    float32. With one slice of another type it is a view of ``x``. Raises `InvalidUsageError` for another number.

        leaves = cp.stack([gradient(batch) for batch in batches])
        comm.Allreduce(mpicomm.tree_sum(leaves), total, order="tree")
    """
    count = x.shape[axis]
    if count < 1 or count & (count - 1):
        raise InvalidUsageError(f"tree_sum: axis {axis} has {count} slices: pass a power of two")
    dtype = x.dtype if isinstance(x.dtype, np.dtype) else types.torch_dtype(x.dtype)
    if dtype is not None and is_narrow(dtype):
        x = x.astype(_WIDE) if isinstance(x.dtype, np.dtype) else x.float()
    before = (slice(None),) * (axis % len(x.shape))
    even, odd, first = (*before, slice(0, None, 2)), (*before, slice(1, None, 2)), (*before, 0, ...)
    while x.shape[axis] > 1:
        x = x[even] + x[odd]
    return x[first]  # with the dots NumPy returns an array, not a number


_NAMES = {
    getattr(MPI, name).handle: name.lower()
    for name in ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
}

# The kinds of elements for which the MPI standard defines each operation.
_LEGAL = {
    **dict.fromkeys(("sum", "prod", "tree"), ("integer", "float", "complex")),
    **dict.fromkeys(("max", "min"), ("integer", "float")),
    **dict.fromkeys(("land", "lor", "lxor"), ("integer", "bool")),
    **dict.fromkeys(("band", "bor", "bxor"), ("integer", "byte")),
    "avg": ("float", "complex"),
}
_KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


def op_name(op: MPI.Op) -> str | None:
    """Return the name of an operation that the engines know, or None for an operation that only MPI can carry out.

    The name is a word such as "sum", or the expression of an `Op`. Only MPI carries out MINLOC, MAXLOC, REPLACE, NO_OP
    and operations that ``MPI.Op.Create`` has made. Raises `TypeError` for an object that is no operation, and
    `RefusedByMpiError` for an `Op` that was freed.
    """
    if op is AVG:
        return "avg"
    if op is TREE:
        return "tree"
    if isinstance(op, Op):
        if op == MPI.OP_NULL:
            raise RefusedByMpiError(f"op={op!r} was freed: make another", MPI.ERR_OP)
        return op.expression
    if isinstance(op, MPI.Op):
        return _NAMES.get(op.handle)
    raise TypeError(
        f"op={op!r} is no reduction operation: pass an MPI.Op such as MPI.SUM, mpicomm.AVG, or an mpicomm.Op"
    )


@cache
def check_legal(name: str, dtype: np.dtype[Any]) -> None:
    """Raise unless the operation ``name`` is defined for the element type ``dtype``.

    MPI itself decides on characters. Raises `RefusedByMpiError`, but `InvalidUsageError` for an expression, and for
    partial sums that would be rounded on each rank.
    """
    if name == "tree" and is_narrow(dtype):
        raise InvalidUsageError(
            f'order="tree" of {dtype}: each rank would round its sum, so the bits would depend on the number of ranks: '
            'pass the float32 that mpicomm.tree_sum returns, and to Allreduce also epilogue="v", which rounds once'
        )
    shown = "MPI.BYTE" if dtype == types.BYTE else str(dtype)
    if is_custom(name):
        custom_op(name).require_defined(shown)
        return
    kind: str | None = _KINDS.get(dtype.kind)
    if dtype == types.BYTE:
        kind = "byte"
    elif dtype.isbuiltin == 2:  # a type that a package has added to NumPy; the engines know only floats among these
        kind = "float" if types.is_covered(dtype) else None
    if kind in _LEGAL[name] or (dtype.kind in "SU" and name not in ("avg", "tree")):
        return
    legal = [other for other, kinds in _LEGAL.items() if kind in kinds and other != "tree"]  # an order of sum
    raise RefusedByMpiError(
        f"op={name} is not defined for {shown}, only for {', '.join(_LEGAL[name])}; "
        f"defined for {shown}: {', '.join(legal) or 'none, it can only be moved'}",
        MPI.ERR_OP,
    )
