"""A program that does not import mpicomm names the backend, and PyTorch finds it by the package's entry point."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import ROOT, run_job

GROUP = "torch.distributed.backends"
PROGRAM = """
import os, sys
from mpi4py import MPI
import torch, torch.distributed as dist

world = MPI.COMM_WORLD
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(world.rank), str(world.size)
# The first rank listens on a port that the system chooses. PyTorch's own store in the same process shares the port.
held = None
if world.rank == 0:
    held = dist.TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False, multi_tenant=True)
os.environ["MASTER_PORT"] = str(world.bcast(held and held.port))
assert "mpicomm" not in sys.modules
dist.init_process_group("mpicomm")
total = torch.ones(3)
dist.all_reduce(total)
if world.rank == 0:
    print(dist.get_backend(), total.tolist())
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not any(each.value.startswith("torch.") for each in entry_points(group=GROUP)),
    reason="this PyTorch has no entry points of backends: a program imports mpicomm.torch",
)
def test_a_program_names_only_the_backend(tmp_path: Path) -> None:
    # The metadata that an installation of this checkout has, also if another one, or none, is installed.
    (entry,) = re.findall(rf'^\[project\.entry-points\."{GROUP}"\]\n(.+)$', (ROOT / "pyproject.toml").read_text(), re.M)
    metadata = tmp_path / "mpicomm-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mpicomm\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n".replace('"', ""))
    result = run_job(
        2,
        "-c",
        PROGRAM,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
        MASTER_ADDR="127.0.0.1",
        MPICOMM_DEVICE="cpu",
    )
    assert (result.returncode, result.stdout) == (0, "mpicomm [2.0, 2.0, 2.0]\n"), result.stdout + result.stderr
