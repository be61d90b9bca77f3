"""How a rank learns where a call is that it has no data for: from a rank that passes memory, on the call log.

On a communicator of GPUs a rank is undecided where its buffers are at address 0, without elements, and the counts of
ranks may differ. It cannot know what the others pass. So each rank that knows says so on the call log of its peer
domain before it goes on, in every call of that kind: the posts of kernels tell of calls on GPUs, and
`CallLog.post_on_host` of all others. All ranks post the same calls in the same order, so the number of a call is the
same on all of them. The undecided rank waits until one other rank has posted the call, and goes the same way. Where all
ranks are undecided, nobody has data, and they take the call for one of the host.

Where all ranks have the same count, nobody has data if one rank has none, and nobody posts anything for it. The ranks
take such a call for one on GPUs once there has been one on their communicator, else for one of the host.

A rank that knows waits for nobody, so there is no circle. It pays for a post on the call log: calls on GPUs post
anyway, and those on the host pay about a microsecond. Peer domains have a call log each. Where a peer domain has
undecided ranks alone, and there are other peer domains, nobody here can know: that is an error.
"""

from __future__ import annotations

from mpicomm.collectives.call import Call
from mpicomm.collectives.call_location import CallLocation
from mpicomm.collectives.operations import Operation
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError
from mpicomm.session import Session
from mpicomm.waiting import wait_until
from mpicomm.ways.engines import Engines

_WAY_OUT = "in place of address 0 pass an empty array of the GPU's library or of NumPy"


class Witness:
    """Tells the ranks of one communicator where each other's calls are."""

    def __init__(self, session: Session, engines: Engines) -> None:
        placement = session.placement
        self._session = session
        self._engines = engines
        self._is_one_domain = len(placement.domains) == 1
        self.is_needed = isinstance(placement.here.device, int) and len(placement.places) > 1
        """Whether calls may be on GPUs, and there are other ranks."""

    def tell(self, operation: Operation, *, on_host: bool) -> None:
        """Tell undecided ranks where the next call is, if there may be some. Local but for the set-up of the call log.

        A rank whose call is on the host waits for this set-up as long as MPI would.
        """
        if self.is_needed and operation.counts != "same":
            call_log = self._engines.call_log(operation.name, patient=on_host)
            if on_host:
                call_log.post_on_host(f"{operation} on the host")
            else:
                call_log.post(f"{operation}: set-up")

    def learn(self, call: Call) -> CallLocation:
        """Return where a call is in which this rank is undecided. Local but for the set-up of the call log, blocking.

        Raises `CollectiveTimeoutError` where no rank comes in time to say so, and `InvalidUsageError` where no rank of
        the peer domain knows and those of others may.
        """
        operation = call.operation
        mpis = call.algorithm == "mpi" or (operation.reduces and call.dtype is None)
        if mpis or not self.is_needed:
            return "host"  # MPI carries it out, wherever it is
        if operation.counts == "same":
            return "gpu" if self._engines.gpu else "host"  # whether there was a call on GPUs is the same on all ranks
        call_log = self._engines.call_log(operation.name, patient=True)
        domain, number, found = self._session.domain, call_log.ask(), list[bool]()

        def known() -> bool:
            on_host = call_log.is_on_host(number)
            if on_host is not None:
                found.append(on_host)
            return on_host is not None

        if not wait_until(known, domain.timeout_s, domain.progress):
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
