"""MPI.BOTTOM: buffers whose addresses are in the datatype. MPI would crash at an address of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from mpicomm.devices import where
from mpicomm.errors import InvalidUsageError


def require_host_addresses(spec: Any, name: str) -> None:
    """Raise `InvalidUsageError` if the argument ``name`` is MPI.BOTTOM with addresses of device memory. Local."""
    if not isinstance(spec, (list, tuple)) or not spec or spec[0] is not MPI.BOTTOM or not where.has_driver():
        return
    for item in spec[1:]:
        for datatype in item if isinstance(item, (list, tuple)) else (item,):
            if not isinstance(datatype, MPI.Datatype) or datatype == MPI.DATATYPE_NULL:
                continue
            for address in _addresses(datatype):
                device = where.lies_on_device(address)
                if device is not None:
                    raise InvalidUsageError(
                        f"{name}: MPI.BOTTOM with a datatype that holds address {address:#x}, which lies on GPU "
                        f"{device}: MPI cannot access it: pass the array itself, and displacements in the datatype"
                    )


def _addresses(datatype: MPI.Datatype) -> Iterator[int]:
    """Yield where the memory of a datatype begins, and for a type made of several parts where each part begins."""
    yield datatype.Get_true_extent()[0]
    if datatype.combiner in (MPI.COMBINER_STRUCT, MPI.COMBINER_HINDEXED, MPI.COMBINER_HINDEXED_BLOCK):
        _, _, parameters = datatype.decode()
        yield from parameters["displacements"]
