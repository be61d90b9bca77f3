"""Run torch-harmonics' transforms on a sphere that all ranks share, and compare them with those of one rank.

`mpiexec -n 2 python -m mpicomm scripts/testing/harmonics.py` takes PyTorch's backend mpicomm, and `python -m mpi4py` in
its place takes NCCL if there is a GPU for each rank, else gloo. Latitudes are split, then longitudes.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch_harmonics as harmonics
import torch_harmonics.distributed as distributed
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
ROUNDS = 20


def main() -> None:
    """Transform and return, forwards and backwards, along both axes."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", WORLD.rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "mpicomm" if "mpicomm" in sys.modules else ("nccl" if gpus >= WORLD.size else "gloo")
    if backend == "mpicomm":
        import mpicomm.torch  # noqa: F401, it registers the backend
    file = WORLD.bcast(tempfile.mktemp() if WORLD.rank == 0 else None)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=WORLD.rank, world_size=WORLD.size)
    alone = [dist.new_group([rank]) for rank in range(WORLD.size)][WORLD.rank]
    for axis, groups in (("latitudes", (dist.group.WORLD, alone)), ("longitudes", (alone, dist.group.WORLD))):
        distributed.init(*groups)
        check(axis, -2 if axis == "latitudes" else -1, backend, device)
    dist.destroy_process_group()


def check(axis: str, dim: int, backend: str, device: torch.device) -> None:
    """Exit if a transform of all ranks differs from that of one rank, and print how long both ways take."""
    nlat, nlon = 128, 256
    whole = harmonics.RealSHT(nlat, nlon).to(device), harmonics.InverseRealSHT(nlat, nlon).to(device)
    ours = (
        distributed.DistributedRealSHT(nlat, nlon).to(device),
        distributed.DistributedInverseRealSHT(nlat, nlon).to(device),
    )
    torch.manual_seed(1)
    field = torch.randn(2, 8, nlat, nlon, device=device)
    expected_in = field.clone().requires_grad_()
    expected = whole[1](whole[0](expected_in))
    expected.backward(field)
    sizes = [len(part) for part in torch.arange(field.shape[dim]).tensor_split(WORLD.size)]

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.split(sizes, dim)[WORLD.rank]

    given = mine(field).clone().requires_grad_()
    result = ours[1](ours[0](given))
    result.backward(mine(field))
    torch.testing.assert_close(result, mine(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given.grad, mine(expected_in.grad), rtol=1e-4, atol=1e-4)
    WORLD.barrier()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        result = ours[1](ours[0](given))
    if device.type == "cuda":
        torch.cuda.synchronize()
    WORLD.barrier()
    took = (time.perf_counter() - began) / ROUNDS
    if WORLD.rank == 0:
        sys.stdout.write(f"{axis}: equal\n")
        sys.stderr.write(f"{axis}: {1e3 * took:.2f} ms by {backend} on {device}\n")


main()
