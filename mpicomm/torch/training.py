"""Training: the communication hook of DDP, layers with gradients, and splits of DTensors.

The layers are a mixture of experts, and matrix products that overlap with a collective. PyTorch reads the annotations
of the hook, so they must be objects.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mpicomm.api.splits import integers
from mpicomm.collectives.wire import Wire
from mpicomm.errors import InvalidUsageError
from mpicomm.experts.arrays import BY_TOKEN, Received
from mpicomm.experts.experts import Experts
from mpicomm.torch.collectives import TensorCall
from mpicomm.torch.process_group import ProcessGroup, group_of

_AVG = dist.ReduceOp.AVG
_WIRES = {torch.float8_e4m3fn: Wire("float8_e4m3fn"), torch.int8: Wire("int8")}
_ROWS_AT_ONCE = 4096  # of a product in float32, which is larger than its factors


class AllreduceState:
    """The state of `allreduce_hook`: the group that averages, and the type of the elements that travel.

    ``group`` is a group of the backend ``mpicomm``, by default the group of all ranks. Without ``wire_dtype`` gradients
    travel in their type. With ``torch.bfloat16`` or ``torch.float16`` gradients of float32 travel in half of the bytes.
    Kernels add in float32 and round once. With ``torch.float8_e4m3fn`` or ``torch.int8`` gradients travel
    quantized: see ``wire_dtype`` of `mpicomm.Communicator.Allreduce`, which also states the error. A NaN or an infinity
    makes its block of 128 elements NaN on all ranks, so ``torch.amp.GradScaler`` notices it. The constructor is local,
    and raises `InvalidUsageError` for other types and groups.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, wire_dtype: torch.dtype | None = None) -> None:
        if wire_dtype not in (None, torch.bfloat16, torch.float16, *_WIRES):
            raise InvalidUsageError(
                f"wire_dtype={wire_dtype}: pass torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, or "
                "leave it out"
            )
        self.group = group_of(group)
        self.wire_dtype = wire_dtype
        self._wire = None if wire_dtype is None else _WIRES.get(wire_dtype)
        self._converted: dict[int, Tensor] = {}

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to average the gradients of ``bucket`` over all ranks; see `allreduce_hook`."""
        group, gradients, all_reduce = self.group, bucket.buffer(), self.group.collectives["all_reduce"]
        # The call of the last bucket would overlap with no other work, so it needs no side stream.
        overlap = not bucket.is_last()
        if self.wire_dtype in (None, gradients.dtype) or self._wire is not None:
            args = gradients, _AVG, "bucket", self._wire
            return group.future("average", all_reduce, args, gradients, overlap=overlap)
        index, count = bucket.index(), gradients.numel()
        converted = self._converted.get(index)
        if converted is None or converted.numel() != count:  # the first backward pass has other buckets
            # On GPUs this is collective.
            converted = group.allocate_tensor(count, dtype=self.wire_dtype, device=gradients.device)
            self._converted[index] = converted

        def average_wire() -> None:
            converted.copy_(gradients)
            group.enqueue(all_reduce, (converted, _AVG, "bucket", None))
            gradients.copy_(converted)

        return group.future("average", TensorCall(average_wire), (), gradients, [converted], overlap=overlap)


def allreduce_hook(
    state: AllreduceState | dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average the gradients of a bucket over all ranks: ``model.register_comm_hook(state, allreduce_hook)``.

    *Collective*. It returns a future. The kernels divide after the sum, so no earlier pass over the gradients is
    needed, and float16 does not overflow within the sum. ``state`` is an `AllreduceState`, or a group for
    ``AllreduceState(group)``.
    """
    if not isinstance(state, AllreduceState):
        if not isinstance(state, dist.ProcessGroup | None):
            raise InvalidUsageError(
                f"state={state!r} is no state of allreduce_hook: pass None, a group, or AllreduceState(wire_dtype=...)"
            )
        state = AllreduceState(state)
    return state.average(bucket)


