"""SymmetricArray: the content of every rank's part, as the rank itself and its peers see it."""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.rigs.communicators import communicator, require_memory_works, settle, to_host

DTYPES = [np.dtype(name) for name in "?bBhHiIqQefdFD"]

SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 3), (2, 3, 4), (1 << 16,)]


def bfloat16() -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return dtype


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The content that ``rank`` writes: exact in every dtype, and different from its neighbours' content."""
    return ((np.arange(math.prod(shape)) + rank) % 97).astype(dtype).reshape(shape)


def require_dtype_works(comm: mpicomm.Communicator, xp: Any, dtype: np.dtype[Any]) -> None:
    for shape in SHAPES:
        with comm.empty(shape, dtype) as filled, comm.zeros(shape, dtype) as zeros:
            assert (filled.shape, filled.dtype) == (shape, dtype)
            assert (filled.size, filled.nbytes) == (math.prod(shape), math.prod(shape) * dtype.itemsize)
            assert to_host(zeros.local).tobytes() == bytes(zeros.nbytes)
            filled.local[...] = xp.asarray(values(comm.rank, shape, dtype))
            settle(comm)
            for peer in range(comm.size):
                view = filled.peer(peer)
                assert (type(view), view.shape, view.dtype) == (xp.ndarray, shape, dtype)
                assert to_host(view).tobytes() == values(peer, shape, dtype).tobytes()
                assert to_host(filled.get(peer)).tobytes() == values(peer, shape, dtype).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=[dtype.name for dtype in DTYPES])
def test_dtype_and_every_shape(comm: mpicomm.Communicator, xp: Any, dtype: np.dtype[Any]) -> None:
    require_dtype_works(comm, xp, dtype)


def test_bfloat16_and_every_shape(comm: mpicomm.Communicator, xp: Any) -> None:
    dtype = bfloat16()
    if xp is not np:
        try:
            xp.empty(1, dtype)
        except (TypeError, ValueError):
            pytest.skip("this CuPy has no bfloat16")
    require_dtype_works(comm, xp, dtype)


@pytest.mark.parametrize("dtype", [[("x", "<f4"), ("n", "<i8")], ">i4", "S3", "m8[s]"], ids=str)
def test_any_dtype_of_plain_bytes_works_on_the_host(host_comm: mpicomm.Communicator, dtype: Any) -> None:
    with host_comm.zeros(2, dtype) as array:
        contents = [np.full(2, rank + 1).astype(np.dtype(dtype)) for rank in range(host_comm.size)]
        assert array.local.tobytes() == bytes(array.nbytes)
        array.local[:] = contents[host_comm.rank]
        host_comm.Barrier()
        for peer, content in enumerate(contents):
            assert array.peer(peer).tolist() == content.tolist()
            assert array.get(peer).tolist() == content.tolist()
        host_comm.Barrier()


def test_size_may_be_an_integer(comm: mpicomm.Communicator) -> None:
    with comm.zeros(3) as array, comm.empty(np.int8(4), "i2") as other:
        assert (array.shape, array.dtype) == ((3,), np.dtype(float))
        assert (other.shape, other.dtype) == ((4,), np.dtype("i2"))


def test_ranks_write_into_the_memory_of_their_peers(comm: mpicomm.Communicator, xp: Any) -> None:
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    with comm.zeros((4, 2), np.int32) as array:
        array.peer(right)[1] = xp.asarray([rank, rank + 10])
        array.put(xp.asarray([[rank + 20], [rank + 30]], np.int32), right, offset=4)
        settle(comm)
        assert to_host(array.local).tolist() == [[0, 0], [left, left + 10], [left + 20, left + 30], [0, 0]]
        assert to_host(array.get(right)).tolist() == [[0, 0], [rank, rank + 10], [rank + 20, rank + 30], [0, 0]]
        settle(comm)


