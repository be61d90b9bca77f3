"""Tensor-parallel layers and their gradients against one rank with the whole layers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpicomm.torch
from mpicomm.errors import InvalidUsageError

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
def test_elements_of_eight_bits_are_scaled(world: dist.ProcessGroup, device: torch.device, by_rows: bool) -> None:
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
    with pytest.raises(InvalidUsageError, match="are for PyTorch's product of tensors with elements of 8 bits"):
        comm.allgather_matmul(a.float(), b.float().t(), **scales)
