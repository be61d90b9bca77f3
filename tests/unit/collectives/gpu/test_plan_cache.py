"""Which arguments a cache knows again, and how a known call is enqueued. test_templates.py has the launches."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments
from mpicomm.collectives.gpu.algorithms.base import AnyPlan
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.epilogues import Elementwise
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.descriptors import buffer_key, descriptor_of
from mpicomm.sharing.segments import Mappings


class Array:
    """The attributes of CuPy's arrays that distinguish them."""

    def __init__(self, pointer: int, shape: tuple[int, ...] = (4,), dtype: str = "f4", order: str = "C") -> None:
        like = np.zeros(shape, dtype, order="F" if order == "F" else "C")
        if order == "pieces":
            like = np.zeros((*shape, 2), dtype)[..., 0]
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.shape, self.strides, self.size, self.dtype = like.shape, like.strides, like.size, like.dtype
        self.itemsize = like.itemsize
        self._c_contiguous, self._f_contiguous = like.flags.c_contiguous, like.flags.f_contiguous


class Dtype(str):
    """The type of elements of a `Tensor`."""

    __slots__ = ()
    is_complex = True  # so that a tensor may be a view with conjugate numbers


class Tensor:
    """The attributes of PyTorch's tensors that distinguish them."""

    itemsize = 4

    def __init__(
        self, pointer: int | None, count: int = 4, dtype: str = "float32", step: int = 1, **says: bool
    ) -> None:
        self._pointer, self._step = pointer, step
        self.is_cuda, self.requires_grad = not says.get("on_host", False), says.get("requires_grad", False)
        self.shape, self.dtype = (count,), Dtype(dtype)
        self.get_device, self.numel, self.dim, self.stride = (
            (lambda: 0),
            (lambda: count),
            (lambda: 1),
            (lambda: (step,)),
        )
        self.is_contiguous = lambda: step == 1
        self.is_conj, self.is_neg = (lambda: says.get("conj", False)), (lambda: says.get("neg", False))

    def data_ptr(self) -> int:
        if self._pointer is None:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self._pointer


class Parameter(Tensor):
    """PyTorch's class of the weights of models."""


