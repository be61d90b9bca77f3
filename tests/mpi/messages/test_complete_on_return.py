"""Messages that are complete on return: every stream and the host may use the buffers, whatever is still in flight.

The arrays are read and overwritten without waiting for the device, whose streams are late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.message_rigs import LARGE, Rig, content

LATE_S = 0.1
COUNTS = [100, LARGE, 5 * LARGE + 3]


@pytest.fixture
def completing(rig: Rig) -> Rig:
    rig.device.completes = True
    return rig


def late(rig: Rig) -> None:
    rig.device.enqueue(0, lambda: time.sleep(LATE_S))


def now(array: DeviceArray, count: int) -> bytes:
    return array.memory[:count].tobytes()


def receives(rig: Rig, count: int, tag: int) -> dict[str, Callable[[DeviceArray], object]]:
    def matched(array: DeviceArray) -> None:
        rig.comm.Mprobe(rig.left, tag).Recv(array)

    def derived(array: DeviceArray) -> None:
        pairs = MPI.INT32_T.Create_contiguous(1).Commit()
        rig.comm.Recv([array, count, pairs], rig.left, tag)
        pairs.Free()

    return {
        "Recv": lambda array: rig.comm.Recv(array, rig.left, tag),
        "Mprobe": matched,
        "derived": derived,
        "Irecv": lambda array: rig.comm.Irecv(array, rig.left, tag).Wait(),
    }


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["Recv", "Mprobe", "derived", "Irecv"])
def test_a_message_has_come_when_its_receive_returns(completing: Rig, name: str, count: int) -> None:
    rig = completing
    for tag in range(3):  # the first call of a kind may wait for other reasons
        sent, received = rig.of(rig.rank, count, tag), rig.empty(count)
        request = rig.comm.Isend(sent, rig.right, tag)
        late(rig)
        receives(rig, count, tag)[name](received)
        assert now(received, count) == content(rig.left, count, tag).tobytes()
        request.Wait()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("method", ["Send", "Ssend", "Rsend"])
def test_an_array_may_be_overwritten_by_any_stream_when_its_send_returns(
    completing: Rig, method: str, count: int
) -> None:
    rig = completing
    for tag in range(3):
        array, received = rig.of(rig.rank, count, tag), rig.empty(count)
        request = rig.comm.Irecv(received, rig.left, tag)
        MPI.Intracomm.Barrier(rig.comm)  # Rsend needs posted receives
        late(rig)
        getattr(rig.comm, method)(array, rig.right, tag)
        array.memory[:] = -1
        request.Wait()
        assert now(received, count) == content(rig.left, count, tag).tobytes()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("replace", [False, True])
def test_both_buffers_of_an_exchange_are_free_on_return(completing: Rig, replace: bool, count: int) -> None:
    rig = completing
    for tag in range(3):
        sent, received = rig.of(rig.rank, count, tag), rig.empty(count)
        late(rig)
        if replace:
            received = sent
            rig.comm.Sendrecv_replace(sent, rig.right, tag, rig.left, tag)
        else:
            rig.comm.Sendrecv(sent, rig.right, tag, received, rig.left, tag)
            sent.memory[:] = -1
        assert now(received, count) == content(rig.left, count, tag).tobytes()


def test_a_receive_in_stream_order_returns_before_the_message_is_there(rig: Rig) -> None:
    """So the tests above can fail."""
    seen: list[Any] = []
    for tag in range(2):
        sent, received = rig.of(rig.rank, LARGE, tag), rig.empty(LARGE)
        request = rig.comm.Isend(sent, rig.right, tag)
        request.Wait()
        rig.device.enqueue(0, lambda: time.sleep(5 * LATE_S))
        rig.comm.Recv(received, rig.left, tag)
        seen.append(now(received, LARGE) == content(rig.left, LARGE, tag).tobytes())
    assert not all(seen), np.array(seen)
