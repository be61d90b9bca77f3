"""When a session opens its device and sets itself up, and how it gives both back: with doubles of GPUs."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, HandleError
from mpicomm.cluster.placement import Placement
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.log import logger
from mpicomm.session import Session
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.faults.setup_failures import raising
from tests.helpers.rigs.communicators import communicator, patience_s
from tests.helpers.rigs.message_rigs import on_threads

pytestmark = pytest.mark.mpi(min_size=2)

LARGE = 30_000


def exchange(comm: mpicomm.Communicator, device: Any) -> None:
    """Send a message that its receiver copies out of the sender's outbox, to the next rank."""
    sent, received = (DeviceArray(device, np.full(LARGE, comm.rank)) for _ in range(2))
    comm.Sendrecv(sent, (comm.rank + 1) % comm.size, 0, received, (comm.rank - 1) % comm.size, 0)
    assert (received.get() == (comm.rank - 1) % comm.size).all()


def test_messages_open_the_device_and_set_nothing_up(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu") as parent, nothing_leaks():
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm.check()
        assert not comm._session._groups
        comm.Free()
        assert device.closed


def test_free_without_a_set_up_waits_for_those_who_read_this_ranks_memory(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu") as parent:
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm_world.Barrier()
        start = time.monotonic()
        if comm.rank == 0:
            time.sleep(0.5)
        comm.Free()
        assert time.monotonic() - start > 0.45


def test_free_without_a_set_up_gives_all_back_although_a_rank_does_not_come(comm_world: MPI.Intracomm) -> None:
    limit_s = patience_s("cpu")
    with nothing_leaks(), communicator("cpu", timeout_s=limit_s) as parent:
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm_world.Barrier()
        if comm.rank > 0:
            with pytest.raises(CollectiveTimeoutError, match=f"Free: rank 0 did not arrive within {limit_s:g} s"):
                comm.Free()
            assert device.closed
            start = time.monotonic()
            comm.Free()
            assert time.monotonic() - start < limit_s * 0.8
        comm_world.Barrier()
        if comm.rank == 0 and comm.size > 1:
            with pytest.raises(CollectiveTimeoutError, match=f"Free: rank 0 did not arrive within {limit_s:g} s"):
                comm._session.close()


def test_a_set_up_that_fails_keeps_open_memory_open(comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    with communicator("cpu") as parent:
        comm, device = on_threads(parent)
        # All ranks make a session, because the pages of all ranks number the sessions alike.
        opened = None if comm.rank == 1 else cast(GpuBackend, device)  # on rank 1 the device opens with the set-up
        comm._begin(Session(MPI.Intracomm(comm), comm._session.placement, opened))
        if comm.rank == 1:
            monkeypatch.setattr(Placement, "create_backend", raising(OSError))
        with raises_everywhere(comm_world, HandleError, match="bind device failed on rank 1: .*injected"):
            comm._session.set_up("set up")
        assert not comm._session._groups
        assert not device.closed
        monkeypatch.setattr(Placement, "create_backend", lambda placement: device)
        exchange(comm, device)
        comm.Free()
        assert device.closed


@pytest.mark.parametrize("checked", [False, True])
def test_free_logs_an_error_that_no_call_has_raised(monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *values: said.append(text % values))
    with communicator("cpu") as parent:
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm.check()
        fails = comm.rank == 0
        if fails:
            device.missed = ("rank 1 did not come", 1)
            if checked:
                with pytest.raises(CollectiveTimeoutError):
                    comm.check()
        comm.Free()
    told = fails and not checked
    assert said == ["Free: earlier calls on GPUs have failed, and their results are wrong: rank 1 did not come"] * told
