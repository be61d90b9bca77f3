"""Which calls are MPI's without a closer look: none that must not be, and the same ones in whatever form they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.call import Arguments
from mpicomm.collectives.host.fast_path import is_plain, is_plainly_mpis, limits
from mpicomm.collectives.host.selection import use_mapped
from mpicomm.collectives.operations import ALLREDUCE, OPERATIONS, Operation

SIZES = (2, 3, 8)


class OnDevice:
    """A device array, as far as anything may look at it."""

    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f8", "data": (1 << 40, False), "version": 3}
    dtype = np.dtype(np.float64)
    size = nbytes = 8
    base = None


LIMIT = 1000


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_below_the_limit_is_never_for_mapped_memory(operation: Operation, size: int) -> None:
    assert not use_mapped(operation, limits(1, on_gpus=False)[operation.name] - 1, size, 1, 0)


@pytest.mark.parametrize(
    "buffer",
    [
        OnDevice(),
        None,
        MPI.IN_PLACE,
        [np.zeros(1), MPI.DOUBLE],
        np.zeros(1, np.float16),
        np.zeros(1, ">f8"),
        np.zeros(1, "f4,f4"),
        np.ma.zeros(1),
        np.zeros(LIMIT // 8),
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_buffers_that_need_a_closer_look(buffer: Any) -> None:
    assert not is_plain(None, buffer, LIMIT)
    assert not is_plain(np.zeros(1), buffer, LIMIT)


def test_the_other_buffer_counts_too() -> None:
    both = np.zeros(4)
    assert is_plain(None, both, LIMIT) and is_plain(MPI.IN_PLACE, both, LIMIT)
    assert is_plain(both[:2], both[2:], LIMIT)
    for other in (OnDevice(), [both, MPI.DOUBLE], both, both[:], both[1:3]):
        assert not is_plain(other, both[:2], LIMIT)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=str)
@pytest.mark.parametrize("nbytes", [8, 1 << 10, 1 << 17, 1 << 20, 1 << 25])
@pytest.mark.parametrize("size", SIZES)
def test_an_array_with_its_own_type_is_that_array(operation: Operation, nbytes: int, size: int) -> None:
    send, receive = np.empty(nbytes // 8), np.empty(nbytes // 8)

    def decided(send: Any, receive: Any) -> bool:
        arguments = Arguments(send=send, receive=receive, op=MPI.SUM, counts=[1] * size)
        return is_plainly_mpis(operation, arguments, size, 1, 0)

    plain = decided(send, receive)
    assert decided([send, MPI.DOUBLE], (receive, MPI.DOUBLE)) == decided(send, [receive, MPI.DOUBLE]) == plain
    assert plain or not is_plain(send, receive, limits(1, on_gpus=False)[operation.name] // size)
    for other in (MPI.FLOAT, MPI.BYTE, MPI.DOUBLE_INT, "d", 1, None):
        assert not decided(send, [receive, other])
    assert not decided([OnDevice(), MPI.DOUBLE], receive) and not decided(send, [OnDevice(), MPI.DOUBLE])
    assert not decided([send, MPI.DOUBLE], [send, MPI.DOUBLE])


def test_mpi_has_no_average() -> None:
    arguments = Arguments(send=np.zeros(1), receive=np.zeros(1), op=mpicomm.AVG)
    assert not is_plainly_mpis(ALLREDUCE, arguments, 2, 1, 0)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=str)
def test_between_nodes_mpi_carries_what_it_has_at_any_size(operation: Operation) -> None:
    assert not operation.in_mpi or not use_mapped(operation, 1 << 40, 4, 2, 0)
    assert limits(2, on_gpus=False)[operation.name] > 1 << 40 or not operation.in_mpi


def test_large_arrays_of_several_nodes_are_plainly_mpis() -> None:
    array, result = np.zeros(1 << 20), np.zeros(1 << 20)
    arguments = Arguments(send=array, receive=result, op=MPI.SUM)
    assert is_plainly_mpis(ALLREDUCE, arguments, 2, 2, 0)
    assert not is_plainly_mpis(ALLREDUCE, arguments, 2, 1, 0)