def test_pointers_are_the_parts_as_mapped_here(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.empty((2, 3), np.int64) as array:
        array.local[...] = comm.rank
        settle(comm)
        assert (array.pointers.dtype, array.pointers.shape) == (np.dtype(np.uint64), (comm.size,))
        assert isinstance(array.pointers, xp.ndarray)
        pointers = to_host(array.pointers).tolist()
        for peer, pointer in enumerate(pointers):
            if xp is np:
                content = np.frombuffer(ctypes.string_at(pointer, array.nbytes), np.int64)
            else:
                memory = xp.cuda.UnownedMemory(pointer, array.nbytes, array)
                content = to_host(xp.ndarray(6, np.int64, xp.cuda.MemoryPointer(memory, 0)))
            assert content.tolist() == [peer] * 6
        settle(comm)


@pytest.mark.parametrize("integer", [int, np.int64, np.uint8, np.int8, bool])
def test_put_takes_any_integer_as_offset(comm: mpicomm.Communicator, xp: Any, integer: type) -> None:
    with comm.zeros(4, np.int64) as array:
        array.put(xp.asarray([7]), comm.rank, offset=integer(1))
        comm.check()
        assert to_host(array.local).tolist() == [0, 7, 0, 0]


def test_put_of_nothing_is_allowed_up_to_the_end(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.zeros(3) as array, comm.zeros((0, 2)) as nothing:
        array.put(xp.empty(0), comm.rank, offset=3)
        nothing.put(xp.empty(0), comm.rank)
        assert nothing.get(comm.rank).shape == (0, 2)


def test_get_fills_out_and_returns_it(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.empty((2, 2), np.float32) as array:
        array.local[...] = comm.rank
        settle(comm)
        for out in (xp.empty((2, 2), np.float32), xp.empty(4, np.float32), xp.empty(6, np.float32)[1:5]):
            for peer in range(comm.size):
                assert array.get(peer, out) is out
                comm.check()
                assert to_host(out).tolist() == np.full(out.shape, peer).tolist()
        settle(comm)


def test_view_outlives_its_array_on_the_host(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu") as comm, comm.zeros(4) as array:
        array.local[:] = comm.rank
        comm.Barrier()
        views = [array.peer(peer) for peer in range(comm.size)]
    assert [view.tolist() for view in views] == [[rank] * 4 for rank in range(comm_world.size)]


def test_array_lives_without_a_reference(comm: mpicomm.Communicator) -> None:
    local = comm.zeros(1, np.int64).local
    local[0] = 3
    require_memory_works(comm)
    assert int(local[0]) == 3


@pytest.mark.mpi(min_size=2)
def test_zeros_are_zero_before_a_peer_can_write(
    comm: mpicomm.Communicator, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = comm._session.set_up("test").backend
    zero = backend.zero

    def late_zero(pointer: int, nbytes: int) -> None:
        time.sleep(0.3)
        zero(pointer, nbytes)

    comm.zeros(1)
    for late in range(comm.size):
        with monkeypatch.context() as patch:
            if comm.rank == late:
                patch.setattr(backend, "zero", late_zero)
            array = comm.zeros(comm.size, np.int64)
        for peer in range(comm.size):
            array.put(xp.asarray([7 + comm.rank]), peer, offset=comm.rank)
            array.signal(peer)
        for peer in range(comm.size):
            array.wait_signal(peer)
        comm.check()
        assert to_host(array.local).tolist() == [7 + rank for rank in range(comm.size)]
        array.close()


def test_arrays_of_many_sizes_live_side_by_side(comm: mpicomm.Communicator, xp: Any) -> None:
    arrays = [comm.empty(17 * number, np.int64) for number in range(12)]
    for number, array in enumerate(arrays):
        array.local[...] = 100 * number + comm.rank
    settle(comm)
    for peer in range(comm.size):
        for number, array in enumerate(arrays):
            assert to_host(array.peer(peer)).tolist() == [100 * number + peer] * (17 * number)
    settle(comm)
    for array in arrays[::3]:
        array.close()
    for number, array in enumerate(arrays):
        if not array.closed:
            assert to_host(array.get((comm.rank + 1) % comm.size)).size == 17 * number
