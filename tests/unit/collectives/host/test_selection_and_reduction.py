"""Who carries out calls on host arrays, by size; the fast path of MPI; reductions by NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.host import reduction as host_reduction
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.engine import SLOT_NBYTES
from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.host.selection import NEVER, algorithms_for, mapped_threshold, mpi_fast_path, schedule
from mpicomm.collectives.operations import ALLREDUCE, BCAST, OPERATIONS, REDUCE, Operation
from tests.helpers.references.reductions import NARROW, dtype_or_skip, reduced, require_same, samples

MIB = 1 << 20


def test_switch_points_are_of_operations_that_there_are() -> None:
    assert set(selection._MAPPED_THRESHOLDS) | set(selection._TWO_SHOT_THRESHOLDS) <= set(OPERATIONS)


def test_large_reductions_go_through_mapped_memory() -> None:
    for size in (2, 8):
        assert 1024 < mapped_threshold(ALLREDUCE, size, 1) <= 64 * MIB
        assert mapped_threshold(ALLREDUCE, size, 2) == mapped_threshold(ALLREDUCE, 1, 1) == NEVER
        for name in ("Allgather", "Alltoall", "Alltoallv", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv"):
            assert mapped_threshold(OPERATIONS[name], size, 1) == NEVER


def exchanges(operation: Operation, nbytes: int, size: int, algorithm: str = "auto") -> int:
    """The number of exchanges of a call."""
    array = np.zeros(nbytes, np.uint8)
    call = Call(operation, Arguments(array, array.copy(), MPI.SUM if operation.reduces else None), 0, size, algorithm)
    return len(schedule(call, algorithm, 0))


def test_large_allreduces_take_two_shots_of_pieces_whose_shards_fit_a_slot() -> None:
    assert selection._SHARD_NBYTES <= SLOT_NBYTES
    for size in (2, 3):
        assert exchanges(ALLREDUCE, 6 * MIB, size) == 2 * -(-6 // size)
    assert exchanges(ALLREDUCE, 1000, 2) == exchanges(ALLREDUCE, 6 * MIB, 2, "one_shot") == 1
    assert exchanges(ALLREDUCE, 1000, 2, "two_shot") == exchanges(BCAST, 1000, 2, "two_shot") == 2
    assert exchanges(BCAST, 6 * MIB, 2) == exchanges(ALLREDUCE, 6 * MIB, 1) == 1
    assert exchanges(ALLREDUCE, 1000, 3, "ring") == 4


def test_two_shots_of_a_reduce_are_for_gpus() -> None:
    assert algorithms_for(REDUCE) == ("one_shot",)
    assert algorithms_for(BCAST) == ("one_shot", "two_shot")
    assert algorithms_for(ALLREDUCE) == ("one_shot", "two_shot", "ring")


# The fast path: these calls go to MPI unread. `mpi_room/test_arguments.py` shows that no other call does.

SIZES = (2, 3, 8)
RANK = 1
EVERY = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=str)


def is_fast(method: str, send: Any, receive: Any, op: Any = MPI.SUM, size: int = 2, nodes: int = 1) -> bool:
    return mpi_fast_path(size, RANK, nodes)[method](send, receive, op)


def buffers(operation: Operation, nbytes: int, size: int = 2) -> tuple[Any, Any]:
    """Return a buffer to send and a buffer that fits it. The input of a reduction has ``nbytes`` bytes."""
    if operation.rooted == "bcast":
        return None, np.empty(nbytes // 8)
    apart = not operation.reduces and not operation.of_neighbors
    made: list[Any] = []
    for shape in (operation.send, operation.receive):
        array = np.empty(nbytes // 8 * (size if apart and shape != "one" else 1))
        made.append([array, [nbytes // 8] * size] if apart and shape == "vector" else array)
    return made[0], made[1]


@EVERY
@pytest.mark.parametrize("op", [MPI.SUM, MPI.MAX], ids=["sum", "max"])
@pytest.mark.parametrize("size", SIZES)
def test_no_call_is_for_mapped_memory(operation: Operation, op: MPI.Op, size: int) -> None:
    if operation.send == "typed":
        assert not is_fast(operation.name, np.zeros(1), np.zeros(1))
        return
    for nbytes in (8, 1 << 10, 1 << 17, MIB - 8, MIB, 1 << 22, 1 << 25):
        mapped = nbytes >= mapped_threshold(operation, size, 1)
        send, receive = buffers(operation, nbytes, size)
        assert is_fast(operation.name, send, receive, op, size) == (not mapped)
        assert is_fast(operation.nonblocking, send, receive, op, size)
        assert is_fast(operation.name, send, receive, op, size, 2)


def test_lists_take_the_fast_path_if_the_array_holds_their_elements() -> None:
    four, eight, nine = np.zeros(4), np.zeros(8), np.zeros(9)
    assert is_fast("Allreduce", eight[:2], eight[2:4]) and is_fast("Allreduce", MPI.IN_PLACE, eight)
    column = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    for spec in ([four, MPI.DOUBLE], (four, MPI.DOUBLE), [four, 4, MPI.DOUBLE], [eight, 4], [nine, column]):
        assert is_fast("Bcast", None, spec)
    for spec in ([four, column], [four, 3, column], [four, 5, MPI.DOUBLE], [four, 9, MPI.FLOAT]):
        assert not is_fast("Bcast", None, spec)
    assert is_fast("Allgather", [four, 4], [eight, 4]) and not is_fast("Allgather", [four, 4], [eight, 3])
    for spec in ([nine, [5, 4]], [nine, (np.array([5, 4]), [0, 5])], [nine, [5, 4], [4, 0], MPI.DOUBLE]):
        assert is_fast("Allgatherv", four, spec) and is_fast("Scatterv", spec, four) and is_fast("Gatherv", four, spec)
    for counts in ([6, 4], [4, 5], [5], [5.0, 4], [-1, 4], ([5, 4], [0, 6]), ([5, 4], [-1, 4]), 4):
        assert not is_fast("Allgatherv", four, [nine, counts])
    none = np.zeros(0)
    assert not is_fast("Allgatherv", none, [none, 3, MPI.DOUBLE]) and not is_fast("Bcast", None, [none, 3, MPI.DOUBLE])
    assert is_fast("Allgather", [four, 4, MPI.DOUBLE], [eight, 4, MPI.DOUBLE])
    assert not is_fast("Allgather", [four, 4, MPI.DOUBLE], [eight, 8, MPI.DOUBLE])
    assert not is_fast("Allgather", [four, 4, MPI.DOUBLE], [four, 4, MPI.DOUBLE])
    column.Free()


@pytest.mark.parametrize("method", ["Gather", "Gatherv", "Reduce", "Igather", "Igatherv", "Ireduce"])
def test_only_ranks_beside_the_root_need_no_output(method: str) -> None:
    check = mpi_fast_path(2, RANK, 1)[method]
    four = np.zeros(4)
    for send in (four, [four, MPI.DOUBLE]):
        assert check(send, None, MPI.SUM, RANK - 1)
        assert not check(send, None, MPI.SUM, RANK)
    assert not check(np.zeros(4, np.float16), None, MPI.SUM, RANK - 1)
    assert not is_fast("Allgather", four, None)


def test_the_count_of_a_list_decides_on_the_way() -> None:
    large, small = np.zeros(1 << 22), np.zeros(4)
    assert is_fast("Allreduce", [large, 4, MPI.DOUBLE], small) and is_fast("Allreduce", MPI.IN_PLACE, [large, 4])
    assert not is_fast("Allreduce", [large, MPI.DOUBLE], [large.copy(), MPI.DOUBLE])
    assert not is_fast("Allreduce", MPI.IN_PLACE, [large, large.size, MPI.DOUBLE])


def test_blocks_that_are_reduced_in_place_need_a_closer_look_in_a_list() -> None:
    assert is_fast("Reduce_scatter_block", MPI.IN_PLACE, np.zeros(4))
    for count in (2, 4):
        assert not is_fast("Reduce_scatter_block", MPI.IN_PLACE, [np.zeros(4), count])
        assert not is_fast("Reduce_scatter_block", MPI.IN_PLACE, [np.zeros(4), count, MPI.DOUBLE])
    assert not is_fast("Reduce_scatter", MPI.IN_PLACE, np.zeros(4))
    assert not is_fast("Neighbor_alltoall", MPI.IN_PLACE, np.zeros(4))


def test_lists_of_neighbours_have_blocks_for_neighbours() -> None:
    assert is_fast("Neighbor_allgather", np.zeros(4), np.zeros(8))
    assert not is_fast("Neighbor_allgather", [np.zeros(4), 4, MPI.DOUBLE], [np.zeros(8), 4, MPI.DOUBLE])


@EVERY
@pytest.mark.parametrize("agreed", [True, False])
def test_on_gpus_a_call_on_host_arrays_goes_to_mpi_if_the_ranks_agree(operation: Operation, agreed: bool) -> None:
    votes: list[str] = []

    def voting(method: str) -> Callable[[Operation], bool]:
        def vote(row: Operation) -> bool:
            votes.append(getattr(row, method))
            return agreed

        return vote

    on_host, given = mpi_fast_path(2, RANK, 1), buffers(operation, 16)
    checks = selection.with_votes(on_host, voting("name"), voting("nonblocking"))
    for method in operation.methods[:2]:
        fast = on_host[method](*given, MPI.SUM)
        assert fast or operation.of_neighbors or operation.send == "typed"
        votes.clear()
        assert checks[method](*given, MPI.SUM) == (fast and agreed)
        assert not checks[method](object(), object(), MPI.SUM)  # it is read before this rank votes
        assert votes == [method] * fast


# Reductions by NumPy.

Array = npt.NDArray[Any]
BLOCK = host_reduction._BLOCK_NBYTES


def run(op: str, parts: Sequence[Array], out: Array | None = None) -> Array:
    out = np.empty_like(parts[0]) if out is None else out
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        Reducer(op, parts[0].dtype).reduce(parts, out)
    return out


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["float32", "int16", "complex128", "float16", "bfloat16"])
def test_blocks_do_not_change_the_result(name: str, number: int) -> None:
    """tests/mpi/collectives/test_collectives.py has all types and operations."""
    dtype = dtype_or_skip(name)
    per_block = BLOCK // (4 if name in NARROW else dtype.itemsize)
    rng = np.random.default_rng(number)
    for count in (0, per_block - 1, per_block, per_block + 1, 3 * per_block + 17):
        parts = [samples(dtype, count, rng) for _ in range(number)]
        wanted = reduced("sum", parts) if number > 1 else parts[0]
        require_same(run("sum", parts), wanted)
        for own in range(number):  # in place of any one of the parts
            copies = [part.copy() for part in parts]
            require_same(run("sum", copies, copies[own]), wanted)


@pytest.mark.parametrize("char", ["F", "D"])
def test_complex_products_do_not_depend_on_where_the_array_is_cut(char: str) -> None:
    rng = np.random.default_rng(1)
    dtype = np.dtype(char)
    parts = [(rng.standard_normal(65) + 1j * rng.standard_normal(65)).astype(dtype) for _ in range(3)]
    whole = run("prod", parts)
    for cut in range(65):
        for piece in (slice(0, cut), slice(cut, 65), slice(cut, cut + 1)):
            for own in range(3):
                copies = [part.copy()[piece] for part in parts]
                assert run("prod", copies, copies[own]).tobytes() == whole[piece].tobytes()


@given(parts=st.integers(1, 9), leaves=st.sampled_from([1, 2, 4, 8]), name=st.sampled_from(["float32", "float16"]))
def test_a_tree_of_trees_is_a_tree(parts: int, leaves: int, name: str) -> None:
    rng, dtype = np.random.default_rng([parts, leaves]), np.dtype(name)
    with np.errstate(all="ignore"):
        whole = (rng.standard_normal((leaves * parts, 50)) * 1e4).astype(dtype)
        partial = [mpicomm.tree_sum(whole[leaves * part : leaves * (part + 1)]) for part in range(parts)]
        assert run("tree", partial).astype(dtype).tobytes() == reduced("tree", list(whole)).tobytes()


def test_tree_sum_along_an_axis() -> None:
    x = np.arange(24.0).reshape(3, 8, 1)
    assert (mpicomm.tree_sum(x, 1) == x.sum(1)).all() and mpicomm.tree_sum(x, -1).shape == (3, 8)
    assert isinstance(mpicomm.tree_sum(np.ones(4)), np.ndarray)  # a buffer, so that a call takes it
    with pytest.raises(mpicomm.InvalidUsageError, match="axis 0 has 3 slices: pass a power of two"):
        mpicomm.tree_sum(x)


def test_narrow_floats_are_rounded_once() -> None:
    parts = [np.array([value], np.float16) for value in (2048.0, 2050.0, 2050.0)]
    assert run("avg", parts)[0] == np.float16(np.float32(6148.0) / np.float32(3))
    large = [np.array([60000.0], np.float16)] * 4
    assert run("avg", large)[0] == 60000.0  # without the division the sum would be infinite


def test_memory_it_needs_does_not_grow_with_the_arrays() -> None:
    reducer = Reducer("sum", np.dtype(np.float16))
    parts = [np.ones(1_000_000, np.float16)] * 3
    reducer.reduce(parts, np.empty_like(parts[0]))
    assert sum(scratch.nbytes for scratch in reducer._scratch) <= 2 * BLOCK
