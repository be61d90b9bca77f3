from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments
from mpicomm.collectives.gpu import plan_cache as known_calls
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.errors import InvalidUsageError
from mpicomm.symmetric.registry import Mappings


class Array:
    """What CuPy's arrays have of what tells them apart."""

    def __init__(self, pointer: int, shape: tuple[int, ...] = (4,), dtype: str = "f4", order: str = "C") -> None:
        like = np.zeros(shape, dtype, order="F" if order == "F" else "C")
        if order == "pieces":
            like = np.zeros((*shape, 2), dtype)[..., 0]
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.shape, self.strides, self.size, self.dtype = like.shape, like.strides, like.size, like.dtype
        self.itemsize = like.itemsize
        self._c_contiguous = like.flags.c_contiguous


class Tensor:
    """What PyTorch's tensors have of it."""

    def __init__(
        self, pointer: int | None, count: int = 4, dtype: str = "float32", step: int = 1, **says: bool
    ) -> None:
        self._pointer, self._step = pointer, step
        self.is_cuda = not says.get("on_host", False)
        self.shape, self.dtype = (count,), dtype
        self._says = says
        self.requires_grad = says.get("requires_grad", False)

    def data_ptr(self) -> int:
        if self._pointer is None:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self._pointer

    itemsize = 4

    def get_device(self) -> int:
        return 0

    def numel(self) -> int:
        return self.shape[0]

    def stride(self) -> tuple[int, ...]:
        return (self._step,)

    def is_contiguous(self) -> bool:
        return self._step == 1

    def is_conj(self) -> bool:
        return self._says.get("conj", False)

    def is_neg(self) -> bool:
        return self._says.get("neg", False)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))


def arguments(send: Any, receive: Any, op: MPI.Op | None = MPI.SUM, **others: Any) -> Arguments:
    return Arguments(send, receive, op, **others)


class Known:
    """What is known on a device that carries nothing out."""

    def __init__(self) -> None:
        self.mappings = Mappings()
        self.usable: Exception | None = None
        self.enqueued: list[tuple[Any, Any, bool]] = []
        self.met: list[bool] = []
        """Whether the ranks met on the host before each of these."""
        self.streams: list[Any] = []
        backend = SimpleNamespace(stream=lambda stream, array: stream or array)
        session: Any = SimpleNamespace(mappings=self.mappings, backend=backend, require_usable=self._require_usable)
        self.runs = True  # and is not in a capture
        engine: Any = SimpleNamespace(enqueue=self._enqueue, completion=lambda: self.enqueued.copy)
        self._calls = PlanCache(session, engine)

    def _require_usable(self, what: str) -> None:
        if self.usable is not None:
            raise self.usable

    def _enqueue(self, plan: Any, stream: Any, again: bool, meets: bool = False) -> bool:
        self.enqueued.append((plan, stream, again))
        self.met.append(meets)
        return self.runs

    def add(self, operation: str, given: Arguments, algorithm: str = "auto", *, by_output: bool = False) -> Any:
        plan: Any = SimpleNamespace(text=operation, is_old=False)
        call = (OPERATIONS[operation], algorithm, given.send, given.receive, given.op, given.root, given.counts, ())
        self._calls.add(plan, call, by_output=by_output)
        return plan

    def find(self, operation: str, given: Arguments, algorithm: str = "auto", stream: Any = 7) -> Any:
        """Return the plan that is enqueued, if any."""
        call = (OPERATIONS[operation], algorithm, given.send, given.receive, given.op, given.root, given.counts, ())
        found = self._calls.find(*call)
        if found is None:
            return None
        assert self._calls.enqueue(found, stream, given.send, given.receive) == self.runs
        plan, where, again = self.enqueued.pop()
        self.streams.append(where)
        assert again
        return plan

    def begin(self, operation: str, given: Arguments) -> Any:
        """Begin a call that is known; return what says whether it is done."""
        call = (OPERATIONS[operation], "auto", given.send, given.receive, given.op, given.root, given.counts, ())
        found = self._calls.find(*call)
        assert found is not None
        return self._calls.begin(found, 7, given.send, given.receive)


