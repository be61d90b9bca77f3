"""MPI.BOTTOM: the other arguments hold addresses. MPI would crash at an address of device memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

from mpi4py import MPI

from mpicomm.devices import memory_location
from mpicomm.errors import InvalidUsageError


def device_addressed(spec: Any) -> int | None:
    """Return the ordinal of the GPU if ``spec`` names MPI.BOTTOM and an address in the memory of that GPU. Local.

    Return None if all addresses are on the host, and for every other argument.
    """
    found = _first_on_device(spec)
    return None if found is None else found[1]


def require_host_addresses(spec: Any, name: str) -> None:
    """Raise `InvalidUsageError` if the argument ``name`` is MPI.BOTTOM with addresses of device memory. Local."""
    found = _first_on_device(spec)
    if found is not None:
        address, device = found
        raise InvalidUsageError(
            f"{name}: MPI.BOTTOM with address {address:#x}, which lies on GPU {device}: only MPI can carry this call "
            "out, and it cannot access the address: pass the array itself, and displacements from its start"
        )


def require_device_addresses(address: int, nbytes: int, device: int, name: str) -> None:
    """Raise `InvalidUsageError` unless the ``nbytes`` bytes at ``address`` are memory of that GPU. Local."""
    place = memory_location.place_of(address)
    if place is None or place.managed or place.device != device:
        lies = "in host memory" if place is None or place.managed else f"on GPU {place.device}"
        raise InvalidUsageError(
            f"{name}: MPI.BOTTOM with address {address:#x}, which lies {lies}, and another address on GPU {device}: "
            "let all addresses lie in memory of one kind"
        )
    if nbytes > place.nbytes:
        raise InvalidUsageError(
            f"{name}: MPI.BOTTOM: {nbytes} bytes at address {address:#x} on GPU {device} go beyond their allocation, "
            f"which ends {place.nbytes} bytes after the address: pass other counts or datatypes"
        )


def lies_together(address: int, nbytes: int) -> bool:
    """Return whether the ``nbytes`` bytes at ``address`` lie in one allocation of a GPU. Local."""
    place = memory_location.place_of(address)
    return place is not None and nbytes <= place.nbytes


def _first_on_device(spec: Any) -> tuple[int, int] | None:
    if not isinstance(spec, (list, tuple)) or not spec or spec[0] is not MPI.BOTTOM or not memory_location.has_driver():
        return None
    for address in _addresses(list(_flat(spec[1:]))):
        device = memory_location.lies_on_device(address)
        if device is not None:
            return address, device
    return None


def _addresses(items: list[Any]) -> Iterator[int]:
    """Yield each address that the datatypes and displacements may name. Counts are too small to be addresses."""
    datatypes = [each for each in items if isinstance(each, MPI.Datatype) and each != MPI.DATATYPE_NULL]
    numbers = {0, *(int(each) for each in items if isinstance(each, Integral))}
    for datatype in datatypes:
        # Alltoallw has displacements in bytes, the other calls in extents of the datatype.
        for unit in {1, datatype.extent}:
            for start in _starts(datatype):
                yield from (number * unit + start for number in numbers)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, str):
            yield MPI.Datatype.fromcode(item)
        elif isinstance(item, Iterable):
            yield from _flat(item)
        else:
            yield item


def _starts(datatype: MPI.Datatype) -> Iterator[int]:
    """Yield where the memory of a datatype begins. For a type of several parts, yield where each part begins."""
    yield datatype.Get_true_extent()[0]
    if datatype.combiner in (MPI.COMBINER_STRUCT, MPI.COMBINER_HINDEXED, MPI.COMBINER_HINDEXED_BLOCK):
        _, _, parameters = datatype.decode()
        yield from parameters["displacements"]
