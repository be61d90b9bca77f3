"""What the ranks of a node call, for errors of collectives on GPUs: the kernels that notice do not know it."""

from __future__ import annotations

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.board import Board
from mpicomm.devices.cuda.faults import called_differently
from mpicomm.errors import CollectiveTimeoutError
from mpicomm.waiting import wait_until

_LATE_S = 0.5  # how long an error waits for what ranks call that are about to


class DeviceCalls:
    """The calls of the ranks of a node as they stand on its board. All methods are local."""

    def __init__(self, node: Group, board: Board) -> None:
        self._node = node
        self._board = board

    def different(self) -> list[str]:
        """Return what each rank called, in words, if they called different things; else nothing."""
        # A rank whose first data arrived may not have looked yet at what the others call; most are only a little late.
        wait_until(self._board.all_differ, _LATE_S)
        if not self._board.differ():
            return []
        return [f"rank {rank}: {text}" for rank, text in zip(self._node.ranks, self._board.read(), strict=True)]

    def require_same(self) -> None:
        """Wait until all ranks have called what this one has; to be called before they set something up together.

        Raises `PeerError` if a rank has called something else, which may be in a kernel then and never come to the
        set-up, and `CollectiveTimeoutError` for one that does not come.
        """
        wait_until(lambda: self._board.differ() or not self._board.behind(), self._node.timeout_s)
        if self._board.differ():
            raise called_differently(self.different(), self._node.ranks)
        behind = [self._node.ranks[index] for index in self._board.behind()]
        if behind:
            names = f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind))}"
            raise CollectiveTimeoutError(
                f"collective: {names} did not come within {self._node.timeout_s:g} s; the communicator is unusable "
                "from here on",
                ranks=behind,
            )
