from __future__ import annotations

import array
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.host.selection import goes_to_mpi, mpi_fast_path
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.mpi import descriptors
from mpicomm.mpi.arguments import Operand, overlaps, parse, require_disjoint
from mpicomm.mpi.buffers import any_overlap
from mpicomm.mpi.descriptors import ArrayDescriptor, BlocksDescriptor, descriptor_of, has_count
from mpicomm.mpi.spec import Shape, typed_blocks
from tests.helpers.fakes import fake_driver
from tests.helpers.fakes.fake_driver import OnGpu
from tests.helpers.references.reference_packing import pack

# mpi4py on only this process: a graph of one rank with n edges to itself has calls with n blocks.
SELF = MPI.COMM_SELF
MOST = 512  # bytes of a block, at most
OUTSIDE = 200  # every byte around a buffer; bytes in it are below 128
NOTHING = 255


@functools.cache
def loops(n: int) -> MPI.Distgraphcomm:
    return SELF.Create_dist_graph_adjacent([0] * n, [0] * n)


@functools.cache
def pair_of_ints() -> MPI.Datatype:
    return MPI.INT.Create_contiguous(2).Commit()


@functools.cache
def with_gaps() -> dict[str, MPI.Datatype]:
    """Datatypes by name; "flat" has no extent, and "backwards" begins before its address."""
    made = {
        "column": MPI.INT.Create_vector(2, 1, 2),
        "inner column": MPI.SHORT.Create_subarray([3, 4], [3, 1], [0, 1]),
        "backwards": MPI.SHORT.Create_hvector(2, 1, -2),
        "flat": MPI.INT.Create_resized(0, 0),
    }
    return {name: datatype.Commit() for name, datatype in made.items()}


