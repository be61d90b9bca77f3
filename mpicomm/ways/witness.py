"""How a rank without data learns the location of a call: from a rank that passes memory, on the call log.

On a communicator of GPUs a rank is undecided if its buffers are at address 0, without elements, and the counts of ranks
may differ. It cannot know which arrays the others pass. So in every call of that kind, each rank that knows says so on
the call log of its peer domain before it goes on. The posts of kernels tell of calls on GPUs, and
`CallLog.post_on_host` tells of all other calls. All ranks post the same calls in the same order, so the number of a
call is the same on all ranks. The undecided rank waits until another rank has posted the call, and goes the same way.
If all ranks are undecided, no rank has data, and they take the call for a call on the host.

If all ranks have the same count and one rank has no data, no rank has data. Then no rank posts anything for the call.
The ranks take such a call for a call on GPUs if their communicator has had one before, else for a call on the host.

A rank that knows waits for no rank, so there is no circle. It pays for a post on the call log: calls on GPUs post
anyway, and calls on the host pay about a microsecond. Each peer domain has a call log. If a peer domain has only
undecided ranks, and there are other peer domains, no rank of it can know: this is an error.
"""

from __future__ import annotations

from mpicomm.cluster.calls_on_host import on_host as text_on_host
from mpicomm.collectives.call import Call
from mpicomm.collectives.call_location import CallLocation
from mpicomm.collectives.operations import Operation
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError
from mpicomm.session import Session
from mpicomm.waiting import wait_until
from mpicomm.ways.engines import Engines

_WAY_OUT = "in place of address 0 pass an empty array of the GPU's library or of NumPy"


class Witness:
    """Tells each rank of one communicator the location of the other ranks' calls."""

    def __init__(self, session: Session, engines: Engines) -> None:
        placement = session.placement
        self._session = session
        self._engines = engines
        self._is_one_domain = len(placement.domains) == 1
        self.is_needed = isinstance(placement.here.device, int) and len(placement.places) > 1
        """Whether calls may be on GPUs, and there are other ranks."""

    def tell(self, operation: Operation, *, on_host: bool) -> None:
        """Tell undecided ranks the location of the next call, if there may be such ranks.

        Local, except for the set-up of the call log. A rank with a call on the host waits for this set-up as long as
        MPI would.
        """
        if self.is_needed and operation.counts != "same":
            call_log = self._engines.call_log(operation.name, patient=on_host)
            if on_host:
                call_log.post_on_host(text_on_host(operation.name))
            else:
                call_log.post(f"{operation}: set-up")

    def learn(self, call: Call) -> CallLocation:
        """Return the location of a call in which this rank is undecided.

        Local, except for the set-up of the call log; blocking. Raises `CollectiveTimeoutError` if no rank comes in time
        to say it. Raises `InvalidUsageError` if no rank of the peer domain knows, and ranks of other domains may know.
        """
        operation = call.operation
        by_mpi = call.algorithm == "mpi" or (operation.reduces and call.dtype is None)
        if by_mpi or not self.is_needed:
            return "host"  # MPI carries it out, wherever the arrays are
        if operation.counts == "same":
            return "gpu" if self._engines.gpu else "host"  # all ranks agree on whether there was a call on GPUs
        call_log = self._engines.call_log(operation.name, patient=True)
        domain, number, found = self._session.domain, call_log.ask(), list[bool]()

        def known() -> bool:
            on_host = call_log.is_on_host(number)
            if on_host is not None:
                found.append(on_host)
            return on_host is not None

        if not wait_until(known, domain.timeout_s, domain.progress):
            self._session.require_usable(operation)  # the other ranks have raised this error if they are suspended
            raise CollectiveTimeoutError(
                f"{operation}: this rank passes no memory, and no other rank of its node has come within "
                f"{domain.timeout_s:g} s to say whether the call is on GPUs: {_WAY_OUT}"
            )
        if not self._is_one_domain and call_log.all_ask(number):
            raise InvalidUsageError(
                f"{operation}: no rank of {list(domain.ranks)} passes memory, so they cannot know whether the call is "
                f"on GPUs for the other ranks: {_WAY_OUT}"
            )
        return "host" if found[0] else "gpu"
