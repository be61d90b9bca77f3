"""A receive buffer refuses messages that are longer than itself, also when MPI does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.messages.receive_buffer import ReceiveBuffer
from mpicomm.messages.rendezvous_header import HEADER_NBYTES


def test_a_message_that_is_too_long_raises_though_mpi_has_lost_its_error() -> None:
    rendezvous: Any = SimpleNamespace(expects_headers=True)
    array, status = np.zeros(HEADER_NBYTES + 4, np.uint8), MPI.Status()
    buffer = ReceiveBuffer("host", rendezvous, array.nbytes, array.ctypes.data, None, array)
    status.Set_elements(MPI.BYTE, array.nbytes)
    assert not buffer.accept(status)
    status.Set_elements(MPI.BYTE, array.nbytes + 1)
    with pytest.raises(MPI.Exception) as raised:
        buffer.accept(status)
    assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
