"""The reductions of ``torch.distributed`` as reductions of mpicomm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.ops import AVG
from mpicomm.torch.failures import ElementTypeError
from mpicomm.torch.tensors import is_known

_Kind = dist.ReduceOp.RedOpType
_PREMUL_SUM = int(_Kind.PREMUL_SUM)
_OPS = {
    _Kind.SUM: MPI.SUM,
    _Kind.AVG: AVG,
    _Kind.PREMUL_SUM: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}
# A sum of truth values is true if one of them is true, as in PyTorch's backend for NCCL.
_LOGICAL_OPS = {
    _Kind.SUM: MPI.LOR,
    _Kind.MAX: MPI.LOR,
    _Kind.BOR: MPI.LOR,
    _Kind.PRODUCT: MPI.LAND,
    _Kind.MIN: MPI.LAND,
    _Kind.BAND: MPI.LAND,
    _Kind.BXOR: MPI.LXOR,
}
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_WITHOUT_DIVISION = (torch.uint16, torch.uint32, torch.uint64)  # in PyTorch


@dataclass(frozen=True)
class TorchReduction:
    """The way in which a Communicator carries out a ``ReduceOp`` on elements of one type."""

    op: MPI.Op
    averages_whole: bool
    """Whether each rank divides the sum of whole numbers, toward zero, as PyTorch's backend for NCCL does."""
    factor: Any = None
    """The factor of each rank's elements before the sum; None for 1."""

    def given(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the contribution of this rank: ``memory``, or new memory. Local; on a GPU stream-ordered."""
        return memory if self.factor is None else (memory * self.factor).to(memory.dtype)

    def finish(self, memory: torch.Tensor, size: int) -> None:
        """Divide a sum of whole numbers by ``size``, if the reduction is their average.

        Local; on a GPU stream-ordered.
        """
        if self.averages_whole:
            memory.div_(size, rounding_mode="trunc")


_reductions: dict[tuple[int, torch.dtype], TorchReduction] = {}


def reduction_of(op: Any, memory: torch.Tensor, name: str) -> TorchReduction:
    """Return the reduction by a ``ReduceOp`` of ``memory``, a result of `flat` for the tensor ``name``. Local.

    Raises `ElementTypeError` for elements that mpicomm cannot reduce, and `InvalidUsageError` for unknown operations.
    """
    key = hash(op), memory.dtype  # the hash is the number of the kind, and takes less time than to read the kind
    reduction = _reductions.get(key)
    if reduction is None:
        kind = op if isinstance(op, _Kind) else op.op
        if not is_known(memory.dtype):
            raise ElementTypeError(
                f"{name} has elements of {memory.dtype}, which mpicomm cannot reduce: convert it, for example to "
                "torch.bfloat16"
            )
        whole = kind == _Kind.AVG and memory.dtype in _WHOLE
        if whole and memory.dtype in _WITHOUT_DIVISION:
            raise ElementTypeError(
                f"op=AVG is not defined for {memory.dtype} of {name}: use SUM and divide, or convert it to torch.int64"
            )
        if kind == _Kind.PREMUL_SUM and not (memory.dtype.is_floating_point or memory.dtype.is_complex):
            raise ElementTypeError(
                f"op=PREMUL_SUM multiplies with a factor, and {name} has elements of {memory.dtype}: convert it to a "
                "type of floats"
            )
        reduction = _reductions[key] = TorchReduction(MPI.SUM if whole else _mpi_op(kind, memory.dtype), whole)
    if key[0] == _PREMUL_SUM and not isinstance(op, _Kind):
        _, factor = op.__getstate__()  # the only way to the factor from Python
        return replace(reduction, factor=factor)
    return reduction


_ops_of_one_call: dict[tuple[int, torch.dtype], MPI.Op] = {}


def op_of_one_call(op: Any, memory: torch.Tensor, name: str) -> MPI.Op | None:
    """As `reduction_of`, but return only the operation of mpicomm, or None if this rank also works on its elements."""
    key = hash(op), memory.dtype
    found = _ops_of_one_call.get(key)
    if found is None and key[0] != _PREMUL_SUM:
        reduction = reduction_of(op, memory, name)
        if not reduction.averages_whole:
            found = _ops_of_one_call[key] = reduction.op
    return found


def _mpi_op(kind: Any, dtype: torch.dtype) -> MPI.Op:
    found = (_LOGICAL_OPS if dtype is torch.bool else _OPS).get(kind)
    if found is None:
        if dtype is torch.bool:
            raise ElementTypeError(f"op={kind.name} is not defined for torch.bool: convert the tensor, or use SUM")
        raise InvalidUsageError(f"op={kind.name} is unknown: use one of {', '.join(each.name for each in _OPS)}")
    return found
