"""The reductions of ``torch.distributed`` as mpicomm's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.ops import AVG
from mpicomm.torch.tensors import ElementTypeError

_Kind = dist.ReduceOp.RedOpType
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
# A sum of truth values is true where one of them is, as PyTorch's backend for NCCL has it.
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


def mpi_op(op: Any, memory: torch.Tensor) -> MPI.Op:
    """Return the operation of mpicomm for a ``ReduceOp`` on these elements. Local."""
    kind = _kind(op)
    if is_whole_average(op, memory):
        return MPI.SUM
    found = (_LOGICAL_OPS if memory.dtype is torch.bool else _OPS).get(kind)
    if found is None:
        if memory.dtype is torch.bool:
            raise ElementTypeError(f"op={kind.name} is not defined for torch.bool: convert the tensor, or use SUM")
        raise InvalidUsageError(f"op={kind.name} is unknown: use one of {', '.join(each.name for each in _OPS)}")
    return found


def is_whole_average(op: Any, memory: torch.Tensor) -> bool:
    """Return whether ``op`` averages whole numbers, which mpicomm adds and `divide` divides. Local."""
    return _kind(op) == _Kind.AVG and memory.dtype in _WHOLE


def divide(op: Any, memory: torch.Tensor, size: int) -> None:
    """Make the sum over ``size`` ranks in ``memory`` what ``op`` asks for. Local; on a GPU stream-ordered.

    The average of whole numbers is rounded toward zero, as PyTorch's backend for NCCL has it.
    """
    if is_whole_average(op, memory):
        memory.div_(size, rounding_mode="trunc")


def premultiplied(op: Any, memory: torch.Tensor) -> torch.Tensor:
    """Return ``memory`` times the factor of PREMUL_SUM, as new memory; for other operations ``memory``. Local."""
    if isinstance(op, _Kind) or op.op != _Kind.PREMUL_SUM:
        return memory
    _, factor = op.__getstate__()  # the only way to the factor from Python
    return memory * factor


def _kind(op: Any) -> Any:
    return op if isinstance(op, _Kind) else op.op
