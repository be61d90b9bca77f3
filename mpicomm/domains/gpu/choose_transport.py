"""Choose the engine that moves device memory between peer domains. All ranks choose together an engine that works."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm import environment
from mpicomm.cluster.agreement import Group
from mpicomm.cluster.process import query_cuda_aware
from mpicomm.collectives.checks import Signature
from mpicomm.devices.cuda.side_streams import ForkedStream
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.domains.gpu.nccl_transport import NcclTransport, require_possible
from mpicomm.domains.mapped import MappedChannels
from mpicomm.domains.mpi_transfers import Transfers
from mpicomm.domains.mpi_transports import CudaAwareTransport, PinnedTransport
from mpicomm.domains.steps import NetworkStep, Transport, TransportName
from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, InvalidUsageError, MpicommError, PeerError
from mpicomm.log import logger


class MappedTransport(Transport):
    """The `Transport` for ranks of one node, which map each other's memory. Construction is local."""

    name: TransportName = "mapped"

    def __init__(self, channels: MappedChannels, backend: GpuBackend) -> None:
        self._channels = channels
        self._backend = backend
        with backend.current():
            # Two streams, because a rank must receive while it waits for a slot.
            self._out, self._into = ForkedStream(), ForkedStream()

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; it does not block."""
        side = self._backend.side_streams
        with self._backend.current():
            out, into = self._out.of(stream), self._into.of(stream)
            behind = side.mark(stream)
            side.follow(out, behind)
            side.follow(into, behind)
            self._channels.exchange(network_step, out, into)
        marks = side.mark(out), side.mark(into)

        def finish() -> None:
            for mark in marks:
                side.follow(stream, mark)

        return finish

    def close(self) -> None:
        with self._backend.current():
            self._out.close()
            self._into.close()


def choose_transport(
    group: Group,
    transfers: Transfers,
    backend: GpuBackend,
    uuids: tuple[bytes, ...],
    channels: Callable[[], MappedChannels] | None,
    on_failure: Callable[[CollectiveTimeoutError | PeerError], None],
) -> tuple[Transport, dict[str, str]]:
    """Return the best transport that works on all ranks, or that of MPICOMM_INTERNODE, and why not better ones.

    Collective, with the same answer on all ranks. ``transfers`` carry messages of MPI, and ``uuids`` are the GPUs of
    all ranks. ``channels`` makes memory that all ranks map, collectively; it is None if ranks are on several nodes.

    Raises on all ranks alike: `InvalidUsageError` if MPICOMM_INTERNODE is bad or differs, `BackendUnavailableError` if
    the engine that it names does not work.
    """
    requests = group.exchange("MPICOMM_INTERNODE", environment.internode)
    if len(set(requests)) > 1:
        said = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(requests))
        raise InvalidUsageError(f"MPICOMM_INTERNODE differs between ranks: {said}; set the same on all")

    def mapped() -> Transport:
        if channels is None:
            raise BackendUnavailableError("the ranks are on several nodes, which map no memory of each other")
        return MappedTransport(channels(), backend)

    def nccl() -> Transport:
        group.agree("engine nccl", lambda: require_possible(uuids))
        made: list[NcclTransport] = []
        try:
            group.agree("engine nccl: start", lambda: made.append(NcclTransport(group, backend, on_failure)))
        except BaseException:
            for transport in made:  # it started on this rank, and failed on another rank
                transport.abort()
            raise
        return made[0]

    def require_cuda_aware() -> None:
        answer = query_cuda_aware()
        if not answer.aware:
            raise BackendUnavailableError(f"MPI takes no device pointers ({answer.how})")

    def cuda_aware() -> Transport:
        group.agree("engine mpi", require_cuda_aware)
        return CudaAwareTransport(transfers, backend)

    opens: dict[str, Callable[[], Transport]] = {
        "mapped": mapped,
        "nccl": nccl,
        "mpi": cuda_aware,
        "pinned": lambda: PinnedTransport(transfers, backend),
    }
    request = requests[0]
    rejected: dict[str, str] = {}
    for name in environment.INTERNODE if request == "auto" else [request]:
        try:
            transport = opens[name]()
        except MpicommError as error:
            if group.broken is not None:
                raise
            rejected[name] = str(error)
            if request != "auto":
                raise BackendUnavailableError(f"MPICOMM_INTERNODE={name}: {error}", ranks=error.ranks) from error
        else:
            if group.rank == 0:
                why = "; ".join(f"not {name}: {why}" for name, why in rejected.items())
                say = logger.warning if name == "pinned" and rejected else logger.info
                say("between peer domains: engine %s: %s", name, why or "as asked, or the best there is")
            return transport, rejected
    raise AssertionError("the engine pinned works everywhere")
