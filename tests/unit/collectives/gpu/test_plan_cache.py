"""Which calls are the same as one before, so that its plan is used again, and how a known call is carried out."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments
from mpicomm.collectives.gpu import plan_cache as known_calls
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.epilogues import Elementwise
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.plain_arrays import known_buffer, plain_array
from tests.helpers.rigs.plan_caches import Array, Known, Tensor, arguments, install_libraries


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install_libraries(monkeypatch)


VECTORS = [MPI.FLOAT.Create_vector(2, 1, length) for length in (3, 3, 4)]


def allreduce(send: Any, receive: Any, op: MPI.Op = MPI.SUM, **others: Any) -> tuple[str, Arguments]:
    return "Allreduce", arguments(send, receive, op, **others)


def blocks(send: Any, receive: Any, operation: str = "Alltoallv") -> tuple[str, Arguments]:
    return operation, arguments(send, receive, None)


class Parameter(Tensor):
    """PyTorch's class of the weights of models."""


class Other(Tensor):
    """A subclass with memory of another kind, perhaps."""


def test_arrays_are_known_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn", SimpleNamespace(Parameter=Parameter))
    kinds: list[tuple[Any, Any]] = [(Array, (5,)), (Tensor, 5), (Parameter, 5)]
    for kind, five in kinds:
        found = [plain_array(each) for each in (kind(16), kind(32), kind(16, five), kind(16, dtype="int32"))]
        assert None not in found and len({*map(str, found)}) == 4
        assert plain_array(kind(16)) == found[0]
    assert plain_array(Parameter(16)) == plain_array(Tensor(16))
    assert plain_array(Array(16, (2, 3), order="F")) == plain_array(Array(16, (2, 3)))
    for unknown in (
        Array(16, (2, 3), order="pieces"), Tensor(16, step=2), Tensor(16, requires_grad=True), Tensor(16, conj=True),
        Tensor(16, neg=True), Tensor(16, on_host=True), Tensor(None), Parameter(16, requires_grad=True), Other(16),
    ):  # fmt: skip
        assert plain_array(unknown) is None


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
    keys = [known_buffer([kind(16), *said], counts_on_device=True) for said in SAID]
    assert None not in keys
    for number, (said, key) in enumerate(zip(SAID, keys, strict=True)):
        assert keys.index(key) == number
        assert known_buffer((kind(16), *said), counts_on_device=True) == key
        assert known_buffer([kind(32), *said], counts_on_device=True) not in keys


def test_a_call_is_known_by_all_that_it_says() -> None:
    known, arrays = Known(), (Array(16), Array(64))
    epilogues = [
        Elementwise("v * w + bias[i]", w=weight, bias=Array(at)) for weight, at in ((2.0, 128), (2.0, 256), (3.0, 128))
    ]
    calls: list[Any] = [
        allreduce(*arrays), ("Reduce", arguments(*arrays)), (*allreduce(*arrays), "two_shot"),
        *(allreduce(*arrays, **other) for other in ({"op": MPI.MAX}, {"root": 1})),
        *(allreduce(*arrays, epilogue=epilogue) for epilogue in epilogues),
        *(allreduce([arrays[0], VECTORS[0]], [arrays[1], VECTORS[0]], epilogue=epilogue) for epilogue in epilogues),
        *(("Reduce_scatter", arguments(*arrays, counts=counts)) for counts in ([1, 3], [2, 2])),
        ("Reduce_scatter", arguments(MPI.IN_PLACE, arrays[1], counts=[1, 3])),
        *(allreduce(send, arrays[1]) for send in (MPI.IN_PLACE, None)),
    ]  # fmt: skip
    plans = []
    for call in calls:
        assert known.find(*call) is None
        plans.append(known.add(*call))
    assert [known.find(*call) for call in calls] == plans


@pytest.mark.parametrize("counts", [[4, 0], np.array([4, 0])])
def test_what_was_changed_in_place_is_another(counts: Any) -> None:
    known, send = Known(), Array(16)
    call = blocks([send, counts], [Array(64), counts])
    known.add(*call)
    assert known.find(*call) is not None
    send.data.ptr = 32
    assert known.find(*call) is None
    known.add(*call)
    counts[1] = 1
    assert known.find(*call) is None


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
    known.add("Bcast", arguments(None, Array(16), None, root=0))
    assert known.find("Bcast", arguments(None, Array(16), None, root=[0])) is None
    # If other ranks take more and less than before, the call would look the same to one rank.
    known.add("Reduce_scatter", arguments(Array(16), Array(64)))
    assert known.find("Reduce_scatter", arguments(Array(16), Array(64))) is None
    # The host reads counts on the device in all calls but an Alltoallv, and they may have changed.
    known.add(*blocks(Array(160), [Array(320), Array(48)], "Allgatherv"))
    assert known.find(*blocks(Array(160), [Array(320), Array(48)], "Allgatherv")) is None


