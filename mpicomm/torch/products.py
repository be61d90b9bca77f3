"""Matrix products of tensor-parallel layers, with gradients: a collective before or after them overlaps with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mpicomm.torch.groups import group_of
from mpicomm.torch.process_group import ProcessGroup


def allgather_matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the product of the rows ``a`` of all ranks with this rank's ``b``, as ``Communicator.allgather_matmul``.

    It is the first layer of a tensor-parallel network: ``b`` has this rank's columns. Collective over ``group``, also
    in the backward pass, which computes the gradient of ``a`` by `matmul_reduce_scatter`. If ``b`` needs a gradient,
    the gathered rows are kept for it. Raises the errors of ``Communicator.allgather_matmul``.
    """
    return _apply(_AllgatherMatmul, a, b, bias, group)


def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum of all ranks' ``a @ b``, as ``Communicator.matmul_reduce_scatter``.

    It is the second layer of a tensor-parallel network: ``b`` has this rank's rows, and ``bias`` is the same on all
    ranks. Collective over ``group``, also in the backward pass, which computes the gradient of ``a`` by
    `allgather_matmul`. The gradients of ``b`` and ``bias`` are sums over the rows of all ranks. Raises the errors of
    ``Communicator.matmul_reduce_scatter``.
    """
    return _apply(_MatmulReduceScatter, a, b, bias, group)


def matmul_allreduce(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the sum of all ranks' ``a @ b``, as ``Communicator.matmul_allreduce``.

    Collective over ``group``. The backward pass is local. It expects the same gradient on all ranks, because all ranks
    go on with the same result. Raises the errors of ``Communicator.matmul_allreduce``.
    """
    return _apply(_MatmulAllreduce, a, b, bias, group)


def _apply(function: Any, a: Any, b: Any, bias: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    result: torch.Tensor = function.apply(a, b, bias, group_of(group))
    return result


def _call(group: ProcessGroup, name: str, a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
    """Make a call of the group's Communicator in its turn among the calls of the group."""
    call = getattr(group.communicator, name)
    result: torch.Tensor = group.in_turn(name, lambda: call(a.detach(), b.detach(), **more))
    return result


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


class _AllgatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: ProcessGroup) -> Any:
        gathered = None
        if context.needs_input_grad[1]:
            gathered = a.new_empty((a.shape[0] * group.size(), *a.shape[1:]))
        context.save_for_backward(gathered, b)
        context.group = group
        return _call(group, "allgather_matmul", a, b, bias=_detached(bias), gathered=gathered)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (gathered, b) = gradients, context.saved_tensors
        of_a, of_b, of_bias, _ = context.needs_input_grad
        return (
            _call(context.group, "matmul_reduce_scatter", gradient, b.t()) if of_a else None,
            gathered.t() @ gradient if of_b else None,
            gradient.sum(0) if of_bias else None,
            None,
        )


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: ProcessGroup) -> Any:
        context.save_for_backward(a, b)
        context.group = group
        return _call(group, "matmul_reduce_scatter", a, b, bias=_detached(bias))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (a, b), group = gradients, context.saved_tensors, context.group
        of_a, of_b, of_bias, _ = context.needs_input_grad
        # All ranks make this call, also a rank that needs no gradient of `a`, because the other ranks need its rows.
        whole = gradient.new_empty((gradient.shape[0] * group.size(), gradient.shape[1]))
        found = _call(group, "allgather_matmul", gradient, b.t(), gathered=whole)
        return found if of_a else None, a.t() @ whole if of_b else None, whole.sum(0) if of_bias else None, None


class _MatmulAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: ProcessGroup) -> Any:
        context.save_for_backward(a, b)
        return _call(group, "matmul_allreduce", a, b, bias=_detached(bias))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (a, b) = gradients, context.saved_tensors
        of_a, of_b, of_bias, _ = context.needs_input_grad
        return (
            gradient @ b.t() if of_a else None,
            a.t() @ gradient if of_b else None,
            gradient.sum(0) if of_bias else None,
            None,
        )
