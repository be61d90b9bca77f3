from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, signals
from tests.helpers.communicators import array_module, communicator, require_memory_works, to_host
from tests.helpers.raising import raises_everywhere

DTYPES = [np.dtype(name) for name in "?bBhHiIqQefdFD"]
SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 3), (2, 3, 4), (1 << 16,)]


def bfloat16() -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return dtype


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """What ``rank`` writes: of every dtype exactly, and different from what its neighbours write."""
    return ((np.arange(math.prod(shape)) + rank) % 97).astype(dtype).reshape(shape)


def settle(comm: mpicomm.Communicator) -> None:
    """Let every rank come to the end of its work. Collective."""
    comm.check()
    comm.Barrier()


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
def test_any_dtype_of_plain_bytes_works_on_the_host(comm_world: MPI.Intracomm, dtype: Any) -> None:
    with communicator("cpu") as comm, comm.zeros(2, dtype) as array:
        contents = [np.full(2, rank + 1).astype(np.dtype(dtype)) for rank in range(comm.size)]
        assert array.local.tobytes() == bytes(array.nbytes)
        array.local[:] = contents[comm.rank]
        comm.Barrier()
        for peer, content in enumerate(contents):
            assert array.peer(peer).tolist() == content.tolist()
            assert array.get(peer).tolist() == content.tolist()
        comm.Barrier()


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


