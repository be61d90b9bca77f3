"""LoggedCalls: the calls of the ranks of a node, for errors, because kernels do not know calls."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.gpu.arena import DeviceArena
from mpicomm.devices.base import GpuBackend
from mpicomm.devices.cuda.faults import called_differently
from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.waiting import wait_until

_LATE_S = 0.5  # how long an error waits for the calls of ranks that are only a little late


class LoggedCalls:
    """The calls of the ranks of a node as they stand on its call log. All methods are local."""

    def __init__(self, node: Group, call_log: CallLog, backend: GpuBackend, arena: DeviceArena) -> None:
        self._node = node
        self._call_log = call_log
        self._backend = backend
        self._arena = arena

    def different(self, *, wait: bool) -> list[str]:
        """Return the call of each rank in words, if the ranks called different things; else nothing.

        With ``wait`` a rank whose data has arrived has some time to post its call. It may do so a little later.
        """
        if wait:
            wait_until(self._call_log.all_differ, _LATE_S)
        if not self._call_log.differ():
            return []
        return [f"rank {rank}: {text}" for rank, text in zip(self._node.ranks, self._call_log.read(), strict=True)]

    def require_same(self) -> None:
        """Wait until all ranks have called what this rank has called, before they set up memory together.

        Raises as `wait_for`.
        """
        self.wait_for(self._call_log.behind)

    def meet(self) -> None:
        """Wait until all ranks launch what this rank launches next. Raises as `wait_for`.

        A rank that has called the same may still have to load its kernel, and wait for other threads or the device.
        """
        self.wait_for(self._call_log.not_ready)

    def wait_for(self, missing: Callable[[], list[int]]) -> None:
        """Wait until there are no ``missing`` ranks, as indices in the node.

        Raises, now and in every later check of the backend, `PeerError` if a rank has called something else, because
        that rank may be in a kernel and never come, and `CollectiveTimeoutError` for a rank that does not come.
        """
        wait_until(lambda: not missing() or self._call_log.differ(), self._node.timeout_s)
        behind = [self._node.ranks[index] for index in missing()]
        if self._call_log.differ():
            error = called_differently(self.different(wait=True), self._node.ranks)
            self._arena.abort()  # ranks that wait in a kernel need not wait until their time is up
            self._fail(error)
        if behind:
            names = f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind))}"
            self._fail(
                CollectiveTimeoutError(
                    f"collective: {names} did not come within {self._node.timeout_s:g} s; the communicator is unusable "
                    "from here on",
                    ranks=behind,
                )
            )

    def _fail(self, error: CollectiveTimeoutError | PeerError) -> None:
        self._backend.fail(error)
        raise error
