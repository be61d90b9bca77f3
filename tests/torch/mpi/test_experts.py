"""A mixture of experts over ranks: results and gradients against all experts on one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.torch import communicator, experts

HIDDEN, TOP_K, TOKENS = 8, 3, 12


@pytest.fixture
def comm(world: dist.ProcessGroup) -> mpicomm.Communicator:
    return communicator(world)


@pytest.fixture(params=["experts", "tokens"])
def mixture(comm: mpicomm.Communicator, request: pytest.FixtureRequest) -> Iterator[mpicomm.Experts]:
    counts = [(2, 0, 3, 1)[rank % 4] for rank in range(comm.size)]
    numbers = counts, HIDDEN, TOKENS, TOP_K, torch.float32
    with mpicomm.Experts(comm, *numbers, alignment=4, layout=request.param) as made:
        yield made


class Case:
    """Tokens, routes and matrices of all experts, alike on all ranks."""

    def __init__(self, comm: mpicomm.Communicator, mixture: mpicomm.Experts) -> None:
        numbers = torch.Generator(device="cpu").manual_seed(3)
        self.rank, self.local = comm.rank, mixture.local_experts
        total = comm.allreduce(len(self.local))

        def of_all(*shape: int) -> list[torch.Tensor]:
            ranks = range(comm.size)
            drawn = [torch.randn(shape[0] - rank, *shape[1:], generator=numbers, device="cpu") for rank in ranks]
            return [each.to(torch.empty(0).device) for each in drawn]

        self.xs, self.scores, self.slopes = of_all(TOKENS, HIDDEN), of_all(TOKENS, TOP_K), of_all(TOKENS, HIDDEN)
        self.ids = [
            torch.randint(-1, total, (TOKENS - rank, TOP_K), generator=numbers, device="cpu").to(self.xs[0].device)
            for rank in range(comm.size)
        ]
        self.matrices = torch.randn(total, HIDDEN, HIDDEN, generator=numbers, device="cpu").to(self.xs[0].device)

    def alone(self) -> tuple[torch.Tensor, ...]:
        """Return sums and gradients of this rank's tokens and scores, and of all matrices."""
        xs, scores = ([each.clone().requires_grad_() for each in part] for part in (self.xs, self.scores))
        matrices = self.matrices.clone().requires_grad_()
        sums = []
        for x, ids, weights in zip(xs, self.ids, scores, strict=True):
            parts = [
                torch.where(
                    ids[:, slot : slot + 1] >= 0,
                    weights.sigmoid()[:, slot : slot + 1]
                    * torch.einsum("th,thk->tk", x, matrices[ids[:, slot].clamp(min=0)]).tanh(),
                    0,
                )
                for slot in range(TOP_K)
            ]
            sums.append(torch.stack(parts).sum(dim=0))
        total = torch.stack([(each * slope).sum() for each, slope in zip(sums, self.slopes, strict=True)]).sum()
        total.backward()
        of_x, of_scores = xs[self.rank].grad, scores[self.rank].grad
        assert of_x is not None and of_scores is not None and matrices.grad is not None
        return sums[self.rank].detach(), of_x, of_scores, matrices.grad

    def spread(self, mixture: mpicomm.Experts) -> tuple[torch.Tensor, ...]:
        """Return the same by all ranks; of the matrices only those of this rank's experts."""
        x, scores = self.xs[self.rank].clone().requires_grad_(), self.scores[self.rank].clone().requires_grad_()
        matrices = self.matrices[self.local.start : self.local.stop].clone().requires_grad_()

        def layer(rows: torch.Tensor, received: mpicomm.Received) -> torch.Tensor:
            if not len(self.local):
                return torch.zeros_like(rows)
            if mixture.layout == "tokens":
                outputs = torch.einsum("th,ehk->tek", rows, matrices).tanh()
                chosen = outputs.gather(1, received.topk_ids.clamp(min=0).long()[:, :, None].expand(-1, -1, HIDDEN))
                here = (received.topk_ids >= 0)[:, :, None]
                return torch.where(here, received.topk_weights[:, :, None] * chosen, 0).sum(dim=1)
            offsets = received.offsets.tolist()
            parts = [rows[a:b] @ matrix for a, b, matrix in zip(offsets, offsets[1:], matrices, strict=False)]
            return torch.cat([*parts, rows[offsets[-1] :]]).tanh()

        sums = experts(mixture, x, self.ids[self.rank], scores.sigmoid(), layer)
        (sums * self.slopes[self.rank]).sum().backward()
        assert x.grad is not None and scores.grad is not None
        of_matrices = torch.zeros_like(matrices) if matrices.grad is None else matrices.grad
        return sums.detach(), x.grad, scores.grad, of_matrices


def test_ranks_compute_the_results_and_gradients_of_one_rank(
    comm: mpicomm.Communicator, mixture: mpicomm.Experts
) -> None:
    case = Case(comm, mixture)
    for _ in range(2):
        sums, of_x, of_scores, of_matrices = case.alone()
        found = case.spread(mixture)
        for one, other in zip(
            (sums, of_x, of_scores, of_matrices[case.local.start : case.local.stop]), found, strict=True
        ):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    comm.check()


def test_rows_without_a_token_are_zero(comm: mpicomm.Communicator, mixture: mpicomm.Experts) -> None:
    seen: list[torch.Tensor] = []

    def layer(rows: torch.Tensor, received: mpicomm.Received) -> torch.Tensor:
        unused = received.sources[:, 0] if received.rows is None else received.topk_ids.amax(dim=1)
        seen.append(rows[unused < 0])
        return rows

    case = Case(comm, mixture)
    experts(mixture, case.xs[comm.rank], case.ids[comm.rank], case.scores[comm.rank], layer)
    assert not seen[0].any()


def test_eight_bits_have_no_gradients(comm: mpicomm.Communicator) -> None:
    with mpicomm.Experts(comm, comm.size, 512, 1, 1, torch.float32, wire_dtype=torch.float8_e4m3fn) as mixture:
        x, ids, weights = torch.ones(1, 512), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        with pytest.raises(mpicomm.InvalidUsageError, match="wire_dtype=float8_e4m3fn, which has no gradients"):
            experts(mixture, x, ids, weights, lambda rows, _: rows)
