"""Plans of overlapped products on an engine of GPUs, over a CUDA that launches nothing."""

from __future__ import annotations

import gc
import importlib
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.products.choose import Facts, ProductWay, choose, describe
from mpicomm.products.schedule import RowCut, is_possible
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.jobs.pace import stretched
from tests.helpers.programs.product_deaths import DEATHS, require_named
from tests.helpers.rigs.fake_engines import STREAM, Rig

MIB = 1 << 20
ROWS, INNER, COLUMNS = 256, 1024, 512


class Products:
    """The overlapped products of the first of two ranks, and the rows that the library multiplies."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, most_nbytes: int | None = None) -> None:
        self.rig = Rig(cuda, monkeypatch, most_nbytes)
        backend = self.rig.engine._backend
        backend.scratch = lambda nbytes: importlib.import_module("mpicomm.devices.base").Scratch(1 << 55, nbytes, None)
        overlapped, operands = (
            importlib.import_module(f"mpicomm.products.{name}") for name in ("overlapped", "operands")
        )
        self._read = operands.Operands
        monkeypatch.setattr(operands.Library, "memory", lambda library, *given: self._memory(*given))
        monkeypatch.setattr(operands.Library, "current", lambda library, stream: nullcontext())
        self.made: list[int] = []
        self.multiplied: list[tuple[int, int]] = []
        engine = self.rig.engine

        def enqueue(plan: Any, stream: int, send: Any, receive: Any, *, blocking: bool) -> None:
            engine.enqueue(plan, stream)

        self.overlapped = overlapped.Overlapped(SimpleNamespace(engine=engine, enqueue=enqueue))

    def _memory(self, pointer: int, shape: tuple[int, int], like: Any) -> Any:
        self.made.append(pointer)
        return np.empty(shape, like.dtype)

    def enqueue(self, kind: Any, cut: RowCut, a: Any, out: Any, **more: Any) -> Any:
        def product(a: Any, b: Any, out: Any) -> None:
            self.multiplied.append((a.shape[0], out.shape[0]))

        operands = self._read(kind, 2, None, a, np.ones((INNER, COLUMNS)), out, None, product, **more)
        facts = self.overlapped.facts(operands)
        self.overlapped.enqueue(operands, ProductWay(facts, cut, 0.0, 0.0), STREAM)
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
    large = replace(facts("allgather_matmul", 1 << 17), inner=8192)
    cut, fits = RowCut(), products.overlapped.fits
    assert not fits(large, cut) and fits(replace(large, rows=1 << 14), cut)
    node = products.rig.engine.domain
    products.rig.engine.domain = replace(node, host_slots=True)
    assert not fits(replace(large, rows=1 << 14), cut)


def facts(kind: Any, rows: int, *, size: int = 2, inner: int = 8192, columns: int = 7168) -> Facts:
    return Facts(kind, "bfloat16", 2, 2, rows, inner, columns, size, 132, 1.0)


@pytest.mark.parametrize("kind", ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"])
def test_large_products_overlap_and_small_products_do_not(kind: Any) -> None:
    for size in (2, 4, 8):
        assert choose(facts(kind, 16384, size=size)).cut is not None
        small = choose(facts(kind, 256, size=size))
        assert small.cut is None and "one after the other" in small.why


def test_the_smallest_products_that_overlap_are_described() -> None:
    for line in describe(2, 132, 1.0):
        call, rows = line.split(", bfloat16 [rows, ")[0], int(line.split("overlap from ")[1].split()[0])
        shape = {} if call == "allgather_matmul" else {"inner": 7168, "columns": 8192}
        assert choose(facts(call, rows, **shape)).cut is not None
        assert choose(facts(call, rows // 2, **shape)).cut is None


def test_a_cut_adds_no_wave_of_tiles() -> None:
    # Halves of 4096 rows would take 4 waves each on 132 multiprocessors, and the whole takes 7.
    assert choose(facts("allgather_matmul", 4096)).cut == RowCut((1792, 4096))
    # Four shards would take 8 waves.
    way = choose(facts("allgather_matmul", 4096, size=4))
    assert way.cut is not None and len(way.cut.nested) == 3
    assert way.overlapped_us < 8 * 2 * 128 * 256 * 8192 / 6.3e6


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
    way = choose(Facts(kind, dtype, 2, 2, shard * size, inner, columns, size, 132, speed))
    assert way.overlapped_us > 0 and way.serial_us > 0
    if way.cut is not None:
        assert way.overlapped_us < way.serial_us
        assert way.cut.parts >= 1 and (not way.cut.nested or is_possible(way.cut, size, shard))


@pytest.mark.parametrize(("kind", "how"), DEATHS)
def test_survivors_name_the_rank_that_died(tmp_path: Path, kind: str, how: str) -> None:
    require_named(tmp_path, 3, "cpu", kind, how, stretched(1.0))
