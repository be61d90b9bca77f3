"""Arrays of another GPU of the process, which no call takes: between processes whose devices are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.fakes import fake_driver
from tests.helpers.rigs.message_rigs import Rig, content, same

COUNT = 40


class Foreign:
    """An array in the memory of GPU 1."""

    def __init__(self) -> None:
        self.memory = np.zeros(COUNT, np.int32)
        fake_driver.own(self.memory, 1)
        self.__cuda_array_interface__ = {
            "shape": self.memory.shape,
            "typestr": self.memory.dtype.str,
            "data": (self.memory.ctypes.data, False),
            "version": 3,
        }


@pytest.fixture
def foreign() -> Foreign:
    return Foreign()


def refused(name: str, call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(mpicomm.InvalidUsageError, match=f"{name} is on GPU 1, but this communicator is on GPU 0: copy"):
        call(*arguments, **named)


SENDS = "Send Ssend Rsend Bsend Isend Issend Irsend Ibsend Send_init Ssend_init Rsend_init Bsend_init"


@pytest.mark.parametrize("method", SENDS.split())
def test_sends(rig: Rig, foreign: Foreign, method: str) -> None:
    refused(f"{method}: buf", getattr(rig.comm, method), foreign, rig.right)
    refused(f"{method}: buf", getattr(rig.comm, method), [foreign, 3, MPI.INT], rig.right)


@pytest.mark.parametrize("method", ["Recv", "Irecv", "Recv_init"])
def test_receives(rig: Rig, foreign: Foreign, method: str) -> None:
    refused(f"{method}: buf", getattr(rig.comm, method), foreign, rig.left)


@pytest.mark.parametrize("method", ["Sendrecv", "Isendrecv"])
def test_exchanges(rig: Rig, foreign: Foreign, method: str) -> None:
    call = getattr(rig.comm, method)
    for other in (rig.empty(COUNT), np.zeros(COUNT, np.int32)):
        refused(f"{method}: sendbuf", call, foreign, rig.right, 0, other, rig.left)
        refused(f"{method}: recvbuf", call, other, rig.right, 0, foreign, rig.left)
    refused(f"{method}_replace: buf", getattr(rig.comm, f"{method}_replace"), foreign, rig.right)


def test_calls_that_only_mpi_has(rig: Rig, foreign: Foreign) -> None:
    for method in ("Psend_init", "Precv_init"):
        if hasattr(MPI.Comm, method):
            refused("buf", getattr(rig.comm, method), foreign, 1, rig.right)


def test_a_refused_receive_loses_no_message(rig: Rig, foreign: Foreign) -> None:
    sent = [rig.comm.Isend(rig.of(rig.rank, COUNT, number), rig.right, number) for number in range(3)]
    refused("Recv: buf", rig.comm.Recv, foreign, rig.left, 0)
    message = rig.comm.Mprobe(rig.left, 1)
    refused("Message.Recv: buf", message.Recv, foreign)
    other = rig.comm.Mprobe(rig.left, 2)
    refused("Message.Irecv: buf", other.Irecv, foreign)
    received = [rig.empty(COUNT) for _ in range(3)]
    rig.comm.Recv(received[0], rig.left, 0)
    message.Recv(received[1])
    other.Irecv(received[2]).Wait()
    MPI.Request.Waitall(sent)
    for number, array in enumerate(received):
        same(array, content(rig.left, COUNT, number))
