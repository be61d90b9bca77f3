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


def mpi_op(op: Any, memory: torch.Tensor) -> MPI.Op:
    """Return the operation of mpicomm for a ``ReduceOp`` on these elements. Local."""
    kind = op if isinstance(op, _Kind) else op.op
    found = (_LOGICAL_OPS if memory.dtype is torch.bool else _OPS).get(kind)
    if found is None:
        if memory.dtype is torch.bool:
            raise ElementTypeError(f"op={kind.name} is not defined for torch.bool: convert the tensor, or use SUM")
        raise InvalidUsageError(f"op={kind.name} is unknown: use one of {', '.join(each.name for each in _OPS)}")
    return found


def premultiplied(op: Any, memory: torch.Tensor) -> torch.Tensor:
    """Return ``memory`` times the factor of PREMUL_SUM, as new memory; for other operations ``memory``. Local."""
    if isinstance(op, _Kind) or op.op != _Kind.PREMUL_SUM:
        return memory
    _, factor = op.__getstate__()  # the only way to the factor from Python
    return memory * factor
