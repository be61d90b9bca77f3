"""The handle kind of each node. If ranks of a node share no memory, their containers become nodes."""

from __future__ import annotations

from mpicomm.cluster.agreement import Group
from mpicomm.cluster.placement import Placement
from mpicomm.devices.base import Backend
from mpicomm.devices.handle import Kind
from mpicomm.errors import HandleError
from mpicomm.log import logger
from mpicomm.sharing.choose_handle import NoKindError, choose_kind

# It keeps the messages of a node apart from the messages of the whole communicator.
_NODE_TAG = 1


def choose_handles(group: Group, placement: Placement, backend: Backend) -> Placement:
    """Return the placement with the best kind of handle that works between the ranks of each node. Collective.

    If no kind works and the ranks are in several containers, the ranks of each container become a node. If ranks of one
    container cannot open each other's memory, every rank raises the same `HandleError`.
    """
    request = placement.here.handle
    first: NoKindError | None = None  # of the whole node, because it says most
    while True:
        node = node_of(group, placement)

        def choose(node: Group = node) -> tuple[Kind, dict[str, str]] | NoKindError:
            try:
                return choose_kind(node, backend, request)
            except NoKindError as error:  # all ranks of the node raise it
                return NoKindError(str(error), ranks=error.ranks)

        found = group.exchange("Communicator: choose handle", choose)
        chosen = [each for each in found if not isinstance(each, NoKindError)]
        if len(chosen) == len(found):
            break
        errors = {rank: each for rank, each in enumerate(found) if isinstance(each, NoKindError)}
        first = first or next(iter(errors.values()))
        parted = placement.parted(errors.keys())
        if parted is None:
            raise HandleError(str(first), ranks=first.ranks)
        if group.rank == 0:
            ranks = ", ".join(map(str, errors))
            logger.warning("the ranks %s share no memory and count as several nodes: %s", ranks, first)
        placement = parted
    if node.rank == 0:
        _announce(backend, request, *chosen[group.rank])
    return placement.with_handles(chosen)


def node_of(group: Group, placement: Placement) -> Group:
    """Return the group of this rank's node; on one node ``group``, so that all ranks meet in one exchange. Local."""
    if len(placement.node_ranks) == group.size:
        return group
    return group.subgroup(placement.node_ranks, tag=_NODE_TAG)


def _announce(backend: Backend, request: str, kind: Kind, rejected: dict[str, str]) -> None:
    if request == kind:
        reason = "as asked"
    else:
        reason = "; ".join(f"not {other}: {why}" for other, why in rejected.items()) or "the best there is"
    say = logger.warning if kind == "staged" else logger.info
    say("device %s, memory handles %s: %s", backend.device, kind, reason)
