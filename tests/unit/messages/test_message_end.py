"""Programs that end without `Free` right after they have sent a message of a device array."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.pace import stretched

PRELUDE = """
import atexit, os, sys, time
import numpy as np
from mpi4py import MPI

def at_the_end(*_):
    # It is registered before mpicomm registers its own call, in which rank 0 waits for rank 1. So it runs after that.
    print("received" if os.path.exists(RECEIVING) else "not received yet", flush=True)

if MPI.COMM_WORLD.rank == 0:
    if FINALIZE:
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=at_the_end), None)
    else:
        atexit.register(at_the_end)
import mpicomm
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.message_rigs import take_for_gpu
child = mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", timeout_s=TIMEOUT_S).Dup()
device = take_for_gpu(child)
sent = DeviceArray(device, np.arange(100_000))
"""


@pytest.mark.parametrize("finalize", [False, True])
def test_what_was_sent_arrives(tmp_path: Path, finalize: bool) -> None:
    code = """
if child.rank == 0:
    child.Send(sent, 1)
else:
    time.sleep(0.5)
    open(RECEIVING, "w").close()
    received = np.zeros(100_000, int)
    child.Recv(received, 0)
    assert (received == np.arange(100_000)).all()
if FINALIZE:
    MPI.Finalize()
"""
    result = run_job(2, "-c", settings(tmp_path, finalize=finalize) + PRELUDE + code)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "received\n")


def settings(tmp_path: Path, *, finalize: bool) -> str:
    return f"FINALIZE, RECEIVING, TIMEOUT_S = {finalize}, {str(tmp_path / 'receiving')!r}, {stretched(1.5)}"


def test_what_no_rank_receives_does_not_keep_a_program(tmp_path: Path) -> None:
    code = "child.Isend(sent, child.rank) if child.rank == 0 else None; time.sleep(0.1)"
    result = run_job(2, "-c", settings(tmp_path, finalize=False) + PRELUDE + code)
    assert f"messages of GPU arrays were not received within {stretched(1.5):g} s" in result.stderr
