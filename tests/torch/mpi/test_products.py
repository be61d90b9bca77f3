"""Tensor-parallel layers and a mixture of experts: results and gradients are those of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpicomm
import mpicomm.torch
from mpicomm.errors import InvalidUsageError
from mpicomm.torch import communicator, experts

ROWS, WIDTH, HIDDEN = 24, 8, 48


def whole_layers() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rows of all ranks, and the parameters of the whole network, the same on all ranks."""
    torch.manual_seed(5)
    shapes = [(HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)]
    return torch.randn(ROWS, WIDTH), [torch.randn(shape) for shape in shapes]


def part(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    return tensor.tensor_split(dist.get_world_size(), dimension)[dist.get_rank()].clone()


def expected() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The output of one rank, and the gradients of its input and parameters."""
    x, parameters = whole_layers()
    for each in (x, *parameters):
        each.requires_grad_()
    first, bias, second, bias2 = parameters
    y = nn.functional.linear(nn.functional.gelu(nn.functional.linear(x, first, bias)), second, bias2)
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, [each.grad for each in parameters if each.grad is not None]


def close(got: torch.Tensor | None, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-2)


def test_two_layers_over_shards_of_the_rows(world: dist.ProcessGroup) -> None:
    if ROWS % dist.get_world_size():
        pytest.skip("the ranks cannot share the rows")
    y, of_x, (of_first, of_bias, of_second, of_bias2) = expected()
    x, (first, bias, second, bias2) = whole_layers()
    mine, first, bias, second = part(x, 0), part(first, 0), part(bias, 0), part(second, 1)
    for each in (mine, first, bias, second, bias2):
        each.requires_grad_()
    hidden = mpicomm.torch.allgather_matmul(mine, first.t(), bias)
    got = mpicomm.torch.matmul_reduce_scatter(nn.functional.gelu(hidden), second.t(), bias2)
    close(got, part(y, 0))
    (got * part(torch.arange(y.numel()).view_as(y), 0)).sum().backward()
    close(mine.grad, part(of_x, 0))
    close(first.grad, part(of_first, 0))
    close(bias.grad, part(of_bias, 0))
    close(second.grad, part(of_second, 1))
    close(bias2.grad, of_bias2)


def test_the_second_layer_gives_all_rows_to_all_ranks(world: dist.ProcessGroup) -> None:
    y, _, (_, _, of_second, of_bias2) = expected()
    x, (first, bias, second, bias2) = whole_layers()
    hidden = nn.functional.gelu(nn.functional.linear(x, part(first, 0), part(bias, 0)))
    second = part(second, 1).requires_grad_()
    bias2.requires_grad_()
    got = mpicomm.torch.matmul_allreduce(hidden, second.t(), bias2, group=world)
    close(got, y)
    (got * torch.arange(y.numel()).view_as(y)).sum().backward()
    close(second.grad, part(of_second, 1))
    close(bias2.grad, of_bias2)


def test_only_needed_gradients_are_computed(world: dist.ProcessGroup) -> None:
    x, (first, *_) = whole_layers()
    first.requires_grad_()
    mpicomm.torch.allgather_matmul(x, first.t()).sum().backward()
    assert x.grad is None and first.grad is not None
    frozen = mpicomm.torch.allgather_matmul(x, first.detach().t())
    assert not frozen.requires_grad


@pytest.mark.parametrize("call", ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"])
def test_a_communicator_refuses_tensors_that_need_a_gradient(world: dist.ProcessGroup, call: str) -> None:
    comm = mpicomm.torch.communicator()
    a, b = torch.ones(dist.get_world_size(), 2, requires_grad=True), torch.ones(2, 2)
    with pytest.raises(InvalidUsageError, match=rf"a requires a gradient, .*call mpicomm\.torch\.{call}, or pass"):
        getattr(comm, call)(a, b)


def test_operands_of_different_libraries_are_refused(world: dist.ProcessGroup) -> None:
    comm = mpicomm.torch.communicator()
    with pytest.raises(InvalidUsageError, match="b is a ndarray, and a is a tensor"):
        comm.matmul_allreduce(torch.ones(2, 2), torch.ones(2, 2).cpu().numpy())


def test_bfloat16_is_added_in_float32(world: dist.ProcessGroup) -> None:
    size, comm = dist.get_world_size(), mpicomm.torch.communicator()
    a = torch.full((4 * size, 16), 1.0, dtype=torch.bfloat16)
    b = torch.full((16, 8), 17.0 / 16, dtype=torch.bfloat16)
    got = comm.matmul_reduce_scatter(a, b)
    assert got.dtype == torch.bfloat16 and torch.equal(got, torch.full_like(got, 17.0 * size))


@pytest.mark.gpu_alone
def test_layers_in_a_graph(world: dist.ProcessGroup) -> None:
    size, rank, comm = dist.get_world_size(), dist.get_rank(), mpicomm.torch.communicator()
    rows, inner, columns = 1920, 4096, 4096
    torch.manual_seed(rank)
    x = torch.randn(rows, inner, dtype=torch.bfloat16)
    w = torch.randn(inner, columns, dtype=torch.bfloat16)
    out, rest = torch.empty(rows * size, columns, dtype=w.dtype), torch.empty(rows, columns, dtype=w.dtype)

    def layers() -> None:
        comm.allgather_matmul(x, w, out)
        comm.matmul_reduce_scatter(out, w, rest)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            layers()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            layers()
        x.normal_()
        graph.replay()
        comm.check(stream)
        whole = torch.empty(rows * size, inner, dtype=w.dtype)
        dist.all_gather_into_tensor(whole, x)
        torch.testing.assert_close(out, whole @ w, rtol=2e-2, atol=1.0)
        wanted = torch.empty_like(rest)
        dist.reduce_scatter_tensor(wanted, out @ w)
        torch.testing.assert_close(rest, wanted, rtol=2e-2, atol=64.0)


@pytest.mark.parametrize("by_rows", [False, True])
def test_fp8_elements_are_scaled(world: dist.ProcessGroup, device: torch.device, by_rows: bool) -> None:
    comm, rank, size = mpicomm.torch.communicator(), dist.get_rank(), dist.get_world_size()
    rows, inner, columns = 16 * size, 32, 64

    def factors(shape: tuple[int, int], seed: int) -> torch.Tensor:
        return torch.full(shape, 0.5) if not by_rows else 2.0 ** ((torch.arange(shape[0] * shape[1]) + seed) % 3)

    def operands(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        scale = factors((count, 1) if by_rows else (1, 1), seed).view(-1, 1)
        return torch.randint(-2, 3, (count, inner)).float().to(torch.float8_e4m3fn), scale

    shards = [operands(each, rows) for each in range(size)]
    weights = [operands(50 + each, columns) for each in range(size)]
    (a, scale_a), (b, scale_b) = shards[rank], weights[rank]
    whole = torch.cat([x.float() * scale for x, scale in shards])
    scales = {"scale_a": scale_a, "scale_b": scale_b.t()}
    got = comm.allgather_matmul(a, b.t(), **scales)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, (whole @ (b.float() * scale_b).t()).bfloat16())
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    assert comm.matmul_allreduce(a, b.t(), out, **scales) is out
    parts = [(x.float() * s) @ (w.float() * t).t() for (x, s), (w, t) in zip(shards, weights, strict=True)]
    assert torch.equal(out, sum(part.bfloat16().float() for part in parts).bfloat16())
    with pytest.raises(InvalidUsageError, match="scale_a is None: pass a float32 tensor with one element"):
        comm.allgather_matmul(a, b.t(), scale_b=scale_b)
    with pytest.raises(InvalidUsageError, match="a has dtype float8_e4m3fn: pass scale_a and scale_b"):
        comm.allgather_matmul(a, b.t())
    with pytest.raises(InvalidUsageError, match="are for PyTorch's product of fp8 tensors"):
        comm.allgather_matmul(a.float(), b.float().t(), **scales)


FEATURES, TOP_K, TOKENS = 8, 3, 12


@pytest.fixture
def comm(world: dist.ProcessGroup) -> mpicomm.Communicator:
    return communicator(world)


@pytest.fixture(params=["experts", "tokens"])
def mixture(comm: mpicomm.Communicator, request: pytest.FixtureRequest) -> Iterator[mpicomm.Experts]:
    counts = [(2, 0, 3, 1)[rank % 4] for rank in range(comm.size)]
    numbers = counts, FEATURES, TOKENS, TOP_K, torch.float32
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

        self.xs, self.scores, self.slopes = of_all(TOKENS, FEATURES), of_all(TOKENS, TOP_K), of_all(TOKENS, FEATURES)
        self.ids = [
            torch.randint(-1, total, (TOKENS - rank, TOP_K), generator=numbers, device="cpu").to(self.xs[0].device)
            for rank in range(comm.size)
        ]
        self.matrices = torch.randn(total, FEATURES, FEATURES, generator=numbers, device="cpu").to(self.xs[0].device)

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
                chosen = outputs.gather(1, received.topk_ids.clamp(min=0).long()[:, :, None].expand(-1, -1, FEATURES))
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


def test_fp8_has_no_gradients(comm: mpicomm.Communicator) -> None:
    with mpicomm.Experts(comm, comm.size, 512, 1, 1, torch.float32, wire_dtype=torch.float8_e4m3fn) as mixture:
        x, ids, weights = torch.ones(1, 512), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        with pytest.raises(mpicomm.InvalidUsageError, match="wire_dtype=float8_e4m3fn, which has no gradients"):
            experts(mixture, x, ids, weights, lambda rows, _: rows)
