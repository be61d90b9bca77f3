"""A mixture of experts with gradients: the dispatch of the backward pass is the combine of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mpicomm.errors import InvalidUsageError
from mpicomm.experts.arrays import Received
from mpicomm.experts.experts import Experts
from mpicomm.experts.shape import BY_TOKEN

_ROWS_AT_ONCE = 4096  # of a product in float32, which is larger than its factors


def experts(
    mixture: Experts,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: Callable[[torch.Tensor, Received], torch.Tensor],
) -> torch.Tensor:
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
    if mixture.layout == BY_TOKEN:
        rows, weights, received = _DispatchByToken.apply(mixture, x, topk_ids, topk_weights)
        z = layer(rows, replace(received, topk_weights=weights))
        return _summed(_CombineByToken.apply(mixture, z, rows, topk_ids, received))
    of_rows: list[torch.Tensor] = []
    rows, received = _Dispatch.apply(mixture, x, topk_ids, topk_weights, of_rows)
    return _summed(_Combine.apply(mixture, layer(rows, received), rows, topk_ids, received, of_rows))


def _summed(sums: torch.Tensor) -> torch.Tensor:
    """Give the untyped result of ``apply`` its type."""
    return sums


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixture: Experts,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        of_rows: list[torch.Tensor],
    ) -> tuple[torch.Tensor, Received]:
        received = mixture.dispatch(x.detach(), topk_ids, topk_weights.detach())
        ctx.mixture, ctx.received, ctx.of_rows = mixture, received, of_rows
        return _cleared(received), received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
        # The gradients of the weights go back to their tokens beside the gradients of the rows.
        of_x, of_weights = ctx.mixture.combine(
            gradient.contiguous(), ctx.received, weighted=False, values=ctx.of_rows.pop()
        )
        return None, of_x, None, of_weights, None


class _Combine(torch.autograd.Function):
    """It takes the rows of `_Dispatch`, and gives them no gradient.

    So the backward pass of `_Dispatch` always follows, also on a rank with a layer that does not use its rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixture: Experts,
        z: torch.Tensor,
        rows: torch.Tensor,
        topk_ids: torch.Tensor,
        received: Received,
        of_rows: list[torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(z, topk_ids)
        ctx.mixture, ctx.received, ctx.of_rows = mixture, received, of_rows
        sums: torch.Tensor = mixture.combine(z.detach().contiguous(), received)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        z, topk_ids = ctx.saved_tensors
        arrived = _cleared(ctx.mixture.dispatch(gradient.contiguous(), topk_ids))
        pairs = zip(z.split(_ROWS_AT_ONCE), arrived.split(_ROWS_AT_ONCE), strict=True)
        ctx.of_rows[:] = [torch.cat([(one.float() * other.float()).sum(dim=1) for one, other in pairs])]
        of_z = torch.mul(arrived, ctx.received.weights[:, None], out=torch.empty_like(arrived))
        return None, of_z, None, None, None, None


class _DispatchByToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixture: Experts, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Received]:
        received = mixture.dispatch(x.detach(), topk_ids, topk_weights.detach())
        ctx.mixture, ctx.received = mixture, received
        # An output must not be an array of the result, because `_CombineByToken` keeps the result.
        return _cleared(received), received.topk_weights.clone(), received

    @staticmethod
    def backward(ctx: Any, of_rows: torch.Tensor, of_slots: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
        of_x, of_weights = ctx.mixture.combine(of_rows.contiguous(), ctx.received, values=of_slots.contiguous())
        return None, of_x, None, of_weights


class _CombineByToken(torch.autograd.Function):
    """It takes the rows of `_DispatchByToken`, and gives them no gradient, as `_Combine`."""

    @staticmethod
    def forward(
        ctx: Any, mixture: Experts, z: torch.Tensor, rows: torch.Tensor, topk_ids: torch.Tensor, received: Received
    ) -> torch.Tensor:
        ctx.save_for_backward(topk_ids)
        ctx.mixture = mixture
        return _summed(mixture.combine(z.detach().contiguous(), received))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (topk_ids,) = ctx.saved_tensors
        return None, _cleared(ctx.mixture.dispatch(gradient.contiguous(), topk_ids)), None, None, None


def _cleared(received: Received) -> torch.Tensor:
    """Return the rows, with zeros in rows without a token: they may hold NaNs, which would spread through products."""
    first = received.sources[:, :1] if received.rows is None else received.topk_ids.amax(dim=1, keepdim=True)
    rows: torch.Tensor = received.x.masked_fill_(first < 0, 0)
    return rows