class Other(Tensor):
    """A subclass with memory of another kind, perhaps."""


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Array` be CuPy's array, and `Tensor` and `Parameter` PyTorch's."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    monkeypatch.setitem(sys.modules, "torch.nn", SimpleNamespace(Parameter=Parameter))


class Known:
    """The known calls of a device that carries nothing out."""

    def __init__(self) -> None:
        self.enqueued: list[tuple[Any, Any, bool]] = []
        """The plan, the stream, and whether the ranks met on the host before."""
        self.runs, self.done = True, False
        self.backend: Any = SimpleNamespace(
            stream=lambda stream, array: stream or array,
            completes=False,
            check=lambda: None,
            prepare_thread=lambda: None,
            needs_host_barrier=lambda stream, array: False,
        )
        self.session: Any = SimpleNamespace(mappings=Mappings(), backend=self.backend, require_usable=lambda what: None)
        event = SimpleNamespace(is_done=lambda: self.done)
        completions = SimpleNamespace(acquire=lambda: event)
        self.engine: Any = SimpleNamespace(enqueue=self._enqueue, completions=completions)
        session: Any = self.session
        self.cache = PlanCache(session, self.engine)

    def _enqueue(self, plan: Any, stream: Any, event: Any = None, host_barrier: bool = False) -> bool:
        self.enqueued.append((plan, stream, host_barrier))
        return self.runs

    def add(self, operation: str, given: Arguments, **more: Any) -> Any:
        plan = AnyPlan()
        plan.text_format = operation
        self.cache.add(plan, (OPERATIONS[operation], "auto", *given), **{"by_output": False, **more})
        return plan

    def find(self, operation: str, given: Arguments) -> Any:
        return self.cache.find(OPERATIONS[operation], "auto", *given)


SUM = Arguments(Array(16), Array(64), MPI.SUM)


def test_arrays_are_known_by_their_memory() -> None:
    kinds: list[tuple[Any, Any]] = [(Array, (5,)), (Tensor, 5), (Parameter, 5)]
    for kind, five in kinds:
        found = [descriptor_of(each) for each in (kind(16), kind(32), kind(16, five), kind(16, dtype="int32"))]
        assert None not in found and len({*map(str, found)}) == 4
        assert descriptor_of(kind(16)) == found[0]
    assert descriptor_of(Parameter(16)) == descriptor_of(Tensor(16))
    assert descriptor_of(Array(16, (2, 3), order="F")) == descriptor_of(Array(16, (2, 3)))
    for unknown in (
        Array(16, (2, 3), order="pieces"), Tensor(16, step=2), Tensor(16, requires_grad=True), Tensor(16, conj=True),
        Tensor(16, neg=True), Tensor(16, on_host=True), Tensor(None), Parameter(16, requires_grad=True), Other(16),
    ):  # fmt: skip
        assert descriptor_of(unknown) is None


VECTORS = [MPI.FLOAT.Create_vector(2, 1, length) for length in (3, 3, 4)]
ON_GPU = [Array(at, (2,), "i4") for at in (32, 48)]
SAID: list[tuple[Any, ...]] = [
    *((said,) for said in (4, 5, "bfloat16", (4, 0), [4, 0], [4, 1], np.array([[4, 2]]), *VECTORS, *ON_GPU)),
    *((4, "bfloat16"), (4, MPI.FLOAT), (4, MPI.INT), (None, MPI.INT), ([4, 0], [0, 4]), ([4, 0], [0, 5])),
    *((([4, 0], [0, 4]), datatype) for datatype in (MPI.FLOAT, VECTORS[0], [MPI.FLOAT] * 2, [MPI.FLOAT, VECTORS[0]])),
    *((np.array([4, 2]),), (np.array([4, 3]),), (2, VECTORS[0])),
]


@pytest.mark.parametrize("kind", [Array, Tensor])
def test_what_comes_with_an_array_is_told_apart(kind: Any) -> None:
    """Two arguments with one key would be one call. Derived datatypes differ, even if their elements do not."""
    keys = [buffer_key([kind(16), *said], counts_on_device=True) for said in SAID]
    assert None not in keys
    for number, (said, key) in enumerate(zip(SAID, keys, strict=True)):
        assert keys.index(key) == number
        assert buffer_key((kind(16), *said), counts_on_device=True) == key
        assert buffer_key([kind(32), *said], counts_on_device=True) not in keys


def test_what_a_call_says_is_told_apart_as_it_is_now() -> None:
    """Also in a call that has to be read: epilogues by their operands, and arrays and counts that changed in place."""
    known, arrays, counts = Known(), (Array(16), Array(64)), [4, 0]
    operands = (2.0, 128), (2.0, 256), (3.0, 128)
    epilogues = [Elementwise("v * w + bias[i]", w=weight, bias=Array(at)) for weight, at in operands]
    calls = [("Allreduce", Arguments(*arrays, MPI.SUM, epilogue=epilogue)) for epilogue in (None, *epilogues)]
    calls += [("Reduce_scatter", Arguments(*arrays, MPI.SUM, counts=each)) for each in ([1, 3], [2, 2])]
    calls += [("Alltoallv", Arguments([arrays[0], counts], [arrays[1], counts]))]
    for _ in range(3):
        assert [known.find(*call) for call in calls] == [None] * len(calls)
        plans = [known.add(*call) for call in calls]
        assert [known.find(*call) for call in calls] == plans
        calls = calls[-1:]
        arrays[0].data.ptr, counts[1] = (32, 0) if arrays[0].data.ptr == 16 else (32, 1)


@pytest.mark.parametrize(
    ("name", "in_pairs"), [("Alltoallw", False), ("Alltoallw", True), ("Neighbor_alltoallw", False)]
)
def test_calls_with_datatypes_are_told_apart_as_they_are_now(name: str, in_pairs: bool) -> None:
    """A change in any of the lists makes another call, and the call before it is known again after it."""
    column = MPI.FLOAT.Create_vector(2, 1, 3)

    def call(**changes: Any) -> tuple[str, Arguments]:
        x, y, numbers = Array(1 << 20, (64,)), Array(1 << 30, (64,)), [[1, 1], [0, 128], [1, 1], [0, 128]]
        types = [[column, MPI.FLOAT], [MPI.FLOAT, column]]
        x, y = changes.get("x", x), changes.get("y", y)
        for side, place, value in changes.get("numbers", ()):
            numbers[side][place] = value
        for side, datatype in changes.get("types", ()):
            types[side][1] = datatype
        if in_pairs:
            return name, Arguments((x, numbers[:2], types[0]), (y, numbers[2:], types[1]))
        return name, Arguments([x, *numbers[:2], types[0]], [y, *numbers[2:], types[1]])

    known, shown = Known(), call()
    plan = known.add(*call())
    assert known.find(*shown) is known.find(*call()) is plan
    others: list[dict[str, Any]] = [
        {"x": Array(1 << 21, (64,))}, {"y": Array(1 << 31, (64,))}, {"x": Array(1 << 20, (65,))},
        {"y": Array(1 << 30, (32,), "f8")}, {"x": Array(1 << 20, (8, 8), order="pieces")},
        *({"numbers": [(side, place, 2)]} for side in range(4) for place in range(2)),
        *({"types": [(side, MPI.FLOAT.Create_vector(2, 1, 4))]} for side in range(2)),
    ]  # fmt: skip
    for each in others:
        assert known.find(*call(**each)) is None
        assert known.find(*call()) is plan
    for numbers in ([(0, 0, "1")], [(1, 1, np.array([0, 128]))]):
        assert known.find(*call(numbers=[numbers[0]])) is None
    counts = shown[1].send[1]
    (counts[0] if in_pairs else counts)[0] = 3
    assert known.find(*shown) is None
    assert known.find(*call()) is plan
    for wrong in ((), (1, 2, 3), 4):
        assert known.find(name, Arguments([Array(16), wrong, [column]], [Array(64), wrong, [column]])) is None
    column.Free()
    assert known.find(*call()) is None


def test_what_cannot_be_told_apart_is_never_known() -> None:
    known = Known()
    unknown: list[Any] = [[], [Array(16), [0.5]], [Array(16), np.zeros(2)], [np.zeros(4), 4], np.zeros(4)]
    calls = [("Allreduce", Arguments(argument, Array(64), MPI.SUM)) for argument in unknown]
    # If other ranks take more and less than before, the call would look the same to one rank.
    calls += [("Reduce_scatter", Arguments(Array(16), Array(64), MPI.SUM))]
    # The host reads counts on the device in all calls but an Alltoallv, and they may have changed.
    calls += [("Allgatherv", Arguments(Array(160), [Array(320), Array(48)]))]
    for call in calls:
        known.add(*call)
        assert known.find(*call) is None
    known.add("Bcast", Arguments(None, Array(16), root=0))
    assert known.find("Bcast", Arguments(None, Array(16), root=[0])) is None  # type: ignore[arg-type]


def test_a_datatype_with_the_handle_of_a_freed_one_is_not_taken_for_that() -> None:
    array, ones, nowhere, found = Array(64), [1, 1], [0, 32], dict[int, set[int]]()
    kept = []  # so that each object has an id of its own
    for blocklength in range(1, 33):
        derived = MPI.FLOAT.Create_contiguous(blocklength)
        for _ in range(2):
            plain = descriptor_of([array, ones, nowhere, [derived, derived]])
            assert plain is not None and plain[3:] == ((4 * blocklength,) * 2, (0, 32))
        found.setdefault(derived.handle, set()).add(blocklength)
        derived.Free()
        assert descriptor_of([array, ones, nowhere, [derived, derived]]) is None
        kept.append(derived)
    assert max(map(len, found.values())) > 1


def test_calls_are_forgotten_with_every_change_of_symmetric_memory() -> None:
    known = Known()
    mappings = known.session.mappings
    for change in (partial(mappings.add, [0, 64], 1, 16), partial(mappings.remove, 1)):
        plan = known.add("Allreduce", SUM)
        assert known.find("Allreduce", SUM) is plan
        change()
        assert known.find("Allreduce", SUM) is None


def test_a_known_call_is_on_the_current_stream_of_the_library_it_was_on() -> None:
    send, receive, ignored = Array(16), Tensor(64), Array(128)
    for given, expected in (
        (Arguments(send, receive), send),
        (Arguments(MPI.IN_PLACE, receive), receive),
        (Arguments(send, None), send),
        (Arguments([send, 4], receive), send),
        (Arguments(MPI.IN_PLACE, (receive, 4)), receive),
        # A Scatter on a rank that is not the root.
        (Arguments(ignored, receive), receive),
        (Arguments([None, [1, 2], [0, 1], "f"], receive), receive),
    ):
        known = Known()
        known.add("Reduce", given, by_output=expected is receive)
        for stream in (None, 5):
            known.cache.enqueue(known.find("Reduce", given), stream, given.send, given.receive)
        assert [where for _, where, _ in known.enqueued] == [expected, 5]


def test_the_request_of_a_known_call_says_when_the_call_is_done() -> None:
    known = Known()
    plan = known.add("Allreduce", SUM)

    def start() -> MPI.Request:
        return known.cache.start(plan, 7, SUM.send, SUM.receive)

    request = start()
    assert not request.Test()
    known.done = True
    assert request.Test()
    known.runs = known.done = False  # in a capture
    assert start().Test()


def test_a_blocking_call_waits_beside_a_stream_that_several_threads_use() -> None:
    known, said = Known(), list[Any]()
    plan, backend = known.add("Allreduce", SUM), known.backend
    backend.side_streams = SimpleNamespace(
        mark=lambda stream: ("behind", stream), acquire=lambda mark: ("beside", mark), release=said.append
    )
    backend.check = lambda: said.append("check")
    backend.synchronize = lambda stream: said.append(["waits for", stream, len(known.enqueued)])
    for of_device, of_stream in ((False, False), (True, False), (True, True)):
        backend.needs_host_barrier = lambda stream, array, several=of_device: several
        backend.needs_side_stream = lambda stream, array, several=of_stream: several
        known.cache.enqueue(known.find("Allreduce", SUM), 7, SUM.send, SUM.receive, blocking=True)
    side = "beside", ("behind", 7)
    assert known.enqueued == [(plan, 7, False), (plan, 7, True), (plan, side, True)]
    assert said == [["waits for", side, 3], side, "check"]
    known.cache.enqueue(plan, 7, SUM.send, SUM.receive)
    assert known.enqueued[3:] == [(plan, 7, False)]  # a nonblocking call must not wait


@pytest.mark.parametrize("completes", [False, True])
@pytest.mark.parametrize("by_address", [False, True])
def test_a_blocking_call_waits_where_calls_complete_on_return_and_on_an_address(
    by_address: bool, completes: bool
) -> None:
    """No library knows the stream of the caller's next work on memory that an address names."""
    known, waited = Known(), list[Any]()
    known.backend.completes, known.backend.complete = completes, waited.append
    known.backend.stream = lambda stream, array: stream or "current"
    operand = SimpleNamespace(memory=SimpleNamespace(by_address=by_address))
    read: Any = SimpleNamespace(operands=[operand], in_place=False)
    plan = known.add("Allreduce", SUM, read=read)
    for blocking in (True, False):
        for stream in (None, 7):
            known.cache.enqueue(plan, stream, SUM.send, SUM.receive, blocking=blocking)
    assert waited == (["current", 7] if completes else ["current"] * by_address)


def test_a_known_call_is_refused_if_the_communicator_is_unusable() -> None:
    known = Known()
    plan = known.add("Allreduce", SUM)

    def refuse(what: str) -> None:
        raise InvalidUsageError("Allreduce: the communicator was freed; create another")

    known.session.require_usable = refuse
    with pytest.raises(InvalidUsageError, match="freed"):
        known.cache.enqueue(plan, 7, SUM.send, SUM.receive)
    assert known.enqueued == []
