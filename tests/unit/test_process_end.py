"""How jobs end that leave communicators behind: at once, with the right exit code, and without noise."""

from __future__ import annotations

import os

import pytest

from tests.helpers.mpiexec import run_job

PRELUDE = """
import gc, sys
import numpy as np
from mpi4py import MPI
import mpicomm
comm = mpicomm.Communicator(MPI.COMM_WORLD, device="cpu")
child = comm.Split(0, -comm.rank)
array, event = comm.zeros(1000), comm.shared_event()
of_child = child.zeros(1000)
array.peer((comm.rank + 1) % comm.size)[comm.rank] = 1
view = array.peer(0)
comm.Barrier()
"""


def files() -> set[str]:
    """What there is in /dev/shm but for what the MPI of this or of another job has there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("mpich", "ompi", "vader", "sem."))}


def require_end(code: str, status: int = 0, *options: str, said: str = "") -> None:
    before = files()
    result = run_job(2, *options, "-c", PRELUDE + code)
    assert result.returncode == status, result.stderr
    if said:
        assert said in result.stderr
    else:
        assert result.stderr == ""
    assert files() <= before


ENDS = {
    "no Free": "",
    "Free of one": "comm.Free()",
    "Free of all": "child.Free(); comm.Free()",
    "sys.exit": "sys.exit(0)",
    "Finalize": "MPI.Finalize()",
    "Finalize, Free": "MPI.Finalize(); repr(comm); array.close(); event.close(); child.Free(); comm.Free()",
    "Finalize in a block": "with comm, array, child: MPI.Finalize()",
    "Finalize, collected": "MPI.Finalize(); del comm, child, array, of_child, event, view; gc.collect()",
    "communicator collected": "del comm, child; gc.collect(); array.local[:] = 2; assert of_child.peer(1)[0] == 0",
    "arrays collected": "del array, of_child, event; gc.collect(); comm.zeros(3)",
    "all collected": "del comm, child, array, of_child, event; gc.collect(); assert view[0] in (0, 1)",
    "error caught": """
try:
    with comm:
        raise ValueError
except ValueError:
    pass
""",
    "one Free less": """
other = mpicomm.Communicator(MPI.COMM_SELF, device="cpu")
other.zeros(3)
if comm.rank == 0:
    other.Free()
""",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_clean_end_is_clean(code: str) -> None:
    require_end(code)


def test_exit_code_is_kept() -> None:
    require_end("sys.exit(3)", 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_of_one_rank_ends_the_job(rank: int) -> None:
    code = f"""
if comm.rank == {rank}:
    raise ValueError("the cause")
array.wait_signal({rank})
"""
    require_end(code, 1, "-m", "mpi4py", said="ValueError: the cause")


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_all_ranks_ends_the_job(rank: int) -> None:
    code = f"comm.empty(-1 if comm.rank == {rank} else 1)"
    require_end(code, 1, "-m", "mpi4py", said=f"failed on rank {rank}: shape=(-1,) has a negative size")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_did_not_come_keeps_nobody_from_ending(rank: int) -> None:
    require_end(f"""
impatient = mpicomm.Communicator(device="cpu", timeout_s=0.5)
impatient.zeros(3)
if comm.rank != {rank}:
    try:
        impatient.zeros(4)
    except mpicomm.CollectiveTimeoutError:
        impatient.Free()
comm.Barrier()
""")


def test_import_alone_ends_at_once() -> None:
    result = run_job(1, "-c", "import mpicomm")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
