"""Plans of overlapped products over a CUDA that launches nothing, and the products that their actions give."""

from __future__ import annotations

import ctypes
import gc
import importlib
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.collectives.gpu.algorithms.base import Copy, Fork, Join
from mpicomm.collectives.gpu.algorithms.copies.schedule import Barrier, Reduce
from mpicomm.devices.host import array_at
from mpicomm.products import schedule
from mpicomm.products.choose import OverlapChoice, ProductProblem, choose, describe
from mpicomm.products.schedule import Action, AddBias, JoinProducts, Multiply, PeerOrder, RowCut, is_possible, pieces_of
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.jobs.pace import stretched
from tests.helpers.programs.deaths import DEATHS, require_named
from tests.helpers.rigs.fake_engines import STREAM, Rig
from tests.helpers.rigs.stream_orders import carry_out

MIB = 1 << 20
ROWS, INNER, COLUMNS = 256, 1024, 512


class Products:
    """The overlapped products of the first of two ranks, and the rows that the library multiplies."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, most_nbytes: int | None = None) -> None:
        self.rig = Rig(cuda, monkeypatch, most_nbytes)
        backend = self.rig.engine._backend
        backend.scratch = lambda nbytes: 1 << 55
        overlapped, operands = (
            importlib.import_module(f"mpicomm.products.{name}") for name in ("overlapped", "operands")
        )
        self._read = operands.Operands
        monkeypatch.setattr(operands.ArrayLibrary, "memory", lambda library, *given: self._memory(*given))
        monkeypatch.setattr(operands.ArrayLibrary, "current", lambda library, stream: nullcontext())
        self.made: list[int] = []
        self.multiplied: list[tuple[int, int]] = []
        engine = self.rig.engine

        def enqueue(plan: Any, stream: int, send: Any, receive: Any, *, blocking: bool) -> None:
            engine.enqueue(plan, stream)

        self.overlapped = overlapped.OverlappedProducts(SimpleNamespace(engine=engine, enqueue=enqueue))

    def _memory(self, pointer: int, shape: tuple[int, int], like: Any) -> Any:
        self.made.append(pointer)
        return np.empty(shape, like.dtype)

    def enqueue(self, kind: Any, cut: RowCut, a: Any, out: Any, **more: Any) -> Any:
        def product(a: Any, b: Any, out: Any) -> None:
            self.multiplied.append((a.shape[0], out.shape[0]))

        operands = self._read(kind, 2, None, a, np.ones((INNER, COLUMNS)), out, None, product, **more)
        problem = self.overlapped.problem(operands)
        self.overlapped.enqueue(operands, OverlapChoice(problem, cut, 0.0, 0.0), STREAM)
        return operands


@pytest.fixture
def products(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Products:
    return Products(cuda, monkeypatch)


def test_an_equal_call_has_its_plan_and_other_calls_share_its_memory(products: Products) -> None:
    a, out = np.ones((ROWS, INNER)), np.empty((2 * ROWS, COLUMNS))
    cut = RowCut((ROWS - 64, 2 * ROWS))
    for call in range(3):
        products.enqueue("allgather_matmul", cut, a, out)
        assert products.multiplied[2 * call :] == [(ROWS - 64,) * 2, (ROWS + 64,) * 2]
    plans = products.rig.engine._plans
    assert len(plans) == 1
    products.enqueue("allgather_matmul", cut, a.copy(), out)
    assert len(plans) == 2
    products.enqueue("matmul_reduce_scatter", RowCut(), a, np.empty((ROWS // 2, COLUMNS)))
    used = {use.purpose: use.device_nbytes for use in products.rig.engine.memory_use()}
    assert used["products"] == 2 * ROWS * INNER * 8 and used["scratch"] == ROWS * COLUMNS * 8
    seen = [weakref.ref(each) for each in (a, out)]
    del a, out
    gc.collect()
    assert [each() for each in seen] == [None, None], "plans keep no arrays"


def test_every_launch_of_a_call_has_another_tag(products: Products) -> None:
    products.enqueue("matmul_allreduce", RowCut(parts=2), np.ones((ROWS, INNER)), np.ones((ROWS, COLUMNS)))
    tags = [x.team.tags[0] for x in products.rig.launched if hasattr(x, "team")]
    assert len(tags) == 4 and len(set(tags)) == 4


def test_memory_beyond_the_bound_is_refused(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products(cuda, monkeypatch, most_nbytes=2 * MIB)
    error = importlib.import_module("mpicomm.collectives.gpu.call_memory").NoMemoryError
    for _ in range(2):
        with pytest.raises(error, match=r'MPICOMM_MEMORY leaves 2097152 bytes .* "products" takes 4194304'):
            products.enqueue("allgather_matmul", RowCut(), np.ones((ROWS, INNER)), np.empty((2 * ROWS, COLUMNS)))


def test_large_shards_and_memory_of_the_host_do_not_fit(products: Products) -> None:
    large = replace(problem_of("allgather_matmul", 1 << 17), inner=8192)
    cut, fits = RowCut(), products.overlapped.fits
    assert not fits(large, cut) and fits(replace(large, rows=1 << 14), cut)
    node = products.rig.engine.domain
    products.rig.engine.domain = replace(node, host_slots=True)
    assert not fits(replace(large, rows=1 << 14), cut)


def problem_of(kind: Any, rows: int, *, size: int = 2, inner: int = 8192, columns: int = 7168) -> ProductProblem:
    return ProductProblem(kind, "bfloat16", 2, 2, rows, inner, columns, size, 132, 1.0)


@pytest.mark.parametrize("kind", ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"])
def test_large_products_overlap_and_small_products_do_not(kind: Any) -> None:
    for size in (2, 4, 8):
        assert choose(problem_of(kind, 16384, size=size)).cut is not None
        small = choose(problem_of(kind, 256, size=size))
        assert small.cut is None and "one after the other" in small.why


def test_the_smallest_products_that_overlap_are_described() -> None:
    for line in describe(2, 132, 1.0):
        call, rows = line.split(", bfloat16 [rows, ")[0], int(line.split("overlap from ")[1].split()[0])
        shape = {} if call == "allgather_matmul" else {"inner": 7168, "columns": 8192}
        assert choose(problem_of(call, rows, **shape)).cut is not None
        assert choose(problem_of(call, rows // 2, **shape)).cut is None


def test_a_cut_adds_no_wave_of_tiles() -> None:
    # Halves of 4096 rows would take 4 waves each on 132 multiprocessors, and the whole takes 7.
    assert choose(problem_of("allgather_matmul", 4096)).cut == RowCut((1792, 4096))
    # Four shards would take 8 waves.
    choice = choose(problem_of("allgather_matmul", 4096, size=4))
    assert choice.cut is not None and len(choice.cut.nested) == 3
    assert choice.overlapped_us < 8 * 2 * 128 * 256 * 8192 / 6.3e6


@given(
    st.sampled_from(["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]),
    st.sampled_from(["bfloat16", "float32", "int8"]),
    *[st.integers(1, 1 << 15)] * 3,
    st.integers(2, 8),
    st.floats(0.05, 2),
)
def test_every_choice_is_a_cut_that_the_model_prefers(
    kind: Any, dtype: str, shard: int, inner: int, columns: int, size: int, speed: float
) -> None:
    choice = choose(ProductProblem(kind, dtype, 2, 2, shard * size, inner, columns, size, 132, speed))
    assert choice.overlapped_us > 0 and choice.serial_us > 0
    if choice.cut is not None:
        assert choice.overlapped_us < choice.serial_us
        assert choice.cut.parts >= 1 and (not choice.cut.nested or is_possible(choice.cut, size, shard))


@pytest.mark.parametrize(("kind", "how"), DEATHS)
def test_survivors_name_the_rank_that_died(tmp_path: Path, kind: str, how: str) -> None:
    require_named(tmp_path, 3, "cpu", kind, how, stretched(1.0))


# Actions of all ranks, in every order that streams and barriers allow.

Array = npt.NDArray[Any]
DEPTH, WIDTH = 5, 3


def integers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-9, 10, shape).astype(np.float64)


def address(array: Array) -> int:
    return int(array.ctypes.data)


class Job:
    """Two calls of all ranks after each other, in the same memory, with other inputs in the second call."""

    def __init__(self, kind: str, size: int, rows: int, cut: RowCut, seed: int, *, without: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.bias = integers(rng, WIDTH)
        out_rows = {"gather": size * rows, "scatter": rows, "reduce": rows}[kind]
        a_rows = rows * size if kind == "scatter" else rows
        self.a = [[integers(rng, a_rows, DEPTH) for _ in range(size)] for _ in range(2)]
        self.b = [integers(rng, DEPTH, WIDTH) for _ in range(size)]
        self.out = [[np.full((out_rows, WIDTH), np.nan) for _ in range(size)] for _ in range(2)]
        self.kept = [[np.full((size * rows, DEPTH), np.nan) for _ in range(size)] for _ in range(2)]
        memory = [np.full(10000, np.nan) for _ in range(size)]
        inboxes = [np.full(10000, np.nan) for _ in range(size)]
        partials = [np.full((size * rows, WIDTH), np.nan) for _ in range(size)]
        self.memory = memory, inboxes, partials  # the actions have only addresses
        shared, landed = [address(each) for each in memory], [address(each) for each in inboxes]
        self.programs: list[list[tuple[Action, partial[None]]]] = []
        for rank in range(size):
            actions: list[tuple[Action, partial[None]]] = []
            order = PeerOrder(rank, size, rows)
            for call in range(2):
                a, out = address(self.a[call][rank]), address(self.out[call][rank])
                if kind == "gather":
                    kept = address(self.kept[call][rank])
                    steps = [*schedule.allgather(order, cut, 8 * DEPTH, a, shared, kept)]
                elif kind == "scatter":
                    steps = [
                        *schedule.reduce_scatter(order, cut, 8 * WIDTH, address(partials[rank]), shared, out, bias=True)
                    ]
                else:
                    steps = [*schedule.allreduce(order, cut, 8 * WIDTH, landed, shared, out, bias=True)]
                matrices = {"a": self.a[call][rank], "out": self.out[call][rank], "partial": partials[rank]}
                shard = rows * WIDTH
                matrices["pulled"] = memory[rank][(size - 1) * shard : (size + 1) * shard].reshape(2 * rows, WIDTH)
                matrices["gathered"] = memory[rank][: size * rows * DEPTH].reshape(size * rows, DEPTH)
                actions += [(step, partial(self._carry_out, step, rank, matrices)) for step in steps]
            ordering = Barrier, Fork, Join, JoinProducts
            found = [at for at, (each, _) in enumerate(actions) if isinstance(each, ordering)]
            self.synchronisations = len(found)
            if without is not None:
                actions.pop(found[without])
            self.programs.append(actions)
        self.kind, self.size, self.rows = kind, size, rows

    def _carry_out(self, action: Action, rank: int, matrices: dict[str, Array]) -> None:
        if isinstance(action, Copy):
            ctypes.memmove(action.target, action.source, action.nbytes)
        elif isinstance(action, Multiply):
            left, into = matrices[action.left], matrices[action.into]
            into[action.at : action.at + action.rows] = left[action.begin : action.begin + action.rows] @ self.b[rank]
        elif isinstance(action, AddBias):
            matrices["out"][action.begin : action.begin + action.rows] += self.bias
        elif isinstance(action, Reduce):
            like = action.nbytes // 8, np.dtype(np.float64)
            array_at(action.output, *like)[:] = sum(array_at(source, *like) for source in action.sources)

    def run(self, seed: int) -> None:
        """Carry out all actions, and check the products."""
        carry_out(self.programs, seed)
        self.check()

    def check(self) -> None:
        for call in range(2):
            if self.kind == "gather":
                whole = np.concatenate(self.a[call])
                for rank in range(self.size):
                    assert (self.out[call][rank] == whole @ self.b[rank]).all()
                    assert (self.kept[call][rank] == whole).all()
                continue
            total = sum(a @ b for a, b in zip(self.a[call], self.b, strict=True)) + self.bias
            for rank in range(self.size):
                rows = slice(rank * self.rows, (rank + 1) * self.rows) if self.kind == "scatter" else slice(None)
                assert (self.out[call][rank] == total[rows]).all()


def cut_of(kind: str, size: int, rows: int, draw: Any) -> Any:
    if kind == "reduce":
        return RowCut(parts=draw(st.integers(1, 3)))
    if kind == "scatter":
        return draw(st.sampled_from([RowCut(), RowCut(merged=True), *([RowCut(pairs=True)] if size == 4 else [])]))
    levels = {2: 1, 4: 2}.get(size, 0)
    regions = product(*(range(1, (rows << level) + 1) for level in range(levels)))
    nested = (RowCut((*inner, size * rows)) for inner in regions if levels)
    return draw(st.sampled_from([RowCut(), *(cut for cut in nested if is_possible(cut, size, rows))]))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["gather", "scatter", "reduce"]), st.integers(2, 5), st.integers(1, 7), st.data())
def test_every_order_gives_the_product(kind: str, size: int, rows: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 30))
    Job(kind, size, rows, cut_of(kind, size, rows, data.draw), seed).run(seed)


# No call comes before the first call, so nothing has to wait for an earlier call. In an all-reduce the barrier at the
# beginning waits only for calls of the other kinds, which share the memory.
@pytest.mark.parametrize(
    ("kind", "pairs", "of_earlier_calls"),
    [("gather", False, [0, 1]), ("scatter", False, [0]), ("scatter", True, [0]), ("reduce", False, [0, 19])],
)
def test_every_barrier_fork_and_join_is_needed(kind: str, pairs: bool, of_earlier_calls: list[int]) -> None:
    cut, size = RowCut(pairs=pairs, parts=2), 4 if pairs else 3

    def is_wrong(without: int, seed: int) -> bool:
        try:
            Job(kind, size, 2, cut, seed, without=without).run(seed)
        except AssertionError:
            return True
        return False

    for number in {*range(Job(kind, size, 2, cut, 0).synchronisations)} - {*of_earlier_calls}:
        assert any(is_wrong(number, seed) for seed in range(300)), f"without {number} all is well"


def test_a_nested_cut_multiplies_shards_of_the_own_pair_first() -> None:
    cut = RowCut((4, 14, 32))
    assert is_possible(cut, 4, 8)
    assert [[piece[1:] for piece in pieces_of(PeerOrder(rank, 4, 8), cut)] for rank in range(4)] == [
        [(0, 4), (4, 14), (14, 32)],
        [(10, 14), (0, 10), (14, 32)],
        [(18, 22), (22, 32), (0, 18)],
        [(28, 32), (18, 28), (0, 18)],
    ]
    assert not is_possible(RowCut((4, 10, 32)), 4, 8)  # the first product of rank 1 would have rows of rank 0
