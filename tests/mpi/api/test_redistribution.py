"""Redistributions, compared with slices of the whole array by NumPy."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm import Split
from mpicomm.api import redistribution

SIZE = MPI.COMM_WORLD.size
SHAPE = (5, 7, 3)
DTYPES = ("float32", "complex128", "int8", "float16", "bool")


def pieces(draw: st.DrawFn, length: int, parts: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    bounds = [0, *cuts, length]
    return [stop - start for start, stop in pairwise(bounds)]


@st.composite
def splits(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw a split in one of its forms."""
    form = draw(st.sampled_from(["none", "axis", "sizes", "grid", "ranks", "boxes"]))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    ranks = draw(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE, unique=True))
    if form == "none":
        return draw(st.sampled_from([None, Split(None, ranks=ranks)]))
    if form == "axis":
        return axis
    if form == "ranks":
        return Split(axis, ranks=ranks)
    if form == "sizes":
        return Split(axis, sizes=pieces(draw, shape[axis], len(ranks)), ranks=ranks)
    if form == "grid" and len(shape) > 1:
        return Split((len(shape) - 1, 0), grid=draw(st.sampled_from([(SIZE, 1), (1, SIZE), None])))
    boxes: list[Any] = [None] * SIZE
    stops = list(accumulate(pieces(draw, shape[0], len(ranks))))
    for rank, start, stop in zip(ranks, [0, *stops], stops, strict=False):
        boxes[rank] = (slice(start, stop), *(draw(st.sampled_from([(0, n), slice(None)])) for n in shape[1:]))
    if draw(st.booleans()):
        boxes[ranks[-1]] = tuple((0, length) for length in shape)  # so several ranks may have an element
    return boxes


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], str, Any, Any]:
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    return shape, draw(st.sampled_from(DTYPES)), draw(splits(shape)), draw(splits(shape))


def whole(shape: tuple[int, ...], dtype: str, start: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(start, start + np.prod(shape, dtype=int)) % 101).reshape(shape).astype(dtype)


def part(array: Any, box: Any) -> Any:
    return array[:0] if box is None else array[tuple(slice(*bounds) for bounds in box)]


def moved(
    comm: Any, xp: Any, plan: mpicomm.Redistribution, array: Any, algorithm: str = "auto", *, passes_all: bool = True
) -> None:
    """Carry a plan out, and compare what this rank gets; without ``passes_all`` it passes only what it must."""
    x: Any = xp.asarray(np.ascontiguousarray(part(array, plan.source_box)))
    out = xp.full(plan.target_shape, 7, plan.dtype)
    assert x.shape == plan.source_shape
    if not passes_all:
        x = None if plan.source_box is None else x
        out = out if x is None and plan.target_box is not None else None
    got = plan(x, out, algorithm=algorithm)
    comm.check()
    assert got is out or (out is None and plan.target_box is not None)
    assert got is None or (got == xp.asarray(part(array, plan.target_box))).all()


def drawn(strategy: Any, count: int) -> list[Any]:
    """Return the same examples on all ranks, so that an error of one rank does not make it draw others."""
    found: list[Any] = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(strategy)
    def keep(example: Any) -> None:
        found.append(example)

    keep()
    return found


