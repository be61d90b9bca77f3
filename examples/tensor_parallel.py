"""A network with layers that are spread over ranks, in two ways: `mpirun -np 4 python examples/tensor_parallel.py`.

Each rank has some columns of the first layer and the same rows of the second layer. So a rank computes with only its
own parts. As DTensors, one all-reduce adds the results, and on a GPU the whole forward pass is one CUDA graph. With
`mpicomm.torch.allgather_matmul` and `matmul_reduce_scatter` each rank also has only some rows of the batch, and the
data travels while the GPU multiplies.
"""

import copy
import sys
import time
from collections.abc import Callable

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
except ImportError as error:
    sys.exit(f'this example needs PyTorch ({error}): pip install -e ".[torch]"')

import mpicomm.torch

dist.init_process_group("mpicomm")  # MPI gives rank, size and address
comm = mpicomm.torch.communicator()
device = torch.device("cpu" if comm.device == "cpu" else f"cuda:{comm.device}")
rows, width, neurons = (16, 256, 256) if device.type == "cpu" else (512, 4096, 4096)
batch, hidden = rows * comm.size, neurons * comm.size  # so any number of ranks has equal parts

torch.manual_seed(1)  # the same layers and inputs on every rank
before, after = nn.Linear(width, hidden, device=device), nn.Linear(hidden, width, device=device)
whole = nn.Sequential(before, nn.GELU(), after)
first, second = torch.randn(2, batch, width, device=device)

mesh = init_device_mesh(device.type, (comm.size,))
spread = parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
parts = sum(parameter.to_local().numel() for parameter in spread.parameters())


inputs, outputs = torch.zeros(2, batch, width, device=device)


def forward() -> None:
    """Compute `outputs` from `inputs`."""
    outputs.copy_(spread(inputs))  # waits for the all-reduce, because a graph must contain the whole all-reduce


def in_a_graph(call: Callable[[], None]) -> Callable[[], None]:
    """Return the launch of a CUDA graph of ``call``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # the first calls set up memory and load kernels, which a capture does not allow
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    launch: Callable[[], None] = graph.replay
    return launch


def finish() -> None:
    """Wait for the GPU, and raise if a rank did not come."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        comm.check(torch.cuda.current_stream())


with torch.no_grad():
    run = forward if device.type == "cpu" else in_a_graph(forward)
    for values in (first, second):
        inputs.copy_(values)
        run()
        finish()
        # Several ranks add the parts of a sum in another order than one rank does, in float32.
        torch.testing.assert_close(outputs, whole(values), rtol=1e-4, atol=1e-4)

    runs = 20
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(runs):
        run()
    finish()
    microseconds = (time.perf_counter() - start) / runs * 1e6

# The same layers by products that overlap with their collective, forward and backward.
own = slice(comm.rank * rows, (comm.rank + 1) * rows)
columns = before.weight.detach().tensor_split(comm.size)[comm.rank].clone().requires_grad_()
bias = before.bias.detach().tensor_split(comm.size)[comm.rank].clone().requires_grad_()
second_rows = after.weight.detach().tensor_split(comm.size, 1)[comm.rank].clone().requires_grad_()
mine = first[own].clone().requires_grad_()
activations = mpicomm.torch.allgather_matmul(mine, columns.t(), bias)
result = mpicomm.torch.matmul_reduce_scatter(nn.functional.gelu(activations), second_rows.t(), after.bias.detach())
(result * second[own]).mean().backward()
finish()

everything = first.clone().requires_grad_()
(whole(everything) * second).mean(1).sum().div(rows).backward()  # the sum of the losses of all ranks
for got, wanted in (
    (mine.grad, everything.grad[own]),
    (columns.grad, before.weight.grad.tensor_split(comm.size)[comm.rank]),
    (bias.grad, before.bias.grad.tensor_split(comm.size)[comm.rank]),
    (second_rows.grad, after.weight.grad.tensor_split(comm.size, 1)[comm.rank]),
    (result, whole(first)[own]),
):
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

if comm.rank == 0:
    share = parts / sum(parameter.numel() for parameter in whole.parameters())
    print(f"{comm.size} ranks, {share:.0%} of the parameters on each: {microseconds:.0f} us, the results of one rank")
dist.destroy_process_group()
