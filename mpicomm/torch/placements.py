"""The splits of DTensors, for `mpicomm.Communicator.redistribution`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch.distributed as dist

from mpicomm.api.splits import integers
from mpicomm.errors import InvalidUsageError


def split_of(shape: int | Sequence[int], mesh: Any, placements: Any) -> list[Any]:
    """Return the box of each rank of a DTensor of this ``shape`` on a DeviceMesh, as a split. Local.

    A box is a pair (start, stop) for each axis. Ranks outside of the mesh have None. ``placements`` has a ``Shard`` or
    ``Replicate`` for each dimension of the mesh; a mesh of one dimension also takes it alone. The boxes are for a
    Communicator of all ranks, such as ``mpicomm.torch.communicator()``.

    Raises `InvalidUsageError` for other placements, and for axes that the shape does not have.

        rows = mpicomm.torch.split_of(t.shape, t.device_mesh, t.placements)
        y = comm.redistribute(t.to_local(), from_=rows, to=1, shape=t.shape)
    """
    from torch.distributed.tensor import Replicate, Shard  # a program that passes them has imported this

    lengths = integers("shape", shape)
    placed = list(placements) if isinstance(placements, Sequence) else [placements]
    if len(placed) != mesh.ndim:
        raise InvalidUsageError(f"placements={placed} for a mesh of {mesh.ndim} dimensions: pass one for each")
    for placement in placed:
        if type(placement) not in (Replicate, Shard):
            raise InvalidUsageError(
                f"placements={placed}: {placement} has no boxes: redistribute the DTensor to Shard or Replicate first"
            )
        if isinstance(placement, Shard) and not -len(lengths) <= placement.dim < len(lengths):
            raise InvalidUsageError(f"placements={placed}: an array of shape {lengths} has no axis {placement.dim}")
    whole = [(0, length) for length in lengths]
    boxes: list[Any] = [None] * dist.get_world_size()
    for coordinates in product(*map(range, mesh.shape)):
        box = list(whole)
        for place, parts, placement in zip(coordinates, mesh.shape, placed, strict=True):
            if isinstance(placement, Shard):
                start, stop = box[placement.dim]
                length = -(-(stop - start) // parts)  # PyTorch rounds up, so the last ranks may have nothing
                first = min(start + place * length, stop)
                box[placement.dim] = first, min(first + length, stop)
        boxes[int(mesh.mesh[coordinates])] = tuple(box)
    return boxes
