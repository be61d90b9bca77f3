"""LoggedCalls: the calls of the ranks of a node, for error texts, because kernels do not know calls."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.gpu.arena import DeviceArena
from mpicomm.devices.cuda.faults import called_differently
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import CollectiveTimeoutError, PeerError, name_ranks
from mpicomm.waiting import wait_until

_LATE_S = 0.5  # how long an error waits for the calls of ranks that are a little late


class LoggedCalls:
    """The calls of the ranks of a node, as its call log has them. All methods are local."""

    def __init__(self, node: Group, call_log: CallLog, backend: GpuBackend, arena: DeviceArena) -> None:
        self._node = node
        self._call_log = call_log
        self._backend = backend
        self._arena = arena

    def different(self, *, wait: bool) -> list[str]:
        """Return the text of each rank's call if the ranks called different things; else an empty list.

        A rank that has not come may be in a call by MPI instead.

        ``wait`` gives ranks some time to post their calls, because the data of a rank may arrive before its post.
        """
        if wait:
            wait_until(self._call_log.all_differ, _LATE_S)
        if not (self._call_log.differ() or self._call_log.by_mpi()):
            return []
        said = self._call_log.read()
        return [f"rank {rank}: {text}" for rank, text in zip(self._node.ranks, said, strict=True)]

    def require_same(self) -> None:
        """Wait until all ranks are in this rank's call, before they set up memory together.

        Raises as `wait_for`.
        """
        self.wait_for(self._call_log.behind)

    def meet(self) -> None:
        """Wait until all ranks are about to launch this rank's next launch. Raises as `wait_for`.

        A rank in the same call may still have to load its kernel, which waits for other threads or the device.
        """
        self.wait_for(self._call_log.not_ready)

    def wait_for(self, missing: Callable[[], list[int]]) -> None:
        """Wait until ``missing``, which returns indices in the node, returns no rank.

        Raises `PeerError` if a rank has called something else, because that rank may be in a kernel and never come.
        Raises `CollectiveTimeoutError` for a rank that does not come in time. Every later check of the backend raises
        the same error.
        """
        wait_until(lambda: not missing() or self._call_log.differ(), self._node.timeout_s)
        behind = [self._node.ranks[index] for index in missing()]
        differ = self._call_log.differ()
        different = self.different(wait=differ) if differ or behind else []
        if different:
            error = called_differently(different, self._node.ranks)
            self._arena.abort()  # so that ranks in a kernel leave before their time is up
            self._fail(error)
        if behind:
            late = f"collective: {name_ranks(behind)} did not come within {self._node.timeout_s:g} s"
            self._fail(CollectiveTimeoutError(f"{late}; the communicator is unusable: create another", ranks=behind))

    def _fail(self, error: CollectiveTimeoutError | PeerError) -> None:
        self._backend.fail(error)
        raise error