def experts(
    mixture: Experts, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: Callable[[Tensor, Received], Tensor]
) -> Tensor:
    """Return the weighted sum of the experts of each token, with gradients for ``x``, ``topk_weights`` and ``layer``.

    Collective, and so is the backward pass: all ranks make the same calls in the same order, with tensors that require
    gradients alike. ``mixture`` is an `mpicomm.Experts`. ``layer`` gets the rows of this rank, ``[capacity, hidden]``,
    and the `mpicomm.Received` with their offsets. It returns as many rows of the same length and dtype. Rows without a
    token are zero. In the layout by token ``layer`` adds the experts of a row with the weights in
    ``received.topk_weights``, which have gradients. The other arguments are as in ``mixture.dispatch``, and the result
    is as of ``mixture.combine``. Stream-ordered on a GPU.

    The gradient of ``x`` is the sum of the gradients of its rows, which each rank rounds to the dtype of ``mixture``.
    The gradient of a weight is the product of two rows in float32.
    """
    if mixture.wire_dtype is not None:
        raise InvalidUsageError(
            f"experts: mixture has wire_dtype={mixture.wire_dtype}, which has no gradients: leave wire_dtype out"
        )
    weight_grads: list[Tensor] = []  # from the backward pass of `_Combine` to that of `_Dispatch`
    rows, weights, received = _Dispatch.apply(mixture, x, topk_ids, topk_weights, weight_grads)
    z = layer(rows, received if weights is None else replace(received, topk_weights=weights))
    return cast(Tensor, _Combine.apply(mixture, z, rows, topk_ids, received, weight_grads))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixture: Experts, x: Tensor, ids: Tensor, weights: Tensor, weight_grads: list[Tensor]) -> Any:
        received = mixture.dispatch(x.detach(), ids, weights.detach())
        ctx.mixture, ctx.received, ctx.weight_grads = mixture, received, weight_grads
        # An output must not be an array of the result, because `_Combine` keeps the result.
        slot_weights = received.topk_weights.clone() if mixture.layout == BY_TOKEN else None
        return _zero_unused(received), slot_weights, received

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_slot_weights: Tensor | None, _: object) -> Any:
        # The gradients of the weights go back to their tokens beside the gradients of the rows.
        values = ctx.weight_grads.pop() if grad_slot_weights is None else grad_slot_weights.contiguous()
        grad_x, grad_weights = ctx.mixture.combine(
            grad_rows.contiguous(), ctx.received, weighted=grad_slot_weights is not None, values=values
        )
        return None, grad_x, None, grad_weights, None


class _Combine(torch.autograd.Function):
    """It takes the rows of `_Dispatch`, and gives them no gradient.

    So the backward pass of `_Dispatch` always follows, also on a rank with a layer that does not use its rows.
    """

    @staticmethod
    def forward(ctx: Any, mixture: Experts, z: Tensor, rows: Tensor, ids: Tensor, *more: Any) -> Any:
        ctx.mixture, (ctx.received, ctx.weight_grads) = mixture, more
        ctx.save_for_backward(None if mixture.layout == BY_TOKEN else z, ids)
        return mixture.combine(z.detach().contiguous(), ctx.received)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        z, ids = ctx.saved_tensors
        grad_z = grad_rows = _zero_unused(ctx.mixture.dispatch(grad_output.contiguous(), ids))
        if z is not None:
            pairs = zip(z.split(_ROWS_AT_ONCE), grad_rows.split(_ROWS_AT_ONCE), strict=True)
            ctx.weight_grads[:] = [torch.cat([(one.float() * other.float()).sum(dim=1) for one, other in pairs])]
            grad_z = torch.mul(grad_rows, ctx.received.weights[:, None], out=torch.empty_like(grad_rows))
        return None, grad_z, None, None, None, None


def _zero_unused(received: Received) -> Tensor:
    """Return the rows, with zeros in rows without a token: they may hold NaNs, which would spread through products."""
    first = received.sources[:, :1] if received.rows is None else received.topk_ids.amax(dim=1, keepdim=True)
    rows: Tensor = received.x.masked_fill_(first < 0, 0)
    return rows


def allgather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the product of the rows ``a`` of all ranks with this rank's ``b``, as ``Communicator.allgather_matmul``.

    It is the first layer of a tensor-parallel network: ``b`` has this rank's columns. Collective over ``group``, also
    in the backward pass, which computes the gradient of ``a`` by `matmul_reduce_scatter`. If ``b`` needs a gradient,
    the gathered rows are kept for it. Raises the errors of ``Communicator.allgather_matmul``.
    """
    return cast(Tensor, _Product.apply("allgather_matmul", a, b, bias, group_of(group)))


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, bias: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return this rank's rows of the sum of all ranks' ``a @ b``, as ``Communicator.matmul_reduce_scatter``.

    It is the second layer of a tensor-parallel network: ``b`` has this rank's rows, and ``bias`` is the same on all
    ranks. Collective over ``group``, also in the backward pass, which computes the gradient of ``a`` by
    `allgather_matmul`. The gradients of ``b`` and ``bias`` are sums over the rows of all ranks. Raises the errors of
    ``Communicator.matmul_reduce_scatter``.
    """
    return cast(Tensor, _Product.apply("matmul_reduce_scatter", a, b, bias, group_of(group)))