def test_a_datatype_with_the_handle_of_a_freed_one_is_not_taken_for_that() -> None:
    array, ones, nowhere, found = Array(64), [1, 1], [0, 32], dict[int, set[int]]()
    kept = []  # so that each object has an id of its own
    for blocklength in range(1, 33):
        derived = MPI.FLOAT.Create_contiguous(blocklength)
        for _ in range(2):
            plain = plain_array([array, ones, nowhere, [derived, derived]])
            assert plain is not None and plain[3:] == ((4 * blocklength,) * 2, (0, 32))
        found.setdefault(derived.handle, set()).add(blocklength)
        derived.Free()
        assert plain_array([array, ones, nowhere, [derived, derived]]) is None
        kept.append(derived)
    assert max(map(len, found.values())) > 1


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


def test_a_known_call_is_on_the_current_stream_of_the_library_it_was_on() -> None:
    known, send, receive, ignored = Known(), Array(16), Tensor(64), Array(128)
    for given, expected in (
        (arguments(send, receive), send),
        (arguments(MPI.IN_PLACE, receive), receive),
        (arguments(None, receive), receive),
        (arguments(send, None), send),
        (arguments([send, 4], receive), send),
        (arguments(MPI.IN_PLACE, (receive, 4)), receive),
        # A Scatter on a rank that is not the root.
        (arguments(ignored, receive), receive),
        (arguments([None, [1, 2], [0, 1], "f"], receive), receive),
    ):
        known.add("Reduce", given, by_output=expected is receive)
        for stream, where in ((None, expected), (5, 5)):
            known.find("Reduce", given, stream=stream)
            assert known.streams.pop() is where


def test_the_request_of_a_known_call_says_when_the_call_is_done() -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    plan = known.add("Allreduce", given)
    request = known.start("Allreduce", given)
    assert known.enqueued == [(plan, 7)]
    assert not request.Test()
    known.done = True
    assert request.Test()
    known.runs = known.done = False  # in a capture
    assert known.start("Allreduce", given).Test()


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
        known._calls.enqueue(call, 7, given.send, given.receive, blocking=True)
    side = "beside", ("behind", 7)
    assert known.enqueued == [(plan, 7), (plan, 7), (plan, side)]
    assert known.met == [False, True, True]
    assert said == [["waits for", side, 3], side, "check"]
    known._calls.enqueue(call, 7, given.send, given.receive)
    assert known.enqueued[3:] == [(plan, 7)]  # a nonblocking call must not wait


@pytest.mark.parametrize("completes", [False, True])
@pytest.mark.parametrize("by_address", [False, True])
def test_a_blocking_call_waits_where_calls_complete_on_return_and_on_an_address(
    by_address: bool, completes: bool
) -> None:
    """No library knows the stream of the caller's next work on memory that an address names."""
    known, given = Known(), arguments(Array(16), Array(64))
    waited: list[Any] = []
    backend: Any = known._calls._session.backend
    backend.completes, backend.complete = completes, waited.append
    backend.meets = lambda stream, array: False
    known._calls.engine.template = lambda call, mappings, asked: None  # type: ignore[method-assign]
    read: Any = SimpleNamespace(operands=[SimpleNamespace(by_address=by_address)], in_place=False)
    plan: Any = SimpleNamespace(text="Allreduce")
    call = (OPERATIONS["Allreduce"], "auto", given.send, given.receive, given.op, 0, None, None, None)
    known._calls.add(plan, call, by_output=False, read=read)
    found = known._calls.find(*call)
    assert found is not None
    backend.stream = lambda stream, array: stream or "current"
    for blocking in (True, False):
        for stream in (None, 7):
            known._calls.enqueue(found, stream, given.send, given.receive, blocking=blocking)
    assert waited == (["current", 7] if completes else ["current"] * by_address)


def test_a_known_call_is_refused_if_the_communicator_is_unusable() -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    known.add("Allreduce", given)
    known.usable = InvalidUsageError("Allreduce: the communicator was freed; create another")
    with pytest.raises(InvalidUsageError, match="freed"):
        known.find("Allreduce", given)
    assert known.enqueued == []
