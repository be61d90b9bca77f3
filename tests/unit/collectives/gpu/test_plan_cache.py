"""Which calls are the same as one before, so that its plan is used again, and how a known call is carried out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
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
from mpicomm.mpi.plain_arrays import plain_array
from tests.helpers.rigs.plan_caches import Array, Known, Tensor, arguments, install_libraries


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install_libraries(monkeypatch)


Made = tuple[str, Arguments] | tuple[str, Arguments, str]
"""A collective, its arguments, and perhaps ``algorithm=``."""
VECTORS = [MPI.FLOAT.Create_vector(2, 1, length) for length in (3, 3, 4)]
PAIR = MPI.FLOAT.Create_contiguous(2)


def allreduce(send: Any, receive: Any, op: MPI.Op = MPI.SUM, **others: Any) -> Made:
    return "Allreduce", arguments(send, receive, op, **others)


def blocks(send: Any, receive: Any, operation: str = "Alltoallv") -> Made:
    return operation, arguments(send, receive, None)


def typed(datatype: Any, count: int, displ: int = 4, sequence: Any = list, receive: int = 64) -> Made:
    """Blocks with a datatype each."""
    said = [1, count], [0, displ], sequence([MPI.FLOAT, datatype])
    return blocks([Array(16, (50,)), *said], [Array(receive, (50,)), *said], "Alltoallw")


def on_device(kind: Any, counts: int = 16, displs: int = 32, received: int = 48) -> Made:
    return blocks([kind(160), (kind(counts), kind(displs))], [kind(320), kind(received)])


def finished(place: int, weight: float = 2.0, datatype: Any = None) -> Made:
    """A call with an epilogue. With a derived datatype it has no template, and its key has the arrays, too."""
    send, receive = (array if datatype is None else [array, datatype] for array in (Array(16), Array(64)))
    return allreduce(send, receive, epilogue=Elementwise("v * w + bias[i]", w=weight, bias=Array(place)))


def shares(send: Any, *counts: int) -> Made:
    return "Reduce_scatter", arguments(send, Array(64), counts=[*counts])


_PLACES: list[Callable[[Any], Made]] = [
    lambda array: allreduce(array, Array(64, (2, 3))),
    lambda array: allreduce(Array(64, (2, 3)), array),
    lambda array: allreduce(None, array),
]
KNOWN: list[tuple[Made, Sequence[Made], Sequence[Made]]] = [
    *(
        (allreduce(send(), kind(64)), [allreduce(send(), kind(64))], [])
        for kind in (Array, Tensor)
        for send in (partial(kind, 16), lambda: MPI.IN_PLACE, lambda: None)
    ),
    (
        allreduce(Array(16), Array(64)),
        [],
        [
            ("Reduce", arguments(Array(16), Array(64))),
            (*allreduce(Array(16), Array(64))[:2], "two_shot"),
            *(allreduce(Array(16), Array(64), **other) for other in ({"op": MPI.MAX}, {"root": 1})),
            *(allreduce(send, Array(64)) for send in (Array(32), Array(16, (5,)), Array(16, dtype="i4"), Tensor(16))),
            *(allreduce(send, Array(64)) for send in (MPI.IN_PLACE, None)),
            *(allreduce(Array(16), other) for other in (Array(32), Array(64, (5,)), Array(64, dtype="i4"), None)),
        ],
    ),
    *(
        (call(Array(16, (2, 3), order="F")), [call(Array(16, (2, 3)))], [call(Array(16, (2, 3), order="pieces"))])
        for call in _PLACES
    ),
    (
        blocks([Array(16), [3, 1]], [Array(64), ([2, 2], [0, 2])]),
        [
            blocks((Array(16), np.array([3, 1])), others)
            for others in ((Array(64), ((2, 2), [0, 2])), (Array(64), np.array([2, 2]), (0, 2), None))
        ],
        [],
    ),
    *(
        (
            on_device(kind),
            [on_device(kind)],
            [on_device(kind, **{name: 64}) for name in ("counts", "displs", "received")],
        )
        for kind in (Array, Tensor)
    ),
    *((shares(send, 1, 3), [shares(send, 1, 3)], [shares(send, 2, 2)]) for send in (Array(16), MPI.IN_PLACE)),
    *(
        (
            finished(128, datatype=datatype),
            [finished(128, datatype=datatype)],
            [finished(256, datatype=datatype), finished(128, 3.0, datatype), allreduce(Array(16), Array(64))],
        )
        for datatype in (None, VECTORS[0])
    ),
    (
        typed(MPI.FLOAT, 4),
        [typed(MPI.DOUBLE, 2, sequence=tuple)],  # by their bytes
        [
            *(typed(MPI.FLOAT, 3), typed(MPI.DOUBLE, 4), typed(PAIR, 4)),
            *(typed(MPI.FLOAT, 4, displ=8), typed(MPI.FLOAT, 4, receive=128)),
        ],
    ),
    (
        typed(VECTORS[0], 2),
        [typed(VECTORS[0], 2)],  # by their layouts
        [
            *(typed(other, 2) for other in VECTORS[1:]),
            *(typed(VECTORS[0], 3), typed(VECTORS[0], 2, 8), typed(VECTORS[0], 2, receive=128)),
        ],
    ),
]


@pytest.mark.parametrize("number", range(len(KNOWN)))  # numbers, because datatypes have no name that is always the same
def test_a_call_is_known_by_its_memory_and_its_values(number: int) -> None:
    known, (call, same, others) = Known(), KNOWN[number]
    for other in others:
        known.add(*other)
    assert known.find(*call) is None
    plan = known.add(*call)
    for again in (call, *same):
        assert known.find(*again) is plan
    for other in others:
        assert known.find(*other) is not plan


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


def test_a_weight_of_a_model_is_recognised_as_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parameter(Tensor):
        """PyTorch's class of the weights of models."""

    class Other(Tensor):
        """A subclass with memory of another kind, perhaps."""

    monkeypatch.setitem(sys.modules, "torch.nn", SimpleNamespace(Parameter=Parameter))
    assert plain_array(Parameter(16)) == plain_array(Tensor(16)) is not None
    assert plain_array(Parameter(16, requires_grad=True)) is None
    assert plain_array(Other(16)) is None


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
@pytest.mark.parametrize("number", range(len(SAID)))  # numbers, because datatypes have no name that is always the same
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
    known.add("Bcast", arguments([array, MPI.FLOAT], Array(64)))
    assert known.find("Bcast", arguments([array, derived], Array(64))) is None  # DATATYPE_NULL


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