@pytest.mark.parametrize("kind", [Array, Tensor])
def test_the_same_call_is_known_again_whatever_the_objects(kind: Any) -> None:
    known = Known()
    for send in (kind(16), MPI.IN_PLACE, None):
        plan = known.add("Allreduce", arguments(send, kind(64)))
        again = kind(16) if isinstance(send, kind) else send
        assert known.find("Allreduce", arguments(again, kind(64))) is plan


@pytest.mark.parametrize(
    ("operation", "given", "algorithm"),
    [
        ("Reduce", arguments(Array(16), Array(64)), "auto"),
        ("Allreduce", arguments(Array(32), Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), Array(32)), "auto"),
        ("Allreduce", arguments(Array(16, (5,)), Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), Array(64, (5,))), "auto"),
        ("Allreduce", arguments(Array(16, dtype="i4"), Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), Array(64, dtype="i4")), "auto"),
        ("Allreduce", arguments(Array(16, order="pieces"), Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), Array(64, order="pieces")), "auto"),
        ("Allreduce", arguments(MPI.IN_PLACE, Array(64)), "auto"),
        ("Allreduce", arguments(None, Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), None), "auto"),
        ("Allreduce", arguments(Tensor(16), Array(64)), "auto"),
        ("Allreduce", arguments(Array(16), Array(64), MPI.MAX), "auto"),
        ("Allreduce", arguments(Array(16), Array(64), root=1), "auto"),
        ("Allreduce", arguments(Array(16), Array(64)), "two_shot"),
    ],
)
def test_another_call_is_not(operation: str, given: Arguments, algorithm: str) -> None:
    known = Known()
    known.add("Allreduce", arguments(Array(16), Array(64)))
    assert known.find(operation, given, algorithm) is None
    plan = known.add(operation, given, algorithm)
    assert known.find(operation, given, algorithm) is plan  # it could have been


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(32),
        Tensor(16, 5),
        Tensor(16, dtype="int32"),
        Tensor(16, step=2),
        Tensor(16, requires_grad=True),
        Tensor(16, conj=True),
        Tensor(16, neg=True),
        Tensor(16, on_host=True),
        Tensor(None),
    ],
)
def test_another_tensor_is_not(tensor: Tensor) -> None:
    known = Known()
    known.add("Bcast", arguments(None, Tensor(16), None))
    assert known.find("Bcast", arguments(None, tensor, None)) is None


@pytest.mark.parametrize("call", ["send", "receive", "alone"])
@pytest.mark.parametrize("order", ["F", "pieces"])
def test_memory_in_pieces_is_told_from_what_has_as_many_elements(order: str, call: str) -> None:
    """Of those that are not C-contiguous, Fortran's order is allowed and others are refused."""

    def given(order: str) -> Arguments:
        array, other = Array(16, (2, 3), order=order), None if call == "alone" else Array(64, (2, 3))
        return arguments(array, other) if call == "send" else arguments(other, array)

    known = Known()
    for other in {"C", "F", "pieces"} - {order}:
        known.add("Allreduce", given(other))
    assert known.find("Allreduce", given(order)) is None


def test_an_array_that_was_changed_in_place_is_another() -> None:
    known, send, receive = Known(), Array(16), Array(64)
    known.add("Allreduce", arguments(send, receive))
    send.data.ptr = 32
    assert known.find("Allreduce", arguments(send, receive)) is None


def test_what_cannot_be_looked_up_is_not_known() -> None:
    known = Known()
    known.add("Bcast", arguments(None, Array(16), None, root=0))
    assert known.find("Bcast", arguments(None, Array(16), None, root=[0])) is None


def test_a_known_call_is_on_the_current_stream_of_the_library_it_was_on() -> None:
    known, send, receive, ignored = Known(), Array(16), Tensor(64), Array(128)
    for given, expected in (
        (arguments(send, receive), send),
        (arguments(MPI.IN_PLACE, receive), receive),
        (arguments(None, receive), receive),
        (arguments(send, None), send),
        (arguments([send, 4], receive), send),
        (arguments(MPI.IN_PLACE, (receive, 4)), receive),
        # Of a Scatter, where this rank is not the root.
        (arguments(ignored, receive), receive),
        (arguments([None, [1, 2], [0, 1], "f"], receive), receive),
    ):
        known.add("Reduce", given, by_output=expected is receive)
        for stream, where in ((None, expected), (5, 5)):
            known.find("Reduce", given, stream=stream)
            assert known.streams.pop() is where