class Place:
    """A buffer in the middle of other memory, so that MPI may read and write beyond its ends."""

    def __init__(self, dtype: str, length: int, kind: str) -> None:
        self.memory = np.full(2048, OUTSIDE, np.uint8)
        self.guarded = kind not in ("scalar", "bytes", "bytearray", "array.array", "dates", "strings", "struct", "none")
        length = {"fortran": length // 2 * 2, "strided": length + 3}.get(kind, length)
        element = np.dtype(dtype)
        # Not by slices: if they are empty, NumPy puts them at the start of the memory.
        inner: Any = np.ndarray(length * element.itemsize, np.uint8, self.memory, 1024)
        inner[:] = np.arange(inner.size) % 128
        flat: Any = np.ndarray(length, element, self.memory, 1024)
        objects: dict[str, Callable[[], Any]] = {
            "array": lambda: flat,
            "fortran": lambda: flat.reshape(2, -1, order="F"),
            "strided": lambda: flat[::2],
            "swapped": lambda: flat.view(element.newbyteorder(">")),
            "view": lambda: memoryview(flat),
            "bytes view": lambda: memoryview(inner),
            "scalar": lambda: np.float64(3.5),
            "bytes": lambda: b"abcdefgh",
            "bytearray": lambda: bytearray(b"abcdefgh"),
            "array.array": lambda: array.array("i", [1, 2, 3, 4]),
            "dates": lambda: np.zeros(4, "M8[s]"),
            "strings": lambda: np.zeros(4, "S3"),
            "struct": lambda: np.zeros(4, "i4,f4"),
            "on a GPU": lambda: self._on_gpu(inner),
            "none": lambda: None,
            "integer": lambda: 3,
            "text": lambda: "abc",
        }
        self.object = objects[kind]()

    def _on_gpu(self, memory: np.ndarray[Any, Any]) -> MPI.buffer:
        fake_driver.own(memory)
        self.owned = memory  # the driver forgets it with the array
        return MPI.memory.fromaddress(memory.ctypes.data, memory.nbytes)


KINDS = [
    *["array", "on a GPU"] * 9,
    *["fortran", "strided", "swapped", "view", "scalar", "bytes", "bytearray", "array.array", "dates"],
    *["bytes view", "on a GPU", "strings", "struct", "none", "integer", "text"],
]
places = st.builds(
    Place, st.sampled_from(["f8", "f4", "i4", "u1", "?", "c16", "i2", "g"]), st.integers(0, 12), st.sampled_from(KINDS)
)
integers = st.one_of(
    st.integers(-1, 6), st.integers(0, 3).map(np.int64), st.integers(0, 3).map(np.array), st.just(True)
)
wrong = st.sampled_from([1.0, "x", 2**70, [1.0], {}])
mostly_integers = st.one_of(integers, integers, integers, wrong)
datatypes = st.one_of(
    st.sampled_from([MPI.DOUBLE, MPI.INT, MPI.BYTE, MPI.CHAR, MPI.FLOAT.Dup(), "d", "i4", "B", "?"]),
    st.sampled_from(["nope", 7, None, "c16"]),
    st.sampled_from([*with_gaps().values()]),
)
pairs = st.tuples(st.one_of(st.none(), mostly_integers), st.one_of(st.none(), mostly_integers))
simple_counts = st.one_of(
    st.none(), mostly_integers, pairs, pairs.map(list), st.just(()), st.just((1, 2, 3)), st.just([1])
)


# These functions keep what they make, because Hypothesis takes long for the first draw from a strategy.
@functools.cache
def lists_of(n: int) -> st.SearchStrategy[Any]:
    exact = st.lists(st.integers(0, 4), min_size=n, max_size=n)
    return st.one_of(
        exact,
        exact,
        exact.map(np.array),
        exact.map(lambda numbers: np.array(numbers, "i4")),
        st.lists(mostly_integers, min_size=n, max_size=n),
        st.lists(integers, max_size=4),
    )


@functools.cache
def vector_counts(n: int) -> st.SearchStrategy[Any]:
    one = st.one_of(st.none(), mostly_integers, lists_of(n), lists_of(n), lists_of(n))
    return st.one_of(one, st.tuples(one, one), st.tuples(one, one), st.just((1, 2, 3)))


@functools.cache
def forms(counts: st.SearchStrategy[Any], datatype: st.SearchStrategy[Any]) -> st.SearchStrategy[Callable[[Any], Any]]:
    return st.one_of(
        st.just(lambda buffer: buffer),
        counts.map(lambda c: lambda buffer: [buffer, c]),
        datatype.map(lambda t: lambda buffer: (buffer, t)),
        st.tuples(counts, datatype).map(lambda x: lambda buffer: [buffer, *x]),
        st.tuples(counts, counts, datatype).map(lambda x: lambda buffer: [buffer, *x]),
        st.sampled_from([lambda buffer: [buffer], lambda buffer: [], lambda buffer: [buffer, 1, 1, "i", 1]]),
    )


Outcome = list[bytes] | type[Exception]


def kind_of(error: Exception) -> type[Exception]:
    return TypeError if isinstance(error, TypeError) else ValueError


CALLS: dict[Shape, Callable[[Any, list[Any], int], object]] = {
    "one": lambda spec, out, n: SELF.Sendrecv(spec, 0, 0, [out[0], MPI.BYTE], 0, 0),
    "blocks": lambda spec, out, n: loops(n).Neighbor_alltoall(spec, [out[0], MOST, MPI.BYTE]),
    "vector": lambda spec, out, n: loops(n).Neighbor_alltoallv(spec, out),
    "typed": lambda spec, out, n: loops(n).Neighbor_alltoallw(spec, [*out[:3], [MPI.BYTE] * n]),
}


def of_mpi4py(spec: Any, shape: Shape, n: int) -> Outcome:
    """Return the bytes of every block that mpi4py sends, or the kind of its error."""
    out = np.full(n * MOST, NOTHING, np.uint8)
    try:
        CALLS[shape](spec, [out, [MOST] * n, [rank * MOST for rank in range(n)], MPI.BYTE], n)
    except (TypeError, ValueError, KeyError, BufferError, OverflowError, MPI.Exception) as error:
        return kind_of(error)
    return [row[row != NOTHING].tobytes() for row in out.reshape(n, MOST)]


def of_operand(operand: Operand, n: int, memory: np.ndarray[Any, Any]) -> list[bytes]:
    if operand.derived is not None:
        start = memory.ctypes.data
        packed = [pack(each.layout, memory, each.address - start).tobytes() for each in operand.derived]
        return packed if len(packed) == n else cut(packed[0], n)
    assert operand.dtype is not None
    blocks = [operand.block(rank) for rank in range(n)]
    assert sum(block.count for block in blocks) == operand.total
    return [ctypes.string_at(block.pointer, block.count * operand.dtype.itemsize) for block in blocks]


def cut(packed: bytes, n: int) -> list[bytes]:
    """Return equal blocks of bytes."""
    nbytes = len(packed) // n
    return [packed[rank * nbytes :][:nbytes] for rank in range(n)]


def of_plain(plain: ArrayDescriptor | BlocksDescriptor, itemsize: int, shape: Shape, n: int) -> list[bytes]:
    """Return the blocks of a buffer that `descriptor_of` has read."""
    if len(plain) == 3:
        share, more = divmod(plain[1], n)
        counts = [plain[1]] * n if has_count(plain) else [share + (rank < more) for rank in range(n)]
        displs: Any = None
    else:
        counts, displs = list(plain[3]), plain[4]  # type: ignore[arg-type]
    places = [sum(counts[:rank]) for rank in range(n)] if displs is None else displs
    if shape == "typed":
        itemsize = 1
    return [
        ctypes.string_at(plain[0] + place * itemsize, count * itemsize)
        for place, count in zip(places, counts, strict=True)
    ]


@functools.cache
def typed_forms(n: int) -> st.SearchStrategy[Callable[[Any], Any]]:
    plain = st.sampled_from([MPI.INT, MPI.BYTE, MPI.DOUBLE, pair_of_ints(), MPI.DATATYPE_NULL])
    one = plain | st.sampled_from([*with_gaps().values()])
    several = st.lists(one, min_size=n, max_size=n)
    types = st.one_of(several, several, several.map(tuple), st.lists(one, max_size=4), one, st.sampled_from(["d", 7]))
    numbers = st.one_of(st.none(), lists_of(n), lists_of(n), lists_of(n))
    return st.one_of(
        types.map(lambda t: lambda buffer: [buffer, t]),
        st.tuples(st.tuples(numbers, numbers), types).map(lambda x: lambda buffer: (buffer, *x)),
        st.tuples(numbers, numbers, types).map(lambda x: lambda buffer: [buffer, *x]),
        st.tuples(numbers, types).map(lambda x: lambda buffer: [buffer, *x]),
        st.sampled_from([lambda buffer: [buffer], lambda buffer: []]),
    )


@pytest.mark.parametrize("shape", ["one", "blocks", "vector", "typed"])
@settings(max_examples=350, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_forms_equal_mpi4pys(shape: Shape, data: st.DataObject, n: int) -> None:
    n = 1 if shape == "one" else n
    if shape == "typed":  # MPI reads host memory itself, so these buffers are on a GPU
        place, form = Place("u1", data.draw(st.integers(0, 60)), "on a GPU"), data.draw(typed_forms(n))
    else:
        counts = vector_counts(n) if shape == "vector" else simple_counts
        place, form = data.draw(places), data.draw(forms(counts, datatypes))
    spec = form(place.object)
    try:
        operand = parse(spec, shape=shape, blocks=n, writable=False, name="sendbuf")
        if operand.dtype is None and operand.derived is None:
            return  # it is only for MPI
        ours: Outcome = of_operand(operand, n, place.memory)
    except TypeError:
        ours = TypeError
    except InvalidUsageError as error:
        ours = ValueError
        if not place.guarded and ("asked for" in str(error) or "the buffer is None" in str(error)):
            return  # mpi4py does not look, and MPI would read beyond the array
    theirs = of_mpi4py(spec, shape, n)
    if isinstance(theirs, list) and any(OUTSIDE in block for block in theirs):
        theirs = ValueError  # the deviation: beyond the ends of the buffer
    assert ours == theirs, spec


@pytest.fixture(scope="module", autouse=True)
def plain() -> Iterator[None]:
    descriptors._readers[OnGpu] = lambda a: (a.memory.ctypes.data, a.memory.size, (a.memory.dtype, 0))
    yield
    del descriptors._readers[OnGpu]


@functools.cache
def known_forms(shape: Shape, n: int) -> st.SearchStrategy[Callable[[Any], Any]]:
    blocks = st.lists(st.integers(0, 4), min_size=n, max_size=n)
    numbers = st.one_of(blocks, blocks.map(tuple), blocks.map(np.array))
    datatype: st.SearchStrategy[Any] = st.sampled_from([MPI.INT, MPI.UINT8_T, MPI.BYTE, MPI.INT32_T])
    counts, displs = st.integers(0, 12), st.none()
    if shape == "typed":
        datatype = st.lists(st.one_of(datatype, st.just(pair_of_ints())), min_size=n, max_size=n)
    if shape in ("vector", "typed"):
        counts, displs = numbers, numbers if shape == "typed" else st.none() | numbers
    return st.one_of(
        st.tuples(counts, displs, datatype).map(lambda x: lambda buffer: [buffer, *x]),
        st.tuples(st.tuples(counts, displs), datatype).map(lambda x: lambda buffer: (buffer, *x)),
        st.tuples(counts, datatype).map(lambda x: lambda buffer: (buffer, *x)),
        datatype.map(lambda x: lambda buffer: [buffer, x]),
        counts.map(lambda x: lambda buffer: [buffer, x]),
    )


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(["one", "blocks", "vector", "typed"]), st.integers(1, 3))
def test_known_calls_read_what_mpi4py_reads(data: st.DataObject, shape: Shape, n: int) -> None:
    content = np.arange(24, dtype=data.draw(st.sampled_from(["i4", "u1"])))
    array = data.draw(st.sampled_from([OnGpu(content), MPI.memory.fromaddress(content.ctypes.data, content.nbytes)]))
    n = 1 if shape == "one" else n
    spec = data.draw(known_forms(shape, n))(array)
    read = descriptor_of(spec)
    # A known call has the kinds of an earlier call of its operation, and these tell the shapes apart.
    named = {"vector": "blocks", "typed": "types"}.get(shape)
    assume(read is not None and (read[2][-1] == named if named else len(read) == 3))
    assert read is not None
    try:
        operand = parse(spec, shape=shape, blocks=n, writable=False, name="sendbuf")
    except InvalidUsageError:
        return  # the templates of known calls compare the blocks with the buffer
    itemsize = 1 if operand.dtype is None else operand.dtype.itemsize
    assert of_plain(read, itemsize, shape, n) == of_mpi4py(spec, shape, n), spec


STRAIGHT = [row for row in OPERATIONS.values() if not row.of_neighbors and row.send != "by_recvcounts"]
OPS = st.sampled_from([MPI.SUM, MPI.SUM, MPI.MAX, MPI.MAXLOC, mpicomm.AVG, mpicomm.Op("a + b"), None])


def bare(buffer: Any) -> Any:
    return buffer


WHOLE = np.zeros(16)
ARRAYS: dict[str, Callable[[str, int, int], Any]] = {
    "new": lambda dtype, length, start: np.zeros(length, dtype),
    "part": lambda dtype, length, start: WHOLE[start:][:length],
    "masked": lambda dtype, length, start: np.ma.zeros(length, dtype),
    "on a GPU": lambda dtype, length, start: OnGpu(np.zeros(4)),
    "large": lambda dtype, length, start: np.zeros(1 << 20, dtype),
}


@functools.cache
def straight_forms(shape: Shape, n: int) -> st.SearchStrategy[Callable[[Any], Any]]:
    counts = lists_of(n) if shape in ("vector", "typed") else st.integers(0, 4)
    return st.just(bare) | forms(st.one_of(st.none(), counts, st.tuples(counts, counts)), datatypes)


straight_arrays = st.tuples(
    st.sampled_from([*["new"] * 4, *["part"] * 2, *ARRAYS]),
    st.sampled_from(["f8", "f8", "i4", "f2", "f2", ">f8", "f4,f4"]),
    st.integers(0, 8),
)


@settings(max_examples=700, deadline=None)
@given(st.data(), st.sampled_from(STRAIGHT), st.integers(1, 3))
def test_calls_that_go_straight_to_mpi_are_right(data: st.DataObject, row: Operation, n: int) -> None:
    """The checks of small host calls let pass only what `Call` gives to MPI, too, or mpi4py refuses itself."""
    buffers: list[Any] = []
    alike = data.draw(st.booleans(), "alike")
    for shape in (row.send, row.receive):
        if not (alike and buffers):
            form = data.draw(straight_forms(shape, n))
            array, dtype, length = data.draw(straight_arrays, "array")
        buffers.append(form(ARRAYS[array](dtype, length, data.draw(st.integers(0, 8)))))
        if data.draw(st.integers(0, 7)) == 0:
            buffers[-1] = data.draw(st.sampled_from([None, MPI.IN_PLACE]))
    send, receive = None if row.rooted == "bcast" else buffers[0], buffers[1]
    rank, root = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    op: Any = data.draw(OPS) if row.reduces else None
    nodes, blocking = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    if not mpi_fast_path(n, rank, nodes)[row.methods[not blocking]](send, receive, op, root):
        return
    try:
        call = Call(row, Arguments(send, receive, op, root), rank, n)
    except (InvalidUsageError, TypeError):
        given = (send, row.send), (receive, row.receive)
        of_memory = [(each, shape) for each, shape in given if each is not None and each is not MPI.IN_PLACE]
        is_refused = not all(isinstance(of_mpi4py(*each, n), list) for each in of_memory)
        if row.reduces and len(of_memory) == 2 and not is_refused:  # mpi4py also compares both buffers
            with pytest.raises((TypeError, ValueError, KeyError, MPI.Exception)):
                SELF.Allreduce(send, receive, op)
        else:
            assert is_refused or len(of_memory) < 2
    else:
        assert goes_to_mpi(call, n, nodes, blocking=blocking)


READ_ONLY = {
    "column": np.zeros((4, 3))[:, 1], "bytes": bytes(8), "memoryview": memoryview(bytes(8)), "scalar": np.float64(1),
    "broadcast": np.broadcast_to(np.zeros(1), (4,)), "bytes in a list": [bytes(8), 2, MPI.INT],
    "IN_PLACE": MPI.IN_PLACE,
}  # fmt: skip


@pytest.mark.parametrize("name", READ_ONLY)
def test_receive_buffers_that_cannot_be_written_are_refused(name: str) -> None:
    with pytest.raises((BufferError, MPI.Exception)):
        SELF.Sendrecv(np.zeros(8), 0, 0, READ_ONLY[name], 0, 0)
    with pytest.raises(InvalidUsageError, match="recvbuf"):
        parse(READ_ONLY[name], writable=True, name="recvbuf")


X, G, GAPS, FLAT = np.zeros(4), OnGpu(np.zeros(20, "u1")), with_gaps()["column"], with_gaps()["flat"]
FAULTS: list[tuple[Shape, int, Any, str]] = [
    ("one", 1, [X, 5], "elements 0 to 5 are asked for, but the buffer holds 4: "),
    ("one", 1, [X, (3, 2)], "elements 0 to 3 are asked for, but the buffer holds 2 from its displ"),
    ("one", 1, [X, (1, 5)], "displacement 5 lies outside the buffer, which holds 4 elements"),
    ("one", 1, [X, -1], "count -1 is negative"),
    ("one", 1, [X, 2**63], f"count {2**63} does not fit into 64 bits"),
    ("one", 1, [X, (1, 2, 3)], r"\(1, 2, 3\) has 3 items: pass \(count, displacement\)"),
    ("one", 1, [X, "nope"], "cannot map code 'nope' to MPI datatype: pass"),
    ("one", 1, [X, 1, 7], "7 is no datatype"),
    ("one", 1, [X, MPI.DATATYPE_NULL], "the datatype is MPI.DATATYPE_NULL"),
    ("one", 1, [np.zeros(3, "u1"), "i4"], "3 bytes are no multiple of the 4 bytes of an element: pass a count"),
    ("one", 1, [None, 1, "i4"], "the buffer is None, but its count is 1"),
    ("one", 1, [None, 1], r"None as the buffer needs a datatype: \[None, count, type\]"),
    ("blocks", 2, np.zeros(7), "7 elements are no multiple of 2, one block for each rank: pass a count"),
    ("one", 1, np.zeros(8)[::2], r" of shape \(4,\) with strides \(16,\) is neither C- nor Fortran-contiguous"),
    ("one", 1, np.zeros(4, "M8[s]"), r" has elements of type datetime64\[s\], for which neither MPI nor mpicomm"),
    ("one", 1, np.zeros(4, ">f8"), r" has elements of type >f8, .* move it as bytes with \[buffer, MPI.BYTE\]"),
    ("vector", 3, [X, [1, 2]], "2 counts for 3 ranks: pass one for each"),
    ("vector", 3, [X, [2, 2, 1]], "elements 4 to 5 are asked for, but the buffer holds 4: "),
    ("vector", 3, [X, ([1, 1, 1], [0, -1, 1])], "elements -1 to 0 are asked for"),
    ("vector", 3, [None, [0, 1, 0], "d"], "the buffer is None, but its count is 1"),
    ("one", 1, 3, " is a int, which has neither"),
    ("one", 1, [X, 1.0], "count 1.0 is no integer"),
    ("one", 1, [X, (1, "x")], "displacement 'x' is no integer"),
    ("one", 1, [G, 2, GAPS], "2 elements of the datatype reach from byte 0 to byte 24 of a buffer of 20 bytes"),
    ("one", 1, [G, (1, 1), FLAT], "elements of a datatype with the extent 0 cannot be counted: pass a count"),
    ("typed", 2, [G, [MPI.INT]], "1 datatypes for 2 ranks: pass one for each"),
    ("typed", 2, [G, [1, 1], [0, 0], ["d", "d"]], "'d' is no datatype: pass an MPI.Datatype for each rank"),
    ("typed", 2, [G, [1, 1], [0, 0], 3], "3 are no datatypes: pass a sequence with an MPI.Datatype for each rank"),
    ("typed", 1, [G, [1], [0], [MPI.DATATYPE_NULL]], "datatype for rank 0 is MPI.DATATYPE_NULL, but its count is 1"),
    ("typed", 1, [G, [-2], [0], [MPI.INT]], "count -2 is negative"),
]


@pytest.mark.parametrize(("shape", "blocks", "spec", "text"), FAULTS, ids=[text for *_, text in FAULTS])
def test_errors_name_argument_value_and_way_out(shape: Shape, blocks: int, spec: Any, text: str) -> None:
    with pytest.raises((TypeError, InvalidUsageError), match=f"^sendbuf:? ?(the )?{text.lstrip()}"):
        parse(spec, shape=shape, blocks=blocks, writable=False, name="sendbuf")


def test_a_rank_that_gets_nothing_may_have_the_null_datatype() -> None:
    spec = [G, [0, 1], [0, 0], [MPI.DATATYPE_NULL, GAPS]]
    derived = parse(spec, shape="typed", blocks=2, writable=True, name="x").derived
    assert derived is not None and [block.layout.nbytes for block in derived] == [0, 8]


def test_bottom_is_only_for_mpi() -> None:
    operand = parse([MPI.BOTTOM, 3, MPI.INT], writable=True, name="recvbuf")
    assert operand.dtype is None and operand.mpi_type == MPI.INT and operand.count == 3
    assert parse([MPI.BOTTOM, [3, 4], MPI.INT], shape="vector", blocks=2, writable=True, name="recvbuf").dtype is None
    for spec in (MPI.BOTTOM, [MPI.BOTTOM, 3]):
        with pytest.raises(KeyError, match="cannot map None"):
            SELF.Sendrecv(np.zeros(8), 0, 0, spec, 0, 0)
        with pytest.raises(InvalidUsageError, match=r"recvbuf.*BOTTOM"):
            parse(spec, writable=True, name="recvbuf")
        with pytest.raises(InvalidUsageError, match=r"recvbuf.*BOTTOM"):
            parse(spec, shape="vector", blocks=2, writable=True, name="recvbuf")
    for counts, displs in ((None, [0]), ([0], None), (None, None)):
        with pytest.raises(ValueError, match="BOTTOM"):
            SELF.Alltoallw(spec := [MPI.BOTTOM, counts, displs, [MPI.BYTE]], [np.zeros(8), [0], [0], [MPI.BYTE]])
        with pytest.raises(InvalidUsageError, match=r"sendbuf: .*BOTTOM"):
            typed_blocks(spec, size=1, name="sendbuf", peer="rank")


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 1)), min_size=2, max_size=5))
def test_ranges_of_different_owners_overlap(drawn: list[tuple[int, int, int]]) -> None:
    owners: dict[int, set[int]] = {}
    for begin, nbytes, owner in drawn:
        for byte in range(begin, begin + nbytes):
            owners.setdefault(byte, set()).add(owner)
    ranges = [(begin, begin + nbytes, owner) for begin, nbytes, owner in drawn]
    assert any_overlap(ranges) == any(len(each) > 1 for each in owners.values())


def operand_of(spec: Any) -> Operand:
    return parse(spec, writable=True, name="recvbuf")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_only_elements_overlap(data: st.DataObject) -> None:
    a = np.zeros(12, "i4")
    touched, operands = [], []
    for _ in range(2):
        counts = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
        displs = [data.draw(st.integers(0, 12 - count)) for count in counts]
        touched.append({place + i for count, place in zip(counts, displs, strict=True) for i in range(count)})
        operands.append(parse([a, (counts, displs)], shape="vector", blocks=3, writable=True, name="sendbuf"))
    assert overlaps(*operands) == bool(touched[0] & touched[1])


def test_send_and_receive_memory_are_separate() -> None:
    a = np.zeros(10)
    require_disjoint(operand_of(a[:5]), operand_of(a[5:]))
    require_disjoint(operand_of(a), operand_of(a), reduction=True)
    for send, receive, reduction in ((a, a, False), (a[:6], a[4:], True), (a[:6], a, True), (a, a.view("i8"), True)):
        with pytest.raises(InvalidUsageError, match=r"recvbuf and recvbuf overlap: pass MPI\.IN_PLACE"):
            require_disjoint(operand_of(send), operand_of(receive), reduction=reduction)
