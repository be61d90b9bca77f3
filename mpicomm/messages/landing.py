"""Landing: where MPI puts what a call receives, and how that gets into the buffer of the call."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.messages.description import NBYTES, Description
from mpicomm.messages.device import MessageDevice
from mpicomm.messages.myself import unpack
from mpicomm.messages.transfers import Transfers
from mpicomm.mpi.arguments import parse
from mpicomm.mpi.buffers import read
from mpicomm.mpi.host_copies import through_host

_UNNAMED = (None, MPI.BYTE)  # what `parse` says of a host array of a type that NumPy does not know, and MPI may
_NOTHING = np.empty(0, np.uint8)


class Landing:
    """The receive buffer ``spec`` of one call.

    MPI gets `spec`: a host array itself, or host memory of the size of a device array, so that it can match the receive
    before anybody knows whether data comes or a description. It costs nothing where a description comes, as the system
    gives no memory to pages that nobody touches. What no plain array is, derived datatypes, arrives there too, packed.
    """

    # With `replace` the buffer is what the same call sends, and MPI must not write into it.
    def __init__(
        self, spec: Any, device: MessageDevice, transfers: Transfers, secret: bytes | None, *, replace: bool = False
    ) -> None:
        self._device = device
        self._transfers = transfers
        self._secret = secret
        self._buffer = spec
        operand = parse(_NOTHING if spec is None else spec, writable=True, name="buf")  # None is for MPI.PROC_NULL
        datatype = None if operand.mpi_type in _UNNAMED else operand.mpi_type
        derived = operand.dtype is None and datatype is not None
        self.on_device = operand.on_device
        self._plain = not derived
        self._direct = not (derived or self.on_device or replace)
        self._pointer = operand.pointer
        if operand.dtype is not None:
            self.nbytes = operand.nbytes
        elif datatype is not None:
            self.nbytes = datatype.Pack_size(operand.total, MPI.COMM_SELF)
        else:
            self.nbytes = read(operand.owner, True, "buf").nbytes
        self.is_mpis = self._direct and (secret is None or self.nbytes < NBYTES)
        """Whether nothing can come that has to be brought anywhere: a description would not fit, which MPI finds."""
        self._scratch: Any = None
        if self._direct:
            self.spec = spec
        else:
            self._scratch = np.empty(self.nbytes, np.uint8)
            self.spec = [self._scratch, self.nbytes, MPI.PACKED]
        self._described: Description | None = None

    def arrived(self, status: MPI.Status) -> None:
        """Look at what MPI has received, and correct the status."""
        if not self.is_mpis and self._secret is not None and status.Get_count(MPI.BYTE) == NBYTES:
            pointer = self._pointer if self._direct else self._scratch.ctypes.data
            self._described = Description.unpack(ctypes.string_at(pointer, NBYTES), self._secret)
            if self._described is not None:
                status.Set_elements(MPI.BYTE, self._described.nbytes)

    @property
    def brings(self) -> bool:
        """Whether `bring` has something to do for what has `arrived`."""
        return not self._direct or self._described is not None

    @property
    def waits(self) -> bool:
        """Whether `bring` of what has `arrived` waits for all that is on its stream."""
        return self._described is None or not (self._plain and self.on_device)

    def bring(self, status: MPI.Status, stream: int) -> None:
        """Enqueue on ``stream`` what brings the message into the buffer; blocking where that is not a device array.

        Raises `MPI.Exception` for a message that is longer than the buffer.
        """
        if self._described is None:
            self._bring_data(status.Get_count(MPI.BYTE), stream)
        elif self._described.nbytes > self.nbytes:
            self._transfers.drop(self._described, status.source, stream)
            raise MPI.Exception(MPI.ERR_TRUNCATE)
        else:
            pointer = self._pointer if self._plain else self._scratch.ctypes.data
            self._transfers.receive(self._described, pointer, status.source, stream)
            if self.waits:
                self._device.synchronize(stream)
                self._device.check()
            if not self._plain:
                self._unpack(self._described.nbytes, stream)

    def _bring_data(self, nbytes: int, stream: int) -> None:
        if not self._plain:
            self._unpack(nbytes, stream)
        elif not self.on_device:
            ctypes.memmove(self._pointer, self._scratch.ctypes.data, nbytes)
        elif nbytes:
            self._device.copy(self._pointer, self._scratch.ctypes.data, nbytes, stream)
            self._device.synchronize(stream)  # the host memory is given up then

    def _unpack(self, nbytes: int, stream: int) -> None:
        """Let MPI put packed bytes where the datatype says."""
        packed = self._scratch[:nbytes]
        through_host(self._device, stream, lambda spec: unpack(packed, spec), [(self._buffer, True, "buf")])