def test_a_known_call_that_is_begun_says_when_it_is_done() -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    plan = known.add("Allreduce", given)
    assert known.begin("Allreduce", given)() == [(plan, 7, True)]  # what the engine says of it
    known.runs = False
    assert known.begin("Allreduce", given)() is True


def test_a_blocking_call_waits_beside_a_stream_that_several_threads_use(monkeypatch: pytest.MonkeyPatch) -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    plan = known.add("Allreduce", given)
    call = known._calls.find(OPERATIONS["Allreduce"], "auto", given.send, given.receive, given.op, 0, None)
    assert call is not None
    said: list[Any] = []
    marks = SimpleNamespace(
        mark=lambda stream: ("behind", stream), take=lambda mark: ("beside", mark), give_back=said.append
    )
    backend: Any = known._calls._session.backend
    backend.side_streams, backend.check = marks, lambda: said.append("check")
    backend.synchronize = lambda stream: said.append(["waits for", stream, len(known.enqueued)])
    for of_device, of_stream in ((False, False), (True, False), (True, True)):
        backend.meets = lambda stream, array, several=of_device: several
        backend.waits_beside = lambda stream, array, several=of_stream: several
        known._calls.run(call, 7, given.send, given.receive)
    side = "beside", ("behind", 7)
    assert known.enqueued == [(plan, 7, True), (plan, 7, True), (plan, side, True)]
    assert known.met == [False, True, True]
    assert said == [["waits for", side, 3], side, "check"]
    known._calls.begin(call, 7, given.send, given.receive)
    assert known.enqueued[3:] == [(plan, 7, True)]  # a nonblocking call must not wait


@pytest.mark.parametrize("by_address", [False, True])
def test_a_known_call_on_an_address_waits_unless_a_stream_is_named(by_address: bool) -> None:
    """No library says on which stream the caller's next work on that memory is."""
    known, given = Known(), arguments(Array(16), Array(64))
    waited: list[Any] = []
    backend: Any = known._calls._session.backend
    backend.is_capturing, backend.synchronize = (lambda stream: stream == "captures"), waited.append
    backend.meets = lambda stream, array: False
    known._calls.engine.form_plan = lambda call, asked: None  # type: ignore[method-assign]
    read: Any = SimpleNamespace(operands=[SimpleNamespace(by_address=by_address)], in_place=False)
    plan: Any = SimpleNamespace(text="Allreduce", is_old=False)
    call = (OPERATIONS["Allreduce"], "auto", given.send, given.receive, given.op, 0, None, ())
    known._calls.add(plan, call, by_output=False, read=read)
    found = known._calls.find(*call)
    assert found is not None
    backend.stream = lambda stream, array: stream or "current"
    for carry_out in (known._calls.run, known._calls.enqueue):
        for stream in (None, 7):
            carry_out(found, stream, given.send, given.receive)
    backend.stream = lambda stream, array: "captures"
    known._calls.run(found, None, given.send, given.receive)
    assert waited == ["current"] * 2 * by_address


def test_a_known_call_is_refused_where_the_communicator_is_unusable() -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    known.add("Allreduce", given)
    known.usable = InvalidUsageError("Allreduce: the communicator was freed; create another")
    with pytest.raises(InvalidUsageError, match="freed"):
        known.find("Allreduce", given)
    assert known.enqueued == []


SAID = (
    (4,),
    (5,),
    ("bfloat16",),
    (4, "bfloat16"),
    (4, MPI.FLOAT),
    (4, MPI.INT),
    (None, MPI.INT),
    ((4, 0),),
    ([4, 0],),
    ([4, 1],),
    ([4, 0], [0, 4]),
    ([4, 0], [0, 5]),
    (([4, 0], [0, 4]), MPI.FLOAT),
    (np.array([4, 2]),),
    (np.array([4, 3]),),
    (np.array([[4, 2]]),),
)


