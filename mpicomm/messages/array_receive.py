"""Receives into plain NumPy arrays on communicators of GPUs, where a rendezvous header may arrive in place of data.

The length of most messages shows that they are data. So these receives need no endpoint, and their requests are MPI's
own until a message of the length of a header arrives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from mpi4py import MPI

from mpicomm.messages.reader import parse_any
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi.request_lists import Driven, replace_list_calls
from mpicomm.mpi.requests import DeferredRequest
from mpicomm.mpi.shown import sendrecv

if TYPE_CHECKING:
    from typing_extensions import Self

_address = MPI.Get_address  # a tenth of the time of NumPy's `ctypes`
_byte = MPI.BYTE
_new_request = MPI.Request.__new__
_wait = MPI.Request.Wait
_test = MPI.Request.Test
_get_status = MPI.Request.Get_status


class ArrayLanding:
    """The memory that MPI gets for an array, ``spec``: the array, or memory for a header if the array is shorter.

    ``name`` is the argument of ``operation``. Raises the errors of `parse_any` for an array that cannot receive.
    """

    __slots__ = ("array", "operation", "saved", "spec", "staging")

    def __init__(self, operation: str, array: Any, name: str) -> None:
        flags = array.flags
        if not (flags.forc and flags.writeable):
            parse_any(array, True, name)  # raises
        self.operation = operation
        self.array = self.spec = array
        self.staging: Any = None
        self.saved = b""
        """What a header in the array overwrites: the message may be shorter than the header."""
        if array.nbytes < HEADER_NBYTES:
            self.staging = np.empty(HEADER_NBYTES, np.uint8)
            self.spec = [self.staging, HEADER_NBYTES, MPI.PACKED]
        else:
            self.saved = ctypes.string_at(_address(array), HEADER_NBYTES)

    def has_data(self, status: MPI.Status) -> bool:
        """Return whether MPI has received data, which then is in the array; False if the length is that of a header.

        Raises `MPI.Exception` if the data is longer than the array.
        """
        nbytes = status.Get_count(_byte)
        if nbytes == HEADER_NBYTES:
            return False
        if self.staging is not None:
            if nbytes > self.array.nbytes:
                raise MPI.Exception(MPI.ERR_TRUNCATE)
            ctypes.memmove(_address(self.array), _address(self.staging), nbytes)
        return True


Side = tuple[Any, int, int]
"""A buffer, the rank to which it goes, and the tag."""


class Exchanged:
    """The message that a `Sendrecv` receives. MPI sends the other message beside it."""

    __slots__ = ("_comm", "_posted", "_sent")

    def __init__(self, comm: MPI.Intracomm, sent: Side, posted: tuple[int, int]) -> None:
        self._comm, self._sent, self._posted = comm, sent, posted

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Send and receive."""
        sendrecv(self._comm, *self._sent, spec, *self._posted, status)


Finish = Callable[[ArrayLanding, MPI.Status], None]
"""Brings a message of the length of a header into the array, and corrects its status; blocking."""


class ArrayReceive(Driven, MPI.Request):
    """MPI's request of a receive into an array."""

    # The dictionary is for recorded requests.
    __slots__ = ("__dict__", "_done", "_finish", "_landing")
    _landing: ArrayLanding | None
    """None if the message is in the array."""
    _finish: Finish
    _done: DeferredRequest | None
    """It has the status of a message with a header which a call on a list has found. MPI's request is over then."""
    error: BaseException | None = None

    @classmethod
    def of(cls, request: MPI.Request, landing: ArrayLanding, finish: Finish) -> Self:
        """Return a request in place of MPI's."""
        replace_list_calls()
        self: Self = _new_request(cls, request)
        self._landing, self._finish, self._done = landing, finish, None
        return self

    def __bool__(self) -> bool:
        return self.active is not None

    @property
    def active(self) -> Self | DeferredRequest | None:
        if self._done is not None:
            return self._done.active
        return self if super().__bool__() else None

    def advance(self) -> bool:
        """As `DeferredRequest.advance`."""
        landing, status = self._landing, MPI.Status()
        if landing is None:
            return True
        if not _get_status(self, status):
            return False
        may_be_header = status.Get_count(_byte) == HEADER_NBYTES
        try:
            self._land(landing, status)
        except BaseException as error:
            self.error = error
        if may_be_header:  # MPI's request has the length of the header
            _wait(self)
            self._done = DeferredRequest.of(lambda: True, lambda: None, status)
            self._done.advance()
            self._done.error = self.error
        return True

    look = advance

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the message is in the array. Raises the errors of ``Recv``."""
        landing = self._landing
        if landing is None:
            _wait(self._done or self, status)
        else:
            status = MPI.Status() if status is None else status
            _wait(self, status)
            self._land(landing, status)
        if self.error is not None:
            raise self.error
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the message is in the array. Raises the errors of ``Recv``."""
        landing = self._landing
        if landing is None:
            done = _test(self._done or self, status)
        else:
            status = MPI.Status() if status is None else status
            done = _test(self, status)
            if done:
                self._land(landing, status)
        if done and self.error is not None:
            raise self.error
        return done

    def _land(self, landing: ArrayLanding, status: MPI.Status) -> None:
        self._landing = None
        if not status.Is_cancelled() and not landing.has_data(status):
            self._finish(landing, status)
