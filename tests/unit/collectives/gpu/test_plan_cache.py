"""Which calls are the same as one before, so that its plan is used again."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments
from mpicomm.collectives.gpu import plan_cache as known_calls
from mpicomm.epilogues import Elementwise
from mpicomm.mpi.plain_arrays import plain_array
from tests.helpers.rigs.plan_caches import Array, Known, Tensor, arguments, install_libraries


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install_libraries(monkeypatch)


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
def test_memory_in_pieces_is_told_from_contiguous_memory_in_any_order(call: str) -> None:
    def given(order: str) -> Arguments:
        array, other = Array(16, (2, 3), order=order), None if call == "alone" else Array(64, (2, 3))
        return arguments(array, other) if call == "send" else arguments(other, array)

    known = Known()
    plan = known.add("Allreduce", given("F"))
    assert known.find("Allreduce", given("C")) is plan
    assert known.find("Allreduce", given("pieces")) is None


def test_an_array_that_was_changed_in_place_is_another() -> None:
    known, send, receive = Known(), Array(16), Array(64)
    known.add("Allreduce", arguments(send, receive))
    send.data.ptr = 32
    assert known.find("Allreduce", arguments(send, receive)) is None


def test_what_cannot_be_looked_up_is_not_known() -> None:
    known = Known()
    known.add("Bcast", arguments(None, Array(16), None, root=0))
    assert known.find("Bcast", arguments(None, Array(16), None, root=[0])) is None


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


@pytest.mark.parametrize("kind", [Array, Tensor])
def test_counts_on_the_device_are_known_by_their_memory(kind: Any) -> None:
    known = Known()

    def given(counts: int = 16, displs: int = 32, received: int = 48) -> Arguments:
        return arguments([kind(160), (kind(counts), kind(displs))], [kind(320), kind(received)], None)

    plan = known.add("Alltoallv", given())
    assert known.find("Alltoallv", given()) is plan
    for other in (given(counts=64), given(displs=64), given(received=64)):
        assert known.find("Alltoallv", other) is None
    # The host reads them in all other calls, and they may have changed.
    known.add("Allgatherv", arguments(kind(160), [kind(320), kind(48)], None))
    assert known.find("Allgatherv", arguments(kind(160), [kind(320), kind(48)], None)) is None


def test_shares_of_a_reduce_scatter_are_told_apart() -> None:
    known = Known()
    for send in (Array(16), MPI.IN_PLACE):
        plan = known.add("Reduce_scatter", arguments(send, Array(64), counts=[1, 3]))
        assert known.find("Reduce_scatter", arguments(send, Array(64), counts=[1, 3])) is plan
        assert known.find("Reduce_scatter", arguments(send, Array(64), counts=[2, 2])) is None


def test_a_reduce_scatter_that_asks_the_ranks_for_their_shares_is_never_known() -> None:
    """If other ranks take more and less than before, the call would look the same to one rank."""
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


@pytest.mark.parametrize("has_form", [True, False])
def test_a_call_is_known_with_the_arrays_of_its_epilogue(has_form: bool) -> None:
    """Without a form its key has the arrays, too."""
    known, derived = Known(), MPI.FLOAT.Create_vector(2, 1, 3)

    def given(place: int, weight: float = 2.0) -> Arguments:
        epilogue = Elementwise("v * w + bias[i]", w=weight, bias=Array(place))
        buffers = (Array(16), Array(64)) if has_form else ([Array(16), derived], [Array(64), derived])
        return arguments(*buffers, epilogue=epilogue)

    plan = known.add("Allreduce", given(128))
    assert known.find("Allreduce", given(128)) is plan
    for other in (given(256), given(128, 3.0), arguments(Array(16), Array(64))):
        assert known.find("Allreduce", other) is None
    derived.Free()


def test_blocks_with_datatypes_are_known_by_their_bytes() -> None:
    known = Known()

    def given(
        datatype: MPI.Datatype, count: int, displ: int = 4, datatypes: Any = list, receive: int = 64
    ) -> Arguments:
        blocks = [[1, count], [0, displ], datatypes([MPI.FLOAT, datatype])]
        return arguments([Array(16, (50,)), *blocks], [Array(receive, (50,)), *blocks], None)

    plan = known.add("Alltoallw", given(MPI.FLOAT, 4))
    pair = MPI.FLOAT.Create_contiguous(2).Commit()
    assert known.find("Alltoallw", given(MPI.DOUBLE, 2, datatypes=tuple)) is plan
    for other in (
        given(MPI.FLOAT, 3),
        given(MPI.DOUBLE, 4),
        given(MPI.FLOAT, 4, displ=8),
        given(MPI.FLOAT, 4, receive=128),
        given(pair, 4),
    ):
        assert known.find("Alltoallw", other) is None
    assert known.find("Alltoallv", given(MPI.FLOAT, 4)) is None
    pair.Free()


def test_blocks_with_gaps_are_known_by_their_layouts() -> None:
    known, made = Known(), [MPI.FLOAT.Create_vector(2, 1, length).Commit() for length in (3, 3, 4)]

    def given(datatype: MPI.Datatype, count: int = 2, displ: int = 4, receive: int = 64) -> Arguments:
        blocks = [[1, count], [0, displ], [MPI.FLOAT, datatype]]
        return arguments([Array(16, (50,)), *blocks], [Array(receive, (50,)), *blocks], None)

    plan = known.add("Alltoallw", given(made[0]))
    assert known.find("Alltoallw", given(made[0])) is plan
    for other in (*map(given, made[1:]), given(made[0], 3), given(made[0], 2, 8), given(made[0], receive=128)):
        assert known.find("Alltoallw", other) is None
    made[0].Free()
    made[0] = MPI.FLOAT.Create_vector(2, 1, 3).Commit()  # it may have the handle of the freed one
    assert known.find("Alltoallw", given(made[0])) is None
    for datatype in made:
        datatype.Free()


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
