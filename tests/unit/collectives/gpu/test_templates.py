"""A call that a cache of plans finds is launched as if it had been read.

Calls of two kinds come to one cache. They differ in addresses, counts and displacements, some are repeated, and some
have a fault. The reader and a new launcher say what is right.
"""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

pytest.importorskip("ml_dtypes")

import mpicomm
from mpicomm.collectives.call import Arguments
from mpicomm.collectives.gpu import plan_cache
from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.neighborhood import Neighborhood
from mpicomm.collectives.operations import ALLREDUCE, ALLTOALLV, OPERATIONS, Operation
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues import Elementwise, Epilogue, fp8, layer_norm, rms_norm
from mpicomm.mpi import descriptors
from mpicomm.mpi.descriptors import buffer_key, descriptor_of, is_descriptor
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.template_calls import BF16, FLOAT, SLOT, Array, Calls, Device, let_it_be_cupys

ON_GPU = "counts on the GPU"
PACKAGE = str(Path(mpicomm.__file__).parent)


@pytest.fixture(autouse=True)
def arrays_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    let_it_be_cupys(monkeypatch)


# Epilogues: each makes its arrays by a name, a count and a type, for so many rows.

Make = Callable[[int, Any], Array]


def norm_of(
    more: Callable[[Make, int, int], dict[str, Any]], kind: Callable[..., Epilogue] = rms_norm, weight: Any = BF16
) -> Callable[[Make, int, int], Epilogue]:
    """Return what makes a norm of so many rows, with further operands."""
    return lambda make, rows, hidden: kind(make(rows * hidden, BF16), make(hidden, weight), **more(make, rows, hidden))