def test_own_part_is_one_memory(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.zeros(3, np.int64) as array:
        assert array.peer(comm.rank) is array.local
        array.put(xp.asarray([5]), comm.rank, offset=1)
        comm.check()
        assert to_host(array.local).tolist() == [0, 5, 0]
        assert to_host(array.get(comm.rank)).tolist() == [0, 5, 0]


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


def test_what_does_not_fit_is_refused(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.zeros(4, np.float32) as array:
        good = xp.zeros(4, np.float32)
        for source, offset, text in [
            (xp.zeros(4, np.float64), 0, "src has dtype float64, the array float32"),
            (xp.zeros((4, 2), np.float32)[:, 0], 0, r"src of shape \(4,\) with strides \(8,\) is not C-contiguous"),
            (xp.zeros(5, np.float32), 0, "src has 5 elements and offset=0"),
            (good, 1, "src has 4 elements and offset=1"),
            (good[:1], 4, "offset=4"),
            (good[:1], -1, "offset=-1"),
            ([1.0], 0, "array is a list"),
            (None, 0, "array is a NoneType"),
        ]:
            with pytest.raises(InvalidUsageError, match=text):
                array.put(source, comm.rank, offset=offset)
        for out, text in [
            (xp.zeros(4, np.int32), "out has dtype int32, the array float32"),
            (xp.zeros((2, 4), np.float32)[:, :2], "out .* is not C-contiguous"),
            (xp.zeros(3, np.float32), "out has 3 elements, the array 4"),
            (xp.zeros(5, np.float32), "out has 5 elements, the array 4"),
            ([1.0], "array is a list"),
        ]:
            with pytest.raises(InvalidUsageError, match=text):
                array.get(comm.rank, out)
        settle(comm)
        assert to_host(array.local).tolist() == [0] * 4


def test_read_only_out_is_refused(comm_world: MPI.Intracomm) -> None:
    out = np.zeros(4)
    out.flags.writeable = False
    with communicator("cpu") as comm, comm.zeros(4) as array:
        with pytest.raises(InvalidUsageError, match="out is read-only"):
            array.get(comm.rank, out)
        comm.Barrier()


def test_array_of_the_other_device_is_refused(comm: mpicomm.Communicator, xp: Any) -> None:
    if xp is np:
        cupy = type("Array", (), {"__cuda_array_interface__": {}})
        source, text = cupy(), "on a GPU, but this communicator is on the cpu"
    else:
        source, text = np.zeros(4), "not on a GPU, but this communicator is on GPU"
    with comm.zeros(4) as array, pytest.raises(InvalidUsageError, match=text):
        array.put(source, comm.rank)


def test_stream_is_refused_on_the_host(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu") as comm, comm.zeros(4) as array:
        for use in (array.signal, array.wait_signal, array.get, partial(array.put, array.local)):
            with pytest.raises(InvalidUsageError, match="has no streams"):
                use(comm.rank, stream=0)


USES: dict[str, Callable[[mpicomm.SymmetricArray, Any], object]] = {
    "peer": lambda array, peer: array.peer(peer),
    "put": lambda array, peer: array.put(array.local, peer),
    "get": lambda array, peer: array.get(peer),
    "signal": lambda array, peer: array.signal(peer),
    "wait_signal": lambda array, peer: array.wait_signal(peer),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_is_no_rank_is_refused(
    comm: mpicomm.Communicator, use: Callable[[mpicomm.SymmetricArray, Any], object]
) -> None:
    with comm.zeros(4) as array:
        for peer in (comm.size, -1, None, "0", 0.0):
            with pytest.raises(InvalidUsageError, match=f"peer={peer!r} is no rank.*use 0 to {comm.size - 1}"):
                use(array, peer)


def test_closed_array_is_refused(comm: mpicomm.Communicator) -> None:
    array = comm.zeros(4)
    kept = array.local
    array.close()
    assert array.closed
    assert repr(array) == "<SymmetricArray shape=(4,) dtype=float64 closed>"
    array.close()
    uses: list[Callable[[], object]] = [lambda: array.local, lambda: array.pointers, lambda: array.put(kept, 0)]
    uses += [partial(method, 0) for method in (array.peer, array.get, array.signal, array.wait_signal)]
    for use in uses:
        with pytest.raises(InvalidUsageError, match="this SymmetricArray is closed; create another"):
            use()


def test_array_of_a_freed_communicator_is_closed(device: str) -> None:
    comm = communicator(device)
    array = comm.zeros(4)
    comm.Free()
    assert array.closed
    with pytest.raises(InvalidUsageError, match="this SymmetricArray is closed; create another"):
        array.peer(0)
    array.close()


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


BAD_SHAPES: list[tuple[Any, Any, str]] = [
    (-1, float, r"shape=\(-1,\) has a negative size"),
    ((2, -3), float, "has a negative size"),
    ("many", float, "shape='many' is no shape"),
    (None, float, "shape=None is no shape"),
    (2.0, float, "shape=2.0 is no shape"),
    (3, object, "dtype=object holds no plain bytes"),
    (3, "S", "holds no plain bytes of a fixed size"),
    (3, "no such type", "dtype='no such type' is no NumPy dtype"),
    (3, [("a", "f4"), ("a", "f4")], "is no NumPy dtype"),
    (3, (np.float32, (2, 2)), "dtype=.* is itself an array"),
    ((2**40, 2**40), float, "more than an address can count"),
]


@pytest.mark.parametrize(("shape", "dtype", "text"), BAD_SHAPES)
def test_bad_shape_is_refused_by_all(
    comm: mpicomm.Communicator, comm_world: MPI.Intracomm, shape: Any, dtype: Any, text: str
) -> None:
    with raises_everywhere(comm_world, InvalidUsageError, match=text):
        comm.empty(shape, dtype)
    for culprit in range(comm.size):
        with raises_everywhere(comm_world, InvalidUsageError, match=f"failed on rank {culprit}: .*{text}"):
            if comm.rank == culprit:
                comm.zeros(shape, dtype)
            else:
                comm.zeros(3)
    require_memory_works(comm)


def test_more_memory_than_there_is_is_refused_by_all(comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    with raises_everywhere(comm_world, mpicomm.HandleError, match="make the array smaller"):
        comm.empty(2**55, np.uint8)
    require_memory_works(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("others", "of_one"),
    [
        ((3, "f8"), (4, "f8")),
        ((6, "f8"), ((2, 3), "f8")),
        ((3, "f8"), (3, "i8")),
        ((3, ">i4"), (3, "<i4")),
        ((3, [("a", "f8")]), (3, [("b", "i8")])),
    ],
)
def test_shapes_that_differ_are_refused_by_all(
    comm_world: MPI.Intracomm, others: tuple[Any, Any], of_one: tuple[Any, Any]
) -> None:
    with communicator("cpu") as comm:
        for culprit in range(comm.size):
            with raises_everywhere(comm_world, InvalidUsageError, match="the ranks differ: .* on rank 1"):
                comm.empty(*(of_one if comm.rank == culprit else others))
        require_memory_works(comm)


# Signals


def test_ring_hands_over_200_times(comm: mpicomm.Communicator, xp: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    rounds, count = 200, 100
    with comm.zeros(count, np.int64) as array:
        seen = xp.zeros((rounds, count), np.int64)
        for turn in range(rounds):
            array.put(xp.full(count, 1000 * turn + comm.rank), right)
            array.signal(right)
            array.wait_signal(left)
            seen[turn] = array.local
            # Read: the left one may write again.
            array.signal(left)
            array.wait_signal(right)
        comm.check()
        expected = np.repeat(1000 * np.arange(rounds) + left, count).reshape(rounds, count)
        assert np.array_equal(to_host(seen), expected)


def test_signals_are_counted(device: str) -> None:
    with communicator(device, timeout_s=2) as comm:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        array, other = comm.zeros(1), comm.zeros(1)
        for _ in range(5):
            array.signal(right)
        comm.check()
        comm.Barrier()
        other.signal(right)
        for _ in range(5):
            array.wait_signal(left)
        comm.check()
        other.wait_signal(left)
        comm.check()
        with pytest.raises(CollectiveTimeoutError, match=f"number 6 from rank {left} did not come") as excinfo:
            array.wait_signal(left)
            comm.check()
        assert excinfo.value.ranks == (left,)
        comm.Barrier()


def test_signal_reaches_the_array_and_the_rank_it_is_for_alone(device: str) -> None:
    with communicator(device, timeout_s=2) as comm:
        array, other = comm.zeros(1), comm.zeros(1)
        for peer in range(comm.size):
            if peer != 0:
                array.signal(peer)
            other.signal(peer)
        settle(comm)
        for peer in range(comm.size):
            other.wait_signal(peer)
            if comm.rank != 0:
                array.wait_signal(peer)
        comm.check()
        with pytest.raises(CollectiveTimeoutError, match=f"from rank {comm.size - 1} did not come within 2 s"):
            array.wait_signal(comm.size - 1)
            comm.check()
        comm.Barrier()


def test_signals_of_a_closed_array_never_reach_the_next(device: str) -> None:
    with communicator(device, timeout_s=2) as comm:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        array = comm.zeros(1)
        for _ in range(3):
            array.signal(right)
        array.wait_signal(left)
        pointers = (to_host(array.pointers), array._pad)
        array.close()
        array = comm.zeros(1)
        assert array._pad == pointers[1]  # the same counters, or the test shows nothing
        array.signal(right)
        array.wait_signal(left)
        comm.check()
        comm.Barrier()
        with pytest.raises(CollectiveTimeoutError, match="wait_signal: number 2"):
            array.wait_signal(left)
            comm.check()
        comm.Barrier()


def test_communicator_is_unusable_after_a_signal_that_did_not_come(device: str) -> None:
    with communicator(device, timeout_s=1) as comm:
        array = comm.zeros(1)
        with pytest.raises(CollectiveTimeoutError, match=f"number 1 from rank {comm.rank} did not come"):
            array.wait_signal(comm.rank)
            comm.check()
        for use in (comm.check, lambda: comm.empty(3), lambda: array.signal(0), lambda: array.local):
            with pytest.raises(CollectiveTimeoutError, match=f"number 1 from rank {comm.rank} did not come"):
                use()
        comm.Barrier()
    assert array.closed
    with communicator(device) as comm:
        require_memory_works(comm)


def test_signals_work_in_every_chunk(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_CHUNK_NBYTES", 2 * signals._LINE_NBYTES)  # two arrays in each
    with communicator(device) as comm, array_module(comm) as xp:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def ring(arrays: list[mpicomm.SymmetricArray]) -> None:
            for number, array in enumerate(arrays):
                array.put(xp.asarray([10 * number + comm.rank]), right)
                array.signal(right)
            for array in reversed(arrays):
                array.wait_signal(left)
            comm.check()
            assert [int(array.local[0]) for array in arrays] == [10 * each + left for each in range(len(arrays))]
            comm.Barrier()

        arrays = [comm.zeros(1, np.int64) for _ in range(7)]
        ring(arrays)
        for number in (5, 0, 3):
            arrays[number].signal(right)  # for nobody
            arrays[number].close()
            arrays[number] = comm.zeros(1, np.int64)
        ring(arrays)


@pytest.mark.mpi(min_size=2)
def test_zeros_are_zero_before_a_peer_can_write(
    comm: mpicomm.Communicator, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = comm._set_up("test").backend
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


def test_zeros_are_zero_in_memory_used_before(comm: mpicomm.Communicator) -> None:
    for _ in range(3):
        with comm.empty(1000, np.uint8) as array:
            array.local[...] = 255
            comm.check()
        with comm.zeros(1000, np.uint8) as array:
            assert not to_host(array.local).any()


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


# Memory that exists already


def require_registered_works(
    comm: mpicomm.Communicator, xp: Any, arrays: list[Any], *, untouched: list[Any] | None = None
) -> None:
    """Open ``arrays`` to the peers, write into them from there, and close."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    registered = [comm.register(array) for array in arrays]
    for number, (array, own) in enumerate(zip(arrays, registered, strict=True)):
        assert (own.shape, own.dtype) == (array.shape, array.dtype)
        array[...] = 10 * number + comm.rank
    settle(comm)
    for number, own in enumerate(registered):
        assert to_host(own.local).tolist() == np.full(own.shape, 10 * number + comm.rank).tolist()
        assert to_host(own.get(right)).tolist() == np.full(own.shape, 10 * number + right).tolist()
    settle(comm)
    for number, own in enumerate(registered):
        own.peer(right)[...] = 50 + number + comm.rank
        own.signal(right)
        own.wait_signal(left)
    settle(comm)
    for own in registered:
        own.close()
    for number, array in enumerate(arrays):
        assert to_host(array).tolist() == np.full(array.shape, 50 + number + left).tolist()


@pytest.fixture
def block() -> Iterator[shared_memory.SharedMemory]:
    resource_tracker.ensure_running()
    memory = shared_memory.SharedMemory(create=True, size=10000)
    yield memory
    gc.collect()
    memory.close()  # raises BufferError while a view is left
    memory.unlink()


@pytest.fixture
def mapped(tmp_path: Path) -> npt.NDArray[np.float64]:
    """Memory that can be registered."""
    return np.memmap(tmp_path / "content", np.float64, "w+", shape=10)


def test_shared_memory_is_registered(
    comm_world: MPI.Intracomm, block: shared_memory.SharedMemory, no_leaks: None
) -> None:
    with communicator("cpu") as comm:
        assert block.buf is not None
        whole = np.frombuffer(block.buf, np.int32, 2500)
        whole[:] = -1
        require_registered_works(comm, np, [whole[:1100], whole[1100:1103].reshape(3, 1), whole[2000:2499]])
        assert (whole[1103:2000] == -1).all()
        assert whole[2499] == -1
        with comm.register(whole[5:5]) as nothing:
            assert nothing.get((comm.rank + 1) % comm.size).tolist() == []
    del whole, nothing


def test_mapped_file_is_registered(comm_world: MPI.Intracomm, tmp_path: Path) -> None:
    with communicator("cpu") as comm:
        content = np.memmap(tmp_path / "content", np.float64, "w+", offset=4096 + 8, shape=(10, 100))
        require_registered_works(comm, np, [content[:3], content[3:5]])


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (np.zeros(3), "array lies in memory of this process alone"),
        ([1.0, 2.0], "array is a list"),
        (np.zeros((3, 2))[:, 0], "array .* is not C-contiguous"),
        (np.frombuffer(bytes(24)), "array is read-only"),
        (np.array([None] * 3), "dtype=object holds no plain bytes"),
    ],
    ids=["private", "list", "strided", "read-only", "objects"],
)
def test_memory_no_peer_can_open_is_refused_by_all(
    comm_world: MPI.Intracomm, mapped: npt.NDArray[np.float64], bad: Any, text: str
) -> None:
    with communicator("cpu") as comm:
        for culprit in range(comm.size):
            with raises_everywhere(comm_world, InvalidUsageError, match=f"failed on rank {culprit}: {text}"):
                comm.register(bad if comm.rank == culprit else mapped[:3])
        require_memory_works(comm)


def test_memory_whose_name_is_gone_is_refused_by_all(
    comm_world: MPI.Intracomm, mapped: npt.NDArray[np.float64], tmp_path: Path
) -> None:
    (tmp_path / "content").unlink()
    with communicator("cpu") as comm:
        with raises_everywhere(comm_world, InvalidUsageError, match="cannot be opened again by name"):
            comm.register(mapped)
        require_memory_works(comm)


@pytest.mark.mpi(min_size=2)
def test_registered_shapes_that_differ_are_refused_by_all(
    comm_world: MPI.Intracomm, mapped: npt.NDArray[np.float64]
) -> None:
    with communicator("cpu") as comm:
        with raises_everywhere(comm_world, InvalidUsageError, match="the ranks differ"):
            comm.register(mapped[: 3 + (comm.rank == 1)])
        require_memory_works(comm)


@pytest.fixture
def gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")


def test_arrays_of_one_pool_block_are_registered(gpu: None, comm: mpicomm.Communicator, xp: Any) -> None:
    pool = xp.zeros(100_000, np.int32)
    require_registered_works(comm, xp, [pool[:300], pool[300:1300].reshape(10, 100), pool[90_001:]])
    assert not to_host(pool[1300:90_001]).any()
    small = [xp.zeros(50, np.int64) for _ in range(4)]
    require_registered_works(comm, xp, small)


def test_gpu_memory_is_registered_again_after_close(gpu: None, comm: mpicomm.Communicator, xp: Any) -> None:
    array = xp.zeros(1000, np.int32)
    for _ in range(3):
        require_registered_works(comm, xp, [array])


def test_host_memory_is_refused_on_a_gpu(gpu: None, comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    with raises_everywhere(comm_world, InvalidUsageError, match="not on a GPU"):
        comm.register(np.zeros(3))
    require_memory_works(comm)