@pytest.mark.parametrize("kind", [Array, Tensor])
@pytest.mark.parametrize("number", range(len(SAID)))  # not what is said: datatypes have no name that is always the same
def test_what_comes_with_an_array_is_told_apart(number: int, kind: Any) -> None:
    known, said = Known(), SAID[number]
    for others in (each for each in SAID if each is not said):
        known.add("Alltoallv", arguments([kind(16), *others], [kind(64), *said], None))
        known.add("Alltoallv", arguments([kind(16), *said], [kind(64), *others], None))
    given = arguments([kind(16), *said], (kind(64), *said), None)
    assert known.find("Alltoallv", given) is None
    plan = known.add("Alltoallv", given)
    assert known.find("Alltoallv", arguments((kind(16), *said), [kind(64), *said], None)) is plan
    assert known.find("Alltoallv", arguments([kind(32), *said], [kind(64), *said], None)) is None


def test_the_same_blocks_are_known_in_other_words() -> None:
    known, send, receive = Known(), Array(16), Array(64)
    plan = known.add("Alltoallv", arguments([send, [3, 1]], [receive, ([2, 2], [0, 2])], None))
    for others in ((receive, ((2, 2), [0, 2])), (receive, np.array([2, 2]), (0, 2), None)):
        assert known.find("Alltoallv", arguments((send, np.array([3, 1])), others, None)) is plan


def test_counts_that_were_changed_in_place_are_others() -> None:
    counts: Any
    for counts in ([4, 0], np.array([4, 0])):
        known = Known()
        given = arguments([Array(16), counts], [Array(64), counts], None)
        known.add("Alltoallv", given)
        assert known.find("Alltoallv", given) is not None
        counts[1] = 1
        assert known.find("Alltoallv", given) is None


def test_shares_of_a_reduce_scatter_are_told_apart() -> None:
    known = Known()
    for send in (Array(16), MPI.IN_PLACE):
        plan = known.add("Reduce_scatter", arguments(send, Array(64), counts=[1, 3]))
        assert known.find("Reduce_scatter", arguments(send, Array(64), counts=[1, 3])) is plan
        assert known.find("Reduce_scatter", arguments(send, Array(64), counts=[2, 2])) is None


def test_a_reduce_scatter_that_asks_the_ranks_for_their_shares_is_never_known() -> None:
    """To one rank it would look like the one before where others take more and less now."""
    known, given = Known(), arguments(Array(16), Array(64))
    known.add("Reduce_scatter", given)
    assert known.find("Reduce_scatter", given) is None


def test_what_cannot_be_told_apart_is_never_known() -> None:
    known = Known()
    for argument in (
        [],
        [Array(16), [0.5]],
        [Array(16), np.zeros(2)],
        [np.zeros(4), 4],
        np.zeros(4),
    ):
        known.add("Allreduce", arguments(argument, Array(64)))
        assert known.find("Allreduce", arguments(argument, Array(64))) is None


def test_a_derived_datatype_is_known_until_it_is_freed() -> None:
    """MPI gives the handle of a freed datatype to another one."""
    known, array = Known(), Array(16)
    derived = MPI.FLOAT.Create_vector(2, 1, 3)
    known.add("Bcast", arguments([array, derived], Array(64)))
    assert known.find("Bcast", arguments([array, derived], Array(64))) is not None
    for _ in range(3):
        derived.Free()
        derived = MPI.FLOAT.Create_vector(2, 1, 3)
        assert known.find("Bcast", arguments([array, derived], Array(64))) is None
    derived.Free()


def test_calls_are_forgotten_with_every_change_of_symmetric_memory() -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    for change in (lambda: known.mappings.add([0, 64], 1, 16), lambda: known.mappings.remove(1)):
        plan = known.add("Allreduce", given)
        assert known.find("Allreduce", given) is plan
        change()
        assert known.find("Allreduce", given) is None


def test_calls_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "_MOST", 3)
    known = Known()
    calls = [arguments(None, Array(16 * number), None) for number in range(1, 6)]
    for call in calls:
        known.add("Bcast", call)
    assert known.find("Bcast", calls[-1]) is not None
    assert sum(known.find("Bcast", call) is not None for call in calls) <= 3


def test_a_call_whose_plan_is_old_is_planned_again() -> None:
    known, call = Known(), ("Alltoallv", arguments(Array(16), Array(64), None))
    plan = known.add(*call)
    plan.is_old = True
    assert known.find(*call) is None
    plan = known.add(*call)
    assert known.find(*call) is plan
