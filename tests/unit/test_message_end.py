"""Programs that end without `Free` right after they have sent a message of a device array."""

from __future__ import annotations

import pytest

from tests.helpers.mpiexec import run_job

PRELUDE = """
import os, sys, time
import numpy as np
from mpi4py import MPI
import mpicomm
from tests.helpers.message_devices import DeviceArray, take_for_gpu
child = mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", timeout_s=1.5).Dup()
device = take_for_gpu(child)
sent = DeviceArray(device, np.arange(100_000))
"""


@pytest.mark.parametrize("end", ["", "MPI.Finalize()"])
def test_what_was_sent_arrives(end: str) -> None:
    code = f"""
if child.rank == 0:
    child.Send(sent, 1)
    from mpicomm.messages.rendezvous import Rendezvous
    before = Rendezvous.close_peers
    def close_peers(self):
        assert self.is_drained()
        before(self)
        print("taken", flush=True)
    Rendezvous.close_peers = close_peers
else:
    time.sleep(0.5)
    received = np.zeros(100_000, int)
    child.Recv(received, 0)
    assert (received == np.arange(100_000)).all()
{end}
"""
    result = run_job(2, "-c", PRELUDE + code)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "taken\n")


def test_what_nobody_receives_does_not_keep_a_program() -> None:
    code = "child.Isend(sent, child.rank) if child.rank == 0 else None; time.sleep(0.1)"
    result = run_job(2, "-c", PRELUDE + code)
    assert "messages of GPU arrays were not received within 1.5 s" in result.stderr
