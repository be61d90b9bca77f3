"""SymmetricArray: the content of every rank's part, as the rank itself and its peers see it."""

from __future__ import annotations

import copy
import ctypes
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import communicator, require_memory_works, settle, to_host

DTYPES = [np.dtype(name) for name in "?bBhHiIqQefdFD"]
OF_THE_HOST = [np.dtype([("x", "<f4"), ("n", "<i8")]), np.dtype(">i4"), np.dtype("S3"), np.dtype("m8[s]")]
SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 3), (2, 3, 4), (1 << 16,)]


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The content that ``rank`` writes: exact in every dtype, and different from its neighbours' content."""
    return ((np.arange(math.prod(shape)) + rank) % 97).astype(dtype).reshape(shape)


def require_works(comm: mpicomm.Communicator, xp: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
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


def test_every_shape_and_every_dtype(comm: mpicomm.Communicator, xp: Any) -> None:
    for shape in SHAPES:
        require_works(comm, xp, np.dtype("f4"), shape)
    for dtype in [*DTYPES, *(OF_THE_HOST if xp is np else [])]:
        require_works(comm, xp, dtype, (5, 3))


def test_bfloat16(comm: mpicomm.Communicator, xp: Any) -> None:
    require_works(comm, xp, dtype_or_skip("bfloat16", xp), (1 << 16,))


def test_size_may_be_an_integer(comm: mpicomm.Communicator) -> None:
    with comm.zeros(3) as array, comm.empty(np.int8(4), "i2") as other:
        assert (array.shape, array.dtype) == ((3,), np.dtype(float))
        assert (other.shape, other.dtype) == ((4,), np.dtype("i2"))


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


def test_put_takes_any_integer_as_offset_up_to_the_end(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.zeros(4, np.int64) as array, comm.zeros((0, 2)) as nothing:
        for number, integer in enumerate((int, np.int64, np.uint8, np.int8, bool)):
            array.put(xp.asarray([7 + number]), comm.rank, offset=integer(1))
            comm.check()
            assert to_host(array.local).tolist() == [0, 7 + number, 0, 0]
        array.put(xp.empty(0, np.int64), comm.rank, offset=4)
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


def refused_sources(xp: Any) -> list[tuple[Any, Any, str]]:
    """Arrays that `put` refuses, with an offset."""
    good = xp.zeros(4, np.float32)
    if xp is np:
        cupy = type("Array", (), {"__cuda_array_interface__": {}})
        elsewhere: Any = (cupy(), 0, "on a GPU, but this communicator is on the cpu")
    else:
        elsewhere = (np.zeros(4), 0, "not on a GPU, but this communicator is on GPU")
    return [
        elsewhere,
        (xp.zeros(4, np.float64), 0, "src has dtype float64, the array float32"),
        (xp.zeros((4, 2), np.float32)[:, 0], 0, r"src of shape \(4,\) with strides \(8,\) is not C-contiguous"),
        (xp.zeros(5, np.float32), 0, "src has 5 elements and offset=0"),
        (good, 1, "src has 4 elements and offset=1"),
        (good[:1], 4, "offset=4"),
        (good[:1], -1, "offset=-1"),
        ([1.0], 0, "src is a list"),
        (None, 0, "src is a NoneType"),
        (good, (1, 0), r"offset=\(1, 0\) is no int: use the index of an element"),
    ]


def refused_outputs(xp: Any) -> list[tuple[Any, str]]:
    """Arrays that `get` refuses."""
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    return [
        *([(read_only, "out is read-only")] if xp is np else []),
        (xp.zeros(4, np.int32), "out has dtype int32, the array float32"),
        (xp.zeros((2, 4), np.float32)[:, :2], "out .* is not C-contiguous"),
        (xp.zeros(3, np.float32), "out has 3 elements, the array 4"),
        (xp.zeros(5, np.float32), "out has 5 elements, the array 4"),
        ([1.0], "out is a list"),
        (2, "out is a int"),
    ]


def test_what_does_not_fit_is_refused(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.zeros(4, np.float32) as array:
        for source, offset, text in refused_sources(xp):
            with pytest.raises(InvalidUsageError, match=text):
                array.put(source, comm.rank, offset=offset)
        for out, text in refused_outputs(xp):
            with pytest.raises(InvalidUsageError, match=text):
                array.get(comm.rank, out)
        event = comm.shared_event()
        with_streams = [*uses(array)[1:], event.wait, lambda peer, stream: event.record(stream)]
        for use in with_streams if xp is np else []:
            with pytest.raises(InvalidUsageError, match="has no streams"):
                use(comm.rank, stream=0)
        event.close()
        settle(comm)
        assert to_host(array.local).tolist() == [0] * 4


def uses(array: mpicomm.SymmetricArray) -> list[Callable[..., object]]:
    """Return the methods that take a rank."""
    return [array.peer, array.get, array.signal, array.wait_signal, partial(array.put, array.local)]


def test_what_is_no_rank_is_refused(comm: mpicomm.Communicator) -> None:
    with comm.zeros(4) as array:
        for use in uses(array):
            for peer in (comm.size, -1, None, "0", 0.0):
                with pytest.raises(InvalidUsageError, match=f"peer={peer!r} is no rank.*use 0 to {comm.size - 1}"):
                    use(peer)
            with pytest.raises(InvalidUsageError, match=r"is no rank.*; MPI\.PROC_NULL: leave the call out"):
                use(MPI.PROC_NULL)


NDARRAY_USES: list[Callable[[Any], object]] = [
    np.asarray,
    np.sum,
    lambda array: np.zeros(4) + array,
    lambda array: array[0],
    lambda array: array.__setitem__(0, 1),
    len,
    list,
    lambda array: array + 1,
    lambda array: array % 2,
    lambda array: array == 1,
    lambda array: array != np.ones(3),
    lambda array: array < 1,
    lambda array: -array,
    lambda array: 2 * array,
]


def test_use_as_an_ndarray_is_refused(comm: mpicomm.Communicator) -> None:
    with comm.zeros(4) as array:
        for use in NDARRAY_USES:
            with pytest.raises(InvalidUsageError, match=r"a SymmetricArray is no ndarray: use a\.local"):
                use(array)
        assert array
        assert {array: 1}[array] == [array].index(array) + 1


def test_pickling_is_refused(host_comm: mpicomm.Communicator) -> None:
    with host_comm.zeros(4) as array:
        for use in (host_comm.allreduce, host_comm.allgather, copy.deepcopy):
            with pytest.raises(InvalidUsageError, match=r"cannot be pickled: .* Allreduce instead of allreduce"):
                use(array)
    event = host_comm.shared_event()
    with pytest.raises(InvalidUsageError, match=r"a SharedEvent cannot be pickled: .*comm\.shared_event\(\)"):
        host_comm.allgather(event)
    event.close()


@pytest.mark.parametrize("freed", [False, True])
def test_closed_array_is_refused(device: str, freed: bool) -> None:
    with communicator(device) as comm:
        array = comm.zeros(4)
        methods = uses(array)
        (comm.Free if freed else array.close)()
        assert array.closed
        assert repr(array) == "<SymmetricArray shape=(4,) dtype=float64 closed>"
        array.close()
        calls: list[Callable[[], object]] = [lambda: array.local, lambda: array.pointers]
        calls += [partial(method, 0) for method in methods]
        for use in calls:
            with pytest.raises(InvalidUsageError, match="this SymmetricArray is closed; create another"):
                use()


BAD_SHAPES: list[tuple[Any, Any, str]] = [
    (-1, float, r"shape=\(-1,\) has a negative size"),
    ((2, -3), float, "has a negative size"),
    ("many", float, "shape='many' is no shape"),
    (None, float, "shape=None is no shape"),
    (2.0, float, "shape=2.0 is no shape"),
    (3, object, "dtype=object holds no plain bytes"),
    (3, "S", "holds no plain bytes of a fixed size"),
    (3, "no such type", "dtype='no such type' is no NumPy dtype"),
    (4, 4, r"dtype=4 is no NumPy dtype: .*; a shape is a tuple: \(4, 4\)"),
    ((2, 3), 4, r"a shape is a tuple: \(2, 3, 4\)"),
    (3, [("a", "f4"), ("a", "f4")], "is no NumPy dtype"),
    (3, (np.float32, (2, 2)), "dtype=.* is itself an array"),
    ((2**40, 2**40), float, "more than an address can count"),
]


def test_bad_shapes_are_refused_by_all(comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    for number, (shape, dtype, text) in enumerate(BAD_SHAPES):
        with raises_everywhere(comm_world, InvalidUsageError, match=text):
            comm.empty(shape, dtype)
        culprit = number % comm.size
        with raises_everywhere(comm_world, InvalidUsageError, match=f"^rank {culprit}: .*{text}"):
            comm.zeros(*((shape, dtype) if comm.rank == culprit else (3,)))
    require_memory_works(comm)


def test_more_memory_than_there_is_is_refused_by_all(comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    with raises_everywhere(comm_world, mpicomm.HandleError, match="make the array smaller"):
        comm.empty(2**55, np.uint8)
    require_memory_works(comm)


@pytest.mark.mpi(min_size=2)
def test_shapes_that_differ_are_refused_by_all(host_comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    cases: list[tuple[tuple[Any, Any], tuple[Any, Any]]] = [
        ((3, "f8"), (4, "f8")),
        ((6, "f8"), ((2, 3), "f8")),
        ((3, "f8"), (3, "i8")),
        ((3, ">i4"), (3, "<i4")),
        ((3, [("a", "f8")]), (3, [("b", "i8")])),
    ]
    for culprit in range(host_comm.size):
        for others, of_one in cases:
            with raises_everywhere(comm_world, InvalidUsageError, match="differs between ranks: .* on rank 1"):
                host_comm.empty(*(of_one if host_comm.rank == culprit else others))
    require_memory_works(host_comm)
