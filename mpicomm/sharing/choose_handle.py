"""Choose the handle kind of each node by a test: open, write through the mapping, read back.

Claims of a driver are not enough.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpicomm.cluster.agreement import Group
from mpicomm.cluster.placement import Placement
from mpicomm.devices.cuda.types import Backend
from mpicomm.devices.handle import Kind
from mpicomm.errors import CollectiveTimeoutError, HandleError, InvalidUsageError, MpicommError
from mpicomm.log import logger
from mpicomm.sharing.segments import share


def _choose_kind(node: Group, backend: Backend, request: str) -> tuple[Kind, dict[str, str]]:
    """Return the best kind that works between all ranks of the node, and why better kinds do not. Collective.

    ``request`` is a kind, which has to work, or "auto". Every rank of the node returns or raises the same.
    """
    candidates = [kind for kind in backend.kinds if request in ("auto", kind)]
    if not candidates:
        raise InvalidUsageError(
            f'handle="{request}" does not go with device={backend.device!r}, which has {", ".join(backend.kinds)}; '
            'use handle="auto"'
        )
    rejected: dict[str, str] = {}
    culprits: set[int] = set()
    for kind in candidates:
        try:
            probe(node, backend, kind)
        except CollectiveTimeoutError:
            raise
        except MpicommError as error:
            if request != "auto" or node.broken is not None:
                raise
            rejected[kind] = str(error)
            culprits.update(error.ranks)
        else:
            return kind, rejected
    raise HandleError(
        f"no handle kind works between the ranks of this node: {rejected}: let their containers share memory, or give "
        "each container another MPICOMM_HOSTID, so that it counts as a node",
        ranks=sorted(culprits),
    )


def probe(node: Group, backend: Backend, kind: Kind) -> None:
    """Open memory of ``kind`` between all ranks of the node, and write and read it both ways. Collective.

    The segment of each rank holds its token and an inbox for each rank. Array expressions write the inboxes as kernels
    do. Copies read the tokens as copy engines do.
    """
    word = np.dtype(np.int64)
    nbytes = (node.size + 2) * word.itemsize
    what = f"probe {kind}"
    segments = share(node, backend, what, lambda: backend.allocate(kind, nbytes), lambda: kind)
    try:
        own: Any = None

        def prepare() -> int:
            nonlocal own
            own = backend.view(segments.own, (node.size + 2,), word)
            token = secrets.randbits(62)
            own[:-1] = token
            backend.synchronize()
            return token

        def write() -> None:
            for index in range(node.size):
                inboxes = backend.view(segments[index], (node.size + 2,), word)
                inboxes[1 + node.rank : 2 + node.rank] = tokens[node.rank] ^ index
            backend.synchronize()

        def read() -> None:
            stream = backend.stream(None)
            for index, expected in enumerate(tokens):
                if int(own[1 + index]) != expected ^ node.rank:
                    raise HandleError(f"a word of rank {node.ranks[index]} did not arrive in this rank's memory")
                landing = segments.own.pointer + (node.size + 1) * word.itemsize
                backend.copy(landing, segments[index].pointer, word.itemsize, stream)
                backend.synchronize(stream)
                if int(own[-1]) != expected:
                    raise HandleError(f"rank {node.ranks[index]}'s memory reads {int(own[-1])} instead of {expected}")

        tokens = node.allgather(f"{what}: prepare", prepare)
        node.agree(f"{what}: write", write)
        node.agree(f"{what}: read back", read)
    finally:
        with contextlib.suppress(MpicommError):
            segments.close(f"{what}: close")


# It keeps the messages of a node apart from the messages of the whole communicator.
_NODE_TAG = 1


def choose_handles(group: Group, placement: Placement, backend: Backend) -> Placement:
    """Return the placement with the best kind of handle that works between the ranks of each node. Collective.

    If no kind works on a node, every rank raises the same `HandleError`.
    """
    node, request = node_of(group, placement), placement.here.handle
    chosen = group.allgather("Communicator: choose handle", partial(_choose_kind, node, backend, request))
    if node.rank == 0:
        kind, rejected = chosen[group.rank]
        reasons = "".join(f"; not {other}: {why}" for other, why in rejected.items())
        log = logger.warning if kind == "staged" else logger.info
        log("device %s, memory handles %s%s", backend.device, kind, reasons)
    places = [
        replace(place, handle=kind, rejected=rejected)
        for place, (kind, rejected) in zip(placement.places, chosen, strict=True)
    ]
    return Placement(places, placement.rank)


def node_of(group: Group, placement: Placement) -> Group:
    """Return the group of this rank's node; on one node ``group``, so that all ranks meet in one exchange. Local."""
    if len(placement.node_ranks) == group.size:
        return group
    return group.subgroup(placement.node_ranks, tag=_NODE_TAG)