def test_random_splits_and_splits_between_groups(comm: mpicomm.Communicator, xp: Any) -> None:
    halves = [*range(SIZE // 2 or 1)], [*range(SIZE // 2, SIZE)]  # disjoint on several ranks
    between = [(SHAPE, "float32", Split(0, ranks=halves[0]), Split(to, ranks=halves[1])) for to in (1, None)]
    for shape, dtype, from_, to in [*drawn(cases(), 40), *between]:
        with comm.redistribution(shape, dtype, from_, to) as plan:
            assert (plan.nbytes_sent, plan.nbytes_received) <= (SIZE * 8 * 216, SIZE * 8 * 216)
            sent, received = (comm.allreduce(each) for each in (plan.nbytes_sent, plan.nbytes_received))
            assert sent == received
            for start in (0, 1):  # new arrays of the same plan
                moved(comm, xp, plan, whole(shape, dtype, start), passes_all=start == 0)


@pytest.mark.parametrize("algorithm", ["auto", "copy_engine"])
def test_long_parts_that_are_alike(
    comm: mpicomm.Communicator, xp: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """They go in other datatypes. On GPUs copy engines carry their rows."""
    if xp is np and algorithm != "auto":
        pytest.skip("a host has no copy engines")
    monkeypatch.setattr(redistribution, "_LONG_NBYTES", 1)
    shape = (SIZE, 2 * SIZE, 64 * SIZE)
    for dtype, source, target in product(("float32", "complex128"), range(3), range(3)):
        with comm.redistribution(shape, dtype, source, target) as plan:
            for start in (0, 1):
                moved(comm, xp, plan, whole(shape, dtype, start), "auto" if source == target else algorithm)


def test_blocks_are_as_even_as_those_of_numpy(comm: mpicomm.Communicator) -> None:
    with comm.redistribution(SHAPE, "f4", None, 1) as plan:
        assert plan.target_shape == np.array_split(np.empty(SHAPE), comm.size, 1)[comm.rank].shape
        assert plan.nbytes_received == 0  # each rank reads its own copy


def test_replicas_share_the_readers(comm: mpicomm.Communicator) -> None:
    holders = [*range(comm.size // 2 or 1)]
    with comm.redistribution(SHAPE, "f4", Split(None, ranks=holders), None) as plan:
        readers = comm.size - len(holders)
        assert plan.nbytes_sent <= -(-readers // len(holders)) * 4 * np.prod(SHAPE)


def test_parts_say_the_shape(comm: mpicomm.Communicator, xp: Any) -> None:
    rows = [2 * rank + 1 for rank in range(comm.size)]
    array = whole((sum(rows), 5), "float64")
    first = sum(rows[: comm.rank])
    x = xp.asarray(array[first : first + rows[comm.rank]])
    columns = comm.redistribute(x, from_=0, to=1)
    assert isinstance(columns, type(x))
    assert (columns == xp.asarray(np.array_split(array, comm.size, 1)[comm.rank])).all()
    assert (comm.redistribute(x, from_=0, to=None) == xp.asarray(array)).all()
    back = comm.redistribute(columns, xp.empty_like(x), from_=1, to=Split(0, sizes=rows), shape=array.shape)
    assert (back == x).all()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"from_": 3}, r"from_=Split\(3\).*no such axes"),
    ({"to": Split(0, sizes=[9] * SIZE)}, r"to=Split\(0, sizes=.*axis 0 .* sum 5"),
    ({"to": Split((0, 1), grid=(SIZE, 2))}, "to=.*grid .* no place"),
    ({"to": Split(0, ranks=[SIZE])}, "to=.*ranks 0 to"),
    ({"to": Split(0, ranks=[])}, "to=.*pass one or more of the ranks"),
    ({"to": "rows"}, "to='rows' is no split"),
    ({"to": [None] * (SIZE + 1)}, "pass one for each of"),
    ({"to": [((0, 9),)] * SIZE}, "no part of shape"),
    ({"to": [((0, 5), (0, 7), (0, 3), (0, 0))] * SIZE}, "no part of shape"),
    ({"to": [(slice(0, 5, 2), slice(None), slice(None))] * SIZE}, "a slice without a step"),
    ({"from_": [None] * SIZE}, "no rank has the elements"),
    ({"shape": -1}, "shape=-1"),
    ({"dtype": "V3"}, "dtype='V3' is no element type"),
    ({"dtype": ">f4"}, "dtype='>f4' is no element type"),
]


def test_bad_arguments_raise_on_all_ranks(comm: mpicomm.Communicator) -> None:
    for bad, said in BAD:
        call: dict[str, Any] = {"shape": SHAPE, "dtype": "f4", "from_": 0, "to": 1, **bad}
        with pytest.raises(mpicomm.InvalidUsageError, match=said):
            comm.redistribution(**call)
    splits_that_contradict_themselves: list[tuple[Any, dict[str, Any], str]] = [
        ((0, 1), {"grid": 2}, r"grid=\(2,\) has 1 entries for the axes"),
        ((0, 1), {"sizes": 3}, r"sizes=\[3\] has 1 entries for the axes"),
        ("ab", {}, "axes='ab': pass integers"),
        (0, {"ranks": [0.5]}, r"ranks=\[0.5\]: pass integers"),
    ]
    for axes, bad, said in splits_that_contradict_themselves:
        with pytest.raises(mpicomm.InvalidUsageError, match=said):
            Split(axes, **bad)


def test_ranks_that_differ_raise_on_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank")
    with pytest.raises(mpicomm.InvalidUsageError, match="differs between ranks"):
        comm.redistribution(SHAPE, "f4", 0, 1 + (comm.rank == 0))
    with pytest.raises(mpicomm.InvalidUsageError, match="element types"):
        comm.redistribute(xp.ones(3, "f4" if comm.rank else "f8"), from_=0, to=None)
    with pytest.raises(mpicomm.InvalidUsageError, match="no parts of one array"):
        comm.redistribute(xp.ones((3, 1 + comm.rank)), from_=0, to=None)
    with pytest.raises(mpicomm.InvalidUsageError, match="out has shape"):  # on one rank
        comm.redistribute(xp.ones(3), xp.ones(3 * comm.size + (comm.rank == 0)), from_=0, to=None)
    if xp is np:
        out = np.ones(3 * comm.size)
        out.flags.writeable = comm.rank > 0
        with pytest.raises(mpicomm.InvalidUsageError, match=r"rank 0: out is .* that is read-only"):
            comm.redistribute(np.ones(3), out, from_=0, to=None)


def test_arrays_that_do_not_fit(comm: mpicomm.Communicator, xp: Any) -> None:
    plan = comm.redistribution((4, 6), "f4", None, None)
    fitting = xp.ones((4, 6), "f4")
    for x, out, said in (
        (xp.ones((4, 5), "f4"), None, r"x has shape \(4, 5\)"),
        (fitting, xp.ones((4, 6)), "out has shape .* type float64"),
        (xp.ones((6, 4), "f4").T, None, "not C-contiguous: pass numpy.ascontiguousarray"),
        (None, fitting, "x=None: this rank has a part"),
        ([1], None, "x is a list"),
        (fitting, fitting, "out overlaps with x"),
        (np.ma.masked_array(np.ones((4, 6), "f4"), True), None, "x is a masked array"),
    ):
        with pytest.raises(mpicomm.InvalidUsageError, match=said):
            plan(x, out)
    text = "(4, 6) float32, Split(None) to Split(None): this rank sends 0, receives 0"
    assert repr(plan) == f"<mpicomm.Redistribution {text}>"
    plan.Free()
    with pytest.raises(mpicomm.InvalidUsageError, match="freed"):
        plan(fitting)


def test_arrays_and_shapes_of_any_kind(comm: mpicomm.Communicator, xp: Any) -> None:
    class Own(np.ndarray[Any, Any]):
        pass

    x = np.arange(12.0).reshape(3, 4)
    gathered = comm.redistribute(x.view(Own), from_=None, to=None)
    assert type(gathered) is np.ndarray and (gathered == x).all()
    assert comm.redistribute(xp.ones((0, 4)), from_=0, to=None).shape == (0, 4)
    x = xp.ones((1, 4)) if comm.rank == 0 else xp.ones((0, 4))
    assert comm.redistribute(x, from_=0, to=0, shape=(1, 4)).shape == x.shape
    with comm.redistribution((), "f8", None, None) as plan:
        assert plan(xp.array(3.0)) == 3.0
    integers: Any = np.array([0, 1])
    assert Split(integers, grid=integers) == Split((0, 1), grid=(0, 1))
    shape: Any = np.array([4, 6])
    with comm.redistribution(shape, "f4", 0, 1) as plan:
        assert plan.shape == (4, 6)


@pytest.mark.gpu_alone  # the host has no graphs
def test_a_graph_has_the_call(comm: mpicomm.Communicator, xp: Any) -> None:
    array = whole(SHAPE, "float32")
    stream = xp.cuda.Stream(non_blocking=True)
    with comm.redistribution(SHAPE, "float32", 0, 1) as plan, stream:
        x, out = xp.asarray(part(array, plan.source_box)), xp.empty(plan.target_shape, "f4")
        plan(x, out)
        stream.begin_capture()
        plan(x, out)
        graph = stream.end_capture()
        out[...] = -1
        stream.synchronize()
        comm.Barrier()
        graph.launch(stream)
        comm.check(stream)
        assert (out == xp.asarray(part(array, plan.target_box))).all()
