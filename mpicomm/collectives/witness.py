"""How a rank learns where a call is that it has no data for: from a rank that passes memory, on the board.

On a communicator of GPUs a rank is undecided where its buffers are at address 0, without elements, and the counts of
ranks may differ. It cannot know what the others pass. So each rank that knows says so on the board of its clique before
it goes on, in every call of that kind: the posts of kernels tell of calls on GPUs, and `Board.post_on_host` of all
others. All ranks post the same calls in the same order, so the number of a call is the same on all of them. The
undecided rank waits until one other rank has posted the call, and goes the same way. Where all ranks are undecided,
nobody has data, and they take the call for one of the host.

A rank that knows waits for nobody, so there is no circle. It pays for a post on the board: calls on GPUs post anyway,
and those on the host pay about a microsecond. Cliques have a board each. Where a clique has undecided ranks alone, and
there are other cliques, nobody here can know: that is an error.
"""

from __future__ import annotations

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.board import Board
from mpicomm.collectives.place import Place
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError
from mpicomm.waiting import wait_until

_WAY_OUT = "in place of address 0 pass an empty array of the GPU's library or of NumPy"


def learn_place(board: Board, clique: Group, operation: str, *, alone: bool) -> Place:
    """Return where the next call is, as soon as a rank of the clique says so. Local, blocking.

    ``alone`` is whether there is no other clique. Raises `CollectiveTimeoutError` where no rank comes in time, and
    `InvalidUsageError` where no rank of the clique knows and those of others may.
    """
    call = board.ask()
    found: list[bool] = []

    def known() -> bool:
        on_host = board.is_on_host(call)
        if on_host is not None:
            found.append(on_host)
        return on_host is not None

    if not wait_until(known, clique.timeout_s, clique.progress):
        raise CollectiveTimeoutError(
            f"{operation}: this rank passes no memory, and no other rank of its node has come within "
            f"{clique.timeout_s:g} s to say whether the call is on GPUs: {_WAY_OUT}"
        )
    if not alone and board.nobody_knows(call):
        raise InvalidUsageError(
            f"{operation}: no rank of {list(clique.ranks)} passes memory, so they cannot know whether the call is on "
            f"GPUs for the ranks of other nodes: {_WAY_OUT}"
        )
    return "host" if found[0] else "gpu"
