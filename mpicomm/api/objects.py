"""The blocking calls of a Communicator on Python objects, and its probes.

MPI carries out the calls on objects, and the doctor sees them. Receives of objects find the messages that probes took.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from mpi4py import MPI
from mpi4py.MPI import ANY_SOURCE, ANY_TAG

from mpicomm.activity.page import begin_by_mpi, by_mpi
from mpicomm.api.host_staging import HostStaging
from mpicomm.mpi.shown import probe, receiving, recv_object, sending, sendrecv_object

if TYPE_CHECKING:
    from mpicomm.messages.calls import Messages

Given = ParamSpec("Given")
Result = TypeVar("Result")
_COLLECTIVES = "barrier", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan"


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective call of mpi4py that tells the doctor its name."""
    number = by_mpi(method.__name__.replace("barrier", "Barrier"))

    @functools.wraps(method)
    def call(self: Any, /, *given: Any, **named: Any) -> Any:
        begin_by_mpi(self._row, number)
        return method(self, *given, **named)

    return call


def _probing(
    by_mpi: Callable[Concatenate[Any, Given], Result], *, wait: bool, matches: bool = False
) -> Callable[Concatenate[Any, Given], Result]:
    """Return a probe of mpi4py that also takes rendezvous headers for messages.

    With ``matches`` it returns a message that an array of the host or of a GPU receives.
    """

    @functools.wraps(by_mpi)
    def look(self: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: MPI.Status | None = None) -> Any:
        messages = self._messages
        if not (messages.on_gpu if matches else messages.by_rendezvous):
            return by_mpi(self, source, tag, status)  # type: ignore[call-arg,arg-type]
        take = messages.unexpected.match if matches else messages.unexpected.probe
        return take(source, tag, status, wait=wait)

    made: Any = look
    return made  # type: ignore[no-any-return]


class ObjectCalls(MPI.Intracomm):
    """mpi4py's blocking calls on Python objects, which MPI carries out. `Probes` has the calls that receive."""

    _row: memoryview

    send = sending(MPI.Intracomm.send)
    ssend = sending(MPI.Intracomm.ssend)


for _name in _COLLECTIVES:
    setattr(ObjectCalls, _name, _counted(getattr(MPI.Intracomm, _name)))


class Probes(MPI.Intracomm):
    """mpi4py's probes. Local. `Probe` and `Mprobe` block until a message is there.

    On a communicator of GPUs MPI carries rendezvous headers in place of long messages of GPU arrays. The probes still
    fill statuses with the length of the data. An array of the host or of a GPU receives the message that ``Mprobe`` or
    ``Improbe`` returns. A probe takes a header from MPI to read it. After that only the receives of this communicator
    find the message.
    """

    _messages: Messages

    Probe = probe = _probing(probe, wait=True)
    Iprobe = iprobe = _probing(MPI.Intracomm.Iprobe, wait=False)
    Mprobe = _probing(receiving(HostStaging.Mprobe, 0), wait=True, matches=True)
    Improbe = _probing(HostStaging.Improbe, wait=False, matches=True)
    # mpi4py's message keeps the pickled object.
    mprobe = _probing(receiving(MPI.Intracomm.mprobe, 0), wait=True, matches=True)
    improbe = _probing(MPI.Intracomm.improbe, wait=False, matches=True)

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: MPI.Status | None = None
    ) -> Any:
        """Receive a Python object; see mpi4py."""
        kept = self._messages.unexpected.take(source, tag)
        return recv_object(self, buf, source, tag, status) if kept is None else kept.recv(status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> MPI.Request:
        """Start to receive a Python object; see mpi4py."""
        kept = self._messages.unexpected.take(source, tag)
        return super().irecv(buf, source, tag) if kept is None else kept.irecv()

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Send a Python object and receive another; see mpi4py."""
        kept = self._messages.unexpected.take(source, recvtag)
        if kept is None:
            return sendrecv_object(self, sendobj, dest, sendtag, recvbuf, source, recvtag, status)
        request = self.isend(sendobj, dest, sendtag)
        received = kept.recv(status)
        request.wait()
        return received