def matmul_allreduce(
    a: Tensor, b: Tensor, bias: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the sum of all ranks' ``a @ b``, as ``Communicator.matmul_allreduce``.

    Collective over ``group``. The backward pass is local. It expects the same gradient on all ranks, because all ranks
    go on with the same result. Raises the errors of ``Communicator.matmul_allreduce``.
    """
    return cast(Tensor, _Product.apply("matmul_allreduce", a, b, bias, group_of(group)))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, a: Tensor, b: Tensor, bias: Tensor | None, group: ProcessGroup) -> Any:
        ctx.kind, ctx.group = kind, group
        gathers = kind == "allgather_matmul"
        gathered = _empty_gathered(a, group) if gathers and ctx.needs_input_grad[2] else None
        ctx.save_for_backward(gathered if gathers else a, b)
        return _call(group, kind, a, b, bias, **({"gathered": gathered} if gathers else {}))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows, b), kind, group = ctx.saved_tensors, ctx.kind, ctx.group
        _, needs_a, needs_b, needs_bias, _ = ctx.needs_input_grad
        grad_a = None
        if kind == "matmul_reduce_scatter":
            # All ranks make this call, also a rank that needs no gradient of `a`, because the other ranks need its
            # rows.
            gathered = _empty_gathered(grad, group)
            grad_a = _call(group, "allgather_matmul", grad, b.t(), gathered=gathered)
            grad = gathered
        elif needs_a:
            is_local = kind == "matmul_allreduce"
            grad_a = grad @ b.t() if is_local else _call(group, "matmul_reduce_scatter", grad, b.t())
        grad_b = rows.t() @ grad if needs_b else None
        return None, grad_a if needs_a else None, grad_b, grad.sum(0) if needs_bias else None, None


def _empty_gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    return own.new_empty((own.shape[0] * group.size(), *own.shape[1:]))


def _call(group: ProcessGroup, kind: str, a: Tensor, b: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
    call, added = getattr(group.communicator, kind), None if bias is None else bias.detach()
    return cast(Tensor, group.run_in_order(kind, lambda: call(a.detach(), b.detach(), bias=added, **more)))


def split_of(shape: int | Sequence[int], mesh: Any, placements: Any) -> list[Any]:
    """Return the box of each rank of a DTensor of this ``shape`` on a DeviceMesh, as a split. Local.

    A box is a pair (start, stop) for each axis. Ranks outside of the mesh have None. ``placements`` has a ``Shard`` or
    ``Replicate`` for each dimension of the mesh; a mesh of one dimension also takes it alone. The boxes are for a
    Communicator of all ranks, such as ``mpicomm.torch.communicator()``.

    Raises `InvalidUsageError` for other placements, and for axes that the shape does not have.

        rows = mpicomm.torch.split_of(t.shape, t.device_mesh, t.placements)
        y = comm.redistribute(t.to_local(), from_=rows, to=1, shape=t.shape)
    """
    from torch.distributed.tensor import Replicate, Shard  # a program that passes them has imported this

    lengths = integers("shape", shape)
    placed = list(placements) if isinstance(placements, Sequence) else [placements]
    if len(placed) != mesh.ndim:
        raise InvalidUsageError(f"placements={placed} for a mesh of {mesh.ndim} dimensions: pass one for each")
    for placement in placed:
        if type(placement) not in (Replicate, Shard):
            raise InvalidUsageError(
                f"placements={placed}: {placement} has no boxes: redistribute the DTensor to Shard or Replicate first"
            )
        if isinstance(placement, Shard) and not -len(lengths) <= placement.dim < len(lengths):
            raise InvalidUsageError(f"placements={placed}: an array of shape {lengths} has no axis {placement.dim}")
    whole = [(0, length) for length in lengths]
    boxes: list[Any] = [None] * dist.get_world_size()
    for coordinates in product(*map(range, mesh.shape)):
        box = list(whole)
        for index, parts, placement in zip(coordinates, mesh.shape, placed, strict=True):
            if isinstance(placement, Shard):
                start, stop = box[placement.dim]
                length = -(-(stop - start) // parts)  # PyTorch rounds up, so the last ranks may have nothing
                first = min(start + index * length, stop)
                box[placement.dim] = first, min(first + length, stop)
        boxes[int(mesh.mesh[coordinates])] = tuple(box)
    return boxes