def tiles(make: Make, rows: int, hidden: int) -> dict[str, Any]:
    scales = make(-(-rows // 128) * 128 * -(-hidden // 64) * 4, dtype_named("float8_e4m3fn"))
    return {"scales": scales, "scale": make(1, FLOAT), "scale_layout": "128x4"}


EPILOGUES: dict[str, tuple[str, Callable[[Make, int, int], Epilogue]]] = {
    "rms": ("bfloat16", norm_of(lambda *_: {})),
    "linear bias": ("bfloat16", norm_of(lambda make, rows, hidden: {"linear_bias": make(hidden, BF16)}, weight=FLOAT)),
    "layer": ("bfloat16", norm_of(lambda make, rows, hidden: {"bias": make(hidden, BF16)}, layer_norm)),
    "scaled rows": ("float8_e4m3fn", norm_of(lambda make, rows, n: {"scales": make(rows * (n // 64), FLOAT)})),
    "tiles of 4 bits": ("uint8", norm_of(tiles)),
    "fp8": ("float8_e5m2", norm_of(lambda *_: {"scale": 0.5})),
    "elements": (
        "bfloat16",
        lambda make, rows, hidden: Elementwise("v * f + b[i % n]", f=0.5, n=hidden, b=make(hidden, BF16)),
    ),
    "indices": ("bfloat16", lambda make, rows, hidden: Elementwise("v + b[i]", b=make(40 * hidden, BF16))),
    "converting": ("float8_e4m3fn", lambda make, rows, hidden: fp8(cast(Any, make(1, FLOAT)))),
}
"""The types of the results, and the epilogues."""

PAIR = MPI.FLOAT.Create_contiguous(2)  # kernels need no committed datatype
COLUMN, LATER = MPI.FLOAT.Create_vector(3, 1, 5), MPI.FLOAT.Create_indexed([2], [1])
WITHOUT_GAPS, WITH_GAPS = [MPI.FLOAT, MPI.INT16_T, MPI.BYTE, PAIR], [COLUMN, LATER, MPI.SHORT_INT]
EITHER = (False, True)
FAULTS = ("", "", "overlap", "overlap", "size", "size", "number", "argument")


class Kind:
    """Draws calls of one kind of an operation."""

    def __init__(self, draw: Random, operation: Operation, special: str, rank: int, size: int, peers: Any) -> None:
        self._draw, self.operation, self._special, self._rank, self._size = draw, operation, special, rank, size
        self._peers, shapes = peers, (operation.send, operation.receive)
        self._root = draw.randint(0, size - 1)
        self._own = self._root if operation.rooted else rank
        """The rank whose block has one length in both buffers."""
        self._op = draw.choice([MPI.SUM, MPI.SUM, MPI.MAX]) if operation.reduces else None
        types = ["f4", "f8", "i2", "u1", "c16", *["g"] * (not operation.reduces)]
        self._dtype = FLOAT if "typed" in shapes else np.dtype(draw.choice(types))
        may_be_in_place = not (operation.of_neighbors or "vector" in shapes)
        self._in_place = may_be_in_place and draw.choice(EITHER)
        twice = any(len({*side} - {MPI.PROC_NULL}) + side.count(MPI.PROC_NULL) != len(side) for side in peers)
        self.has_template = not (operation.of_neighbors and (operation.send == "typed" or twice))
        quantizable = operation.quantizable and self._dtype == FLOAT and self._op in (None, MPI.SUM)
        wires = [None, Wire("int8"), Wire("float8_e4m3fn", quantizes_result=False)]
        self._wire = draw.choice(wires) if quantizable and not special else None
        self.asked = draw.choice(["auto", "auto", *names_for(operation)])
        self._forms = [draw.randint(0, 3) for _ in range(2)]
        is_typed = "typed" in shapes
        self._datatypes = [[self._datatype(peer) for peer in side] for side in peers] if is_typed else [[], []]
        has_gaps = any(each in WITH_GAPS for side in self._datatypes for each in side)
        self._counts = [[draw.randint(0, 3) for _ in side] for side in peers] if has_gaps else None
        """The counts of all calls of the kind."""
        if special == ON_GPU:
            self._of_counts = [draw.choice(["i4", "i8"]) for _ in range(2)]
            self._of_displs = [draw.choice(["", "i4", "i8", "list", "distance"]) for _ in range(2)]
        if special == "epilogue":
            self._result, self._epilogue = EPILOGUES[draw.choice([*EPILOGUES, "converting"])]
            self._dtype, self._op = BF16, MPI.SUM
            self._in_place = self._in_place and self._result == "bfloat16"
            # Rows of whole packets or not, and rows that one group of threads takes only if there are many.
            self._hidden = 64 * draw.choice([1, 3, 64, 257, 300])

    def call(self, *, faulty: bool) -> tuple[str, str, Arguments]:
        """Return the fault of a call, ``algorithm=``, and the arguments."""
        self._arrays: list[Array] = []
        self._numbers: list[list[int]] = []
        count, operation = self._count(), self.operation
        root = self._root if operation.rooted else 0
        given: Any = SimpleNamespace(op=self._op, root=root, wire=self._wire)
        if self._special == "epilogue":
            most = self._draw.choice([40, 3000, 0])
            rows = self._draw.randint(1, most) if most else self._draw.choice([15, 16, 17, 131, 132, 133])
            count = rows * self._hidden
            given.send = self._array(count, BF16)
            given.receive = self._array(count // (2 if self._result == "uint8" else 1), dtype_named(self._result))
            given.epilogue = self._epilogue(self._array, rows, self._hidden)
        else:
            given.send = self._argument(0, operation.send, count)
            given.receive = self._argument(1, operation.receive, count)
        if operation.send == "by_recvcounts":  # recvcounts cut the input
            given.counts = self._numbers[0]
        if self._in_place and operation.rooted in ("", "receive") and self._own == self._rank:
            if operation.reduces and operation.send != "one":  # the receive buffer holds the input
                given.receive = self._arrays[1]
                given.receive.size, given.receive.data.ptr = self._arrays[0].size, 2 << SLOT
            given.send = MPI.IN_PLACE
        elif self._in_place and operation.rooted == "send" and self._own == self._rank:
            given.receive = MPI.IN_PLACE
        # The reader, but no template, refuses an overlap with a block for nobody.
        faults = ("", "size", "number") if any(MPI.PROC_NULL in side for side in self._peers) else FAULTS
        fault = self._draw.choice(faults) if faulty else ""
        self._break(fault, given)
        return fault, self.asked, Arguments(**vars(given))

    def _break(self, fault: str, given: Any) -> None:
        draw, one, other = self._draw, *(self._draw.choice(self._arrays) for _ in range(2))
        if self._special == ON_GPU and draw.choice(EITHER):  # the arrays that the call writes
            one, other = self._written
        if fault == "overlap" and one.size:  # just, or just not
            end, begin = other.nbytes, -one.nbytes
            steps = [*[0] * 4, one.itemsize, end - 1, end, end - one.itemsize, begin, begin + 1, begin + one.itemsize]
            one.data.ptr = max(0, other.data.ptr + draw.choice(steps))
        elif fault == "size":
            one.size += draw.choice([1, -1]) if one.size else 1
        elif fault == "number" and self._numbers:
            numbers = draw.choice(self._numbers)
            place = draw.randrange(len(numbers))
            numbers[place] = draw.choice([-1, 0, numbers[place] + 1, numbers[place] + 12, 1 << 31])
            if draw.randint(0, 3) == 0:
                del numbers[place]
        elif fault == "argument":
            changes = [
                ("send", given.receive), ("receive", given.send), ("send", None), ("receive", MPI.IN_PLACE),
                ("root", 1 - given.root), ("op", MPI.PROD), ("send", MPI.IN_PLACE), ("counts", None),
            ]  # fmt: skip
            setattr(given, *draw.choice(changes))

    def _datatype(self, peer: int) -> MPI.Datatype:
        return MPI.FLOAT if peer == self._own else self._draw.choice([*WITHOUT_GAPS, *WITHOUT_GAPS, *WITH_GAPS])

    def _count(self) -> int:
        return self._draw.randint(0, self._draw.choice([40, 40_000, 40_000_000]))

    def _array(self, count: int, dtype: np.dtype[Any]) -> Array:
        offset = self._draw.choice([0, 4, 128, 4096, 1 << 16])
        self._arrays.append(Array(((len(self._arrays) + 1) << SLOT) + offset, count, np.dtype(dtype)))
        return self._arrays[-1]

    def _argument(self, side: int, shape: str, count: int) -> Any:
        """Return a buffer argument. The block of the own rank has ``count`` elements."""
        peers, form, draw = self._peers[side], self._forms[side], self._draw
        if shape in ("one", "blocks"):
            array = self._array(count * (len(peers) if shape == "blocks" else 1), self._dtype)
            datatype = {"f4": MPI.FLOAT, "f8": MPI.DOUBLE}.get(self._dtype.str[1:])
            if form == 0 or datatype is None:
                return array
            return [array, count, datatype] if shape == "one" and form == 1 else [array, datatype]
        counts = [count if peer == self._own else self._count() for peer in peers]
        if self._counts is not None:
            counts = [1 if peer == self._own else each for peer, each in zip(peers, self._counts[side], strict=True)]
        self._numbers.append(counts)
        if shape == "by_recvcounts":
            return self._array(sum(counts), self._dtype)
        if self._special == ON_GPU:
            return self._with_counts_on_the_gpu(side)
        units = [each.extent for each in self._datatypes[side]] if shape == "typed" else [1] * len(peers)
        displs, end = [], 0
        for each, unit in zip(counts, units, strict=True):
            displs.append(end + draw.randint(0, 3))
            end = displs[-1] + each * unit
        if shape == "typed":
            self._numbers.append(displs)
            return [self._array(end // 4 + 8, FLOAT), counts, displs, self._datatypes[side]]
        array = self._array(end, self._dtype)
        if form == 0:
            return [array, counts]
        self._numbers.append(displs)
        return [[array, (counts, displs)], [array, counts, displs, None], (array, (np.array(counts), displs))][form - 1]

    def _distance(self) -> int:
        return self._draw.choice([-3, -1, 0, self._draw.randint(0, 1 << 40)])

    def _with_counts_on_the_gpu(self, side: int) -> list[Any]:
        size, how = self._size, self._of_displs[side]
        displs: Any = None
        room = self._draw.choice([self._draw.randint(0, 90_000), (1 << 31) - 1, 1 << 31])
        buffer = self._array(room, self._dtype)
        counts = self._array(size, np.dtype(self._of_counts[side]))
        self._written = buffer, counts  # at last of the receive buffer
        if how == "list":
            displs = [self._distance() for _ in range(size)]
        elif how == "distance":
            displs = self._distance()
        elif how:
            displs = self._array(size, np.dtype(how))
        return [buffer, (counts, displs)] if self._forms[side] % 2 else [buffer, counts, displs, None]


FACTS = {
    "": ["_root", "_op", "_wire", "_in_place", "_forms", "asked"],
    "epilogue": ["_root", "_op", "_in_place", "asked", "_hidden"],
    ON_GPU: ["_of_counts", "_of_displs", "_forms", "_dtype"],
}
"""In what two kinds may differ that are alike otherwise."""
KINDS = [(row, "") for row in OPERATIONS.values()] + [(ALLREDUCE, "epilogue"), (ALLTOALLV, ON_GPU)] * 3


@pytest.mark.parametrize(("operation", "special"), KINDS, ids=lambda each: str(each))
@settings(max_examples=14)
@given(draw=st.randoms(use_true_random=False, note_method_calls=True))
def test_a_call_that_is_found_is_launched_as_if_it_had_been_read(
    operation: Operation, special: str, draw: Random
) -> None:
    size = draw.randint(2, 8)
    rank = draw.randint(0, size - 1)
    peers, neighborhood = [tuple(range(size))] * 2, None
    if operation.of_neighbors:
        once = draw.choice(EITHER)
        for side in range(2):
            choices, number = [MPI.PROC_NULL, *range(size)], draw.randint(1, size)
            peers[side] = tuple(draw.sample(choices, number) if once else draw.choices(choices, k=number))
        assume(peers[0].count(rank) == peers[1].count(rank))
        neighborhood = Neighborhood(peers[1], peers[0])
    device = Device(
        rank, size, regions=draw.choice(EITHER), blocks=draw.choice([16, 132]), speed=draw.choice([0.5, 1.0])
    )
    calls = Calls(device, neighborhood)
    one, other = (Kind(draw, operation, special, rank, size, peers) for _ in range(2))
    if draw.choice(EITHER):
        fact, other = draw.choice(FACTS[special]), copy.copy(one)
        setattr(other, fact, getattr(Kind(draw, operation, special, rank, size, peers), fact))
    kinds = [one, other]
    made: list[tuple[str, Arguments]] = []
    first: dict[Kind, str] = {}
    for number in range(6):
        if number == 1 and draw.choice(EITHER):
            calls.mappings.add([(2 << SLOT) + (abs(each - rank) << 55) for each in range(size)], rank, 1 << 44)
        if number > 2 and draw.randint(0, 4) == 0:
            again = draw.choice(made)
            outcomes = [calls.make(operation, *again) for _ in range(draw.choice([1, 12]))]
            assert outcomes.count("read") <= 1
            assert outcomes[-1] == "kept" or outcomes[0] != "found" or len(outcomes) == 1
            continue
        kind = draw.choice(kinds) if number else kinds[0]
        fault, asked, given = kind.call(faulty=number > 0)
        made.append((asked, given))
        became = calls.make(operation, asked, given)
        if kind not in first:
            first[kind] = became if not fault else "faulty"
        elif not fault and first[kind] == "read" and kind.has_template:
            assert became != "read"


ROUTES = [
    (1, 7, 1, MPI.ANY_TAG),
    (1, 8, 1, MPI.ANY_TAG),
    (1, 7, 1, 8),
    (0, 7, 1, 8),
    (MPI.PROC_NULL, 0, 1, MPI.ANY_TAG),
]
LENGTHS = st.integers(0, 12) | st.integers(0, 10_000_000)


@settings(max_examples=50)
@given(data=st.data())
def test_a_message_that_is_found_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    """One that overlaps is not found, nor one after an empty message, which does not tell the bytes of an element."""
    calls, draw, known = Calls(Device(0, 2)), data.draw, set[Any]()
    kinds = [(draw(st.sampled_from(ROUTES)), draw(st.sampled_from(["f4", "f8", "i2"]))) for _ in range(2)]
    for number in range(6):
        route, dtype = kind = draw(st.sampled_from(kinds))
        place = 256 * (number + 6 * draw(st.integers(0, 1 << 16)))  # each message is another one
        send, receive = (Array((slot << SLOT) + place, draw(LENGTHS), np.dtype(dtype)) for slot in (1, 2))
        sent = None if route[0] == MPI.PROC_NULL else send
        if sent is not None and sent.size and receive.size and draw(st.booleans()):
            sent.data.ptr = receive.data.ptr + draw(st.sampled_from([1 - sent.nbytes, 0, receive.nbytes - 1]))
            assert calls.cache.find_message("Sendrecv", sent, receive, route) is None
            sent.data.ptr = receive.data.ptr - sent.nbytes
        became = [calls.exchange(sent, receive, route) for _ in range(draw(st.sampled_from([1, 1, 12]), "times"))]
        sizes = [each.size for each in (sent, receive) if each is not None]
        if any(sizes):
            assert became.count("read") <= (1 if kind not in known or len(became) > 1 else 0)
            assert became[-1] == "kept" or len(became) == 1
        if all(sizes):
            known.add(kind)


def given_of(name: str, count: int) -> Arguments:
    """Return a call of two ranks, of another size and at other addresses for each count."""

    def array(slot: int, count: int, dtype: Any = FLOAT) -> Array:
        return Array((slot << SLOT) + 256 * count, count, dtype)

    blocks = [[array(slot, 2 * count), [count, count - 3]] for slot in (1, 2)]
    made: Any = SimpleNamespace(op=None if name == "Alltoallw" else MPI.SUM)
    made.send, made.receive = array(1, count), array(2, count * (2 if name == "Allgather" else 1))
    if name == "epilogue":
        made.send, made.receive, residual = (array(slot, 1024 * count, BF16) for slot in (1, 2, 3))
        made.epilogue = rms_norm(residual, array(4, 1024, BF16))
    elif name == ON_GPU:
        counts = [array(slot, 2, np.dtype("i8")) for slot in (3, 4, 5)]
        made.send, made.receive = [blocks[0][0], (counts[0], counts[1])], [blocks[1][0], counts[2]]
    elif name == "Alltoallv":
        made.send, made.receive = blocks
    elif name == "Alltoallw":
        made.send, made.receive = ([*each, [0, 4 * count], [MPI.FLOAT, MPI.BYTE]] for each in blocks)
    elif name == "Reduce_scatter":
        made.counts, made.receive = [3, count - 3], array(2, 3)
    return Arguments(**vars(made))


def maker_of(name: str) -> Callable[[int], None]:
    """Return what makes a call of a known kind with another count."""
    calls, row = Calls(Device(0, 2)), OPERATIONS[{"epilogue": "Allreduce", ON_GPU: "Alltoallv"}.get(name, name)]
    made = [calls.make(row, "auto", given_of(name, count)) for count in (1000, 1001, 1002)]
    assert made == ["read", "found", "found"]

    def make(count: int) -> None:
        found: Any = calls.cache.find(row, "auto", *given_of(name, count))
        calls.device.launch(found)

    return make


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("Allreduce", 10), ("Allgather", 10), ("Alltoallv", 25), ("Alltoallw", 40), ("Reduce_scatter", 20)),
        *(("epilogue", 45), (ON_GPU, 35)),
    ],
)
def test_a_new_call_of_a_known_kind_enters_few_functions(name: str, most: int) -> None:
    make = maker_of(name)
    entered: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        make(1003)
    finally:
        sys.setprofile(before)
    assert len(entered) <= most, entered


def test_calls_of_many_sizes_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MAX_CACHED", 50)
    makes = [maker_of(name) for name in ("Allreduce", "Alltoallv", "epilogue", ON_GPU)]

    def blocks_after(counts: range) -> int:
        """Return the number of blocks of memory that Python uses after a call of each count."""
        for count, make in itertools.product(counts, makes):
            make(count)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(range(1003, 1200))
    assert blocks_after(range(1200, 2200)) - before < 1000  # less than one for each call


def test_a_call_without_elements_makes_no_form_in_place() -> None:
    """Two empty arrays have one address, and the same memory passed twice means in place."""
    calls = Calls(Device(0, 2))
    for count in (0, 4):
        send, receive = Array(1 << SLOT, 2 * count, FLOAT), Array(2 << SLOT, count, FLOAT)
        assert calls.make(OPERATIONS["Reduce_scatter_block"], "auto", Arguments(send, receive, MPI.SUM)) != "found"


def test_elements_that_lie_in_two_blocks_are_refused_as_if_the_call_had_no_template() -> None:
    calls = Calls(Device(0, 2))
    for count, became in ((4, "read"), (6, "found"), (3, "refused")):
        send, receive = Array(1 << SLOT, count, np.dtype("f8")), Array(2 << SLOT, 8 * count, np.dtype("u1"))
        assert calls.make(OPERATIONS["Alltoall"], "auto", Arguments(send, receive)) == became


def test_arrays_of_a_call_live_no_longer_than_the_call() -> None:
    calls, made = Calls(Device(1, 3)), 0

    def make(count: int, dtype: Any) -> Array:
        nonlocal made
        made += 1
        return Array(made << SLOT, count, dtype)

    for name in ("layer", "elements"):
        epilogue = EPILOGUES[name][1](make, 5, 64)
        given = Arguments(make(320, BF16), make(320, BF16), MPI.SUM, epilogue=epilogue)
        arrays = [weakref.ref(each) for each in (given.send, given.receive, *epilogue.arrays.values())]
        assert calls.make(ALLREDUCE, "auto", given) == "read"
        del given, epilogue
        gc.collect()
        assert [array() for array in arrays] == [None] * len(arrays)
        again = Arguments(make(448, BF16), make(448, BF16), MPI.SUM, epilogue=EPILOGUES[name][1](make, 7, 64))
        assert calls.make(ALLREDUCE, "auto", again) == "found"


def test_epilogues_of_different_kinds_have_different_keys() -> None:
    residual, weight = Array(1 << SLOT, 128, FLOAT), Array(2 << SLOT, 128, FLOAT)
    facts: list[dict[str, Any]] = [{}, {"eps": 0.5}, {"scale": 2.0}, {"scale": 3.0}, {"linear_bias": weight}]
    facts += [{"scales": weight, "scale_layout": layout} for layout in ("linear", "128x4")]
    epilogues = [make(residual, weight, **more) for make in (rms_norm, layer_norm) for more in facts]
    epilogues += [rms_norm(residual, Array(2 << SLOT, 64, FLOAT)), fp8(cast(Any, weight))]
    epilogues += [Elementwise("v * n", n=number) for number in (1, 1.0, 2.0)]
    keys = [epilogue.key()[0] for epilogue in epilogues]
    assert None not in keys and len({*map(repr, keys)}) == len(keys)
    assert rms_norm(np.zeros(4, np.float32), weight).key() == (None, ())  # whose memory no key tells


X, COUNTS, DISPLS = Array(1 << SLOT, 20, FLOAT), *(Array(at << SLOT, 2, np.dtype("i8")) for at in (2, 3))


@pytest.mark.parametrize(
    "spec",
    [
        *([X, (counts, DISPLS)] for counts in ([1, 2], None)),
        *([X, (COUNTS, displs)] for displs in ([0, 1 << 63], 1 << 63, -(1 << 63) - 1, [], True, [0, 0.5])),
        *([X, COUNTS, MPI.DOUBLE], [X, [COUNTS, 2]], [X, ([COUNTS, 2], None)], [MPI.IN_PLACE, COUNTS]),
        *([None, COUNTS, MPI.FLOAT], [np.zeros(4), COUNTS]),
        *([empty, counts, MPI.INT] for empty in (None, MPI.IN_PLACE) for counts in ([0, 0], 0)),
        *([X, counts] for counts in ([4, 1.5], [4, True], 21, -1)),
        *([X, [4, 1], [0]], [X, [4, 1], [0, 4], "f"], [X, [1, 2], [0, 8], [MPI.FLOAT]]),
        *([X, [1, 2], [0, 8], [MPI.FLOAT, other]] for other in (MPI.DATATYPE_NULL, "f")),
        *([X, *said, [PAIR] * 2] for said in (([1], [0, 8]), ([1, 2], None), ([1, 1.5], [0, 8]))),
        [None, [1, 2], [0, 8], [PAIR] * 2],
    ],
)
def test_other_lists_have_no_template(spec: Any) -> None:
    read = buffer_key(spec, counts_on_device=True)
    assert read is None or not is_descriptor(read)


def test_the_host_reads_counts_on_the_gpu_in_all_calls_but_an_alltoallv(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have changed. With such counts, an address may have more elements than it says."""
    assert descriptor_of([X, COUNTS]) is descriptor_of([X, (COUNTS, DISPLS)]) is None
    place = SimpleNamespace(managed=False, nbytes=1 << 20, device=0)
    monkeypatch.setattr(descriptors, "locate", lambda address: place)
    address = MPI.memory.fromaddress(1 << SLOT, 80)
    assert buffer_key([address, [1, 2], MPI.FLOAT], counts_on_device=True) is not None
    assert buffer_key([address, COUNTS, MPI.FLOAT], counts_on_device=True) is None
