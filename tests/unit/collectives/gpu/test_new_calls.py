"""Calls and messages of new sizes at new addresses, from their arguments to the launch, over a fake CUDA."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.epilogues import Epilogue, rms_norm
from mpicomm.mpi import buffers
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.rigs.fake_engines import STREAM, Rig

FLOAT, INT = np.dtype("f4"), np.dtype("i8")
HIDDEN = 1024
PACKAGE = str(Path(mpicomm.__file__).parent)


class Array:
    """The attributes of CuPy's arrays that distinguish them."""

    _c_contiguous = True

    def __init__(self, pointer: int, count: int, dtype: np.dtype[Any] = FLOAT) -> None:
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.dtype, self.itemsize = dtype, dtype.itemsize
        self.size, self.nbytes = count, count * dtype.itemsize


COLUMN = MPI.FLOAT.Create_vector(64, 1, 5)


class Calls:
    """The way of calls on arrays: known calls, calls of a known form, and planned calls."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        from mpicomm.collectives.gpu.plan_cache import PlanCache

        def read(array: Any, writable: bool, name: str) -> buffers.ArrayMemory:
            return buffers.ArrayMemory(array.data.ptr, array.nbytes, array.dtype, True, 0, array)

        monkeypatch.setitem(buffers._readers, Array, read)
        monkeypatch.setattr(sys.modules["cupy"], "ndarray", Array, raising=False)
        self._cuda = cuda
        self._rig = rig = Rig(cuda, monkeypatch)
        rig.launched = rig.shapes = deque(maxlen=1)  # type: ignore[assignment]
        backend = SimpleNamespace(stream=lambda stream, array: STREAM, meets=lambda *_: False, completes=False)
        session: Any = SimpleNamespace(mappings=Mappings(), backend=backend, require_usable=lambda what: None)
        self._session = session
        self._cache = PlanCache(session, rig.engine)
        self.planned = 0

    def add_symmetric_memory(self) -> None:
        """Let the receive buffers of `call_of` lie in a symmetric array."""
        self._session.mappings.add([2 << 50, 3 << 50], 0, 1 << 49)

    def run(
        self,
        operation: Operation,
        send: Any,
        receive: Any,
        op: MPI.Op | None,
        counts: list[int] | None = None,
        epilogue: Epilogue | None = None,
    ) -> None:
        """Make a call as the dispatcher does."""
        known = self.find(operation, send, receive, op, counts, epilogue)
        if known is not None:
            self._cache.enqueue(known, None, send, receive, blocking=True)
            return
        self.planned += 1
        call = Call(operation, Arguments(send, receive, op, 0, counts, epilogue), 0, 2)
        plan = self._rig.engine.prepare_call(call, self._session.mappings, "auto")
        key = operation, "auto", send, receive, op, 0, counts, epilogue, None
        self._cache.add(plan, key, by_output=False, read=call)
        self._rig.engine.enqueue(plan, STREAM)

    def find(
        self,
        operation: Operation,
        send: Any,
        receive: Any,
        op: MPI.Op | None,
        counts: list[int] | None = None,
        epilogue: Epilogue | None = None,
    ) -> Any:
        """Return the known call with these arguments, or None."""
        return self._cache.find(operation, "auto", send, receive, op, 0, counts, epilogue)

    def finish(self) -> None:
        """Let the streams carry out their work."""
        self._cuda.finish()


@pytest.fixture
def calls(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(cuda, monkeypatch)


def call_of(name: str, count: int, rng: random.Random) -> tuple[Any, ...]:
    send, receive = ((at << 50) + 256 * rng.randrange(1 << 20) for at in (1, 2))
    if name == "Alltoallv":
        counts = [count, rng.randrange(count)]
        return OPERATIONS[name], [Array(send, 2 * count), counts], [Array(receive, 2 * count), counts], None
    if name == "Alltoallv with counts on the GPU":
        lengths, places, came = (Array((at << 50) + 64 * rng.randrange(1 << 20), 2, INT) for at in (4, 5, 6))
        operation, (x, _), (y, _), _ = call_of("Alltoallv", count, rng)
        return operation, [x, (lengths, places)], [y, came], None
    if name == "Alltoallw":
        counts, types = [count, rng.randrange(count)], [MPI.FLOAT, MPI.BYTE]
        return (
            OPERATIONS[name],
            [Array(send, 2 * count), counts, [0, 4 * count], types],
            [Array(receive, 2 * count), counts, [0, 4 * count], types],
            None,
        )
    if name == "Alltoallw of columns":
        arguments = ([Array(at, 8192), [1, 1], [4 * rng.randrange(64), 4096], [COLUMN] * 2] for at in (send, receive))
        return OPERATIONS["Alltoallw"], *arguments, None
    if name == "Reduce_scatter":
        counts = [count, rng.randrange(count)]
        return OPERATIONS[name], Array(send, sum(counts)), Array(receive, count), MPI.SUM, counts
    if name == "Reduce_scatter in place":
        counts = [count - 200, rng.randrange(count)]  # the scratch memory for such results is of one size
        return OPERATIONS["Reduce_scatter"], MPI.IN_PLACE, Array(receive, sum(counts)), MPI.SUM, counts
    if name == "Bcast":
        return OPERATIONS[name], None, Array(receive, count), None
    if name == "rms_norm":
        count *= HIDDEN
        residual, weight = ((at << 50) + 256 * rng.randrange(1 << 20) for at in (4, 5))
        norm = rms_norm(Array(residual, count), Array(weight, HIDDEN))
        return OPERATIONS["Allreduce"], Array(send, count), Array(receive, count), MPI.SUM, None, norm
    blocks = 2 if name == "Allgather" else 1
    op = MPI.SUM if name == "Allreduce" else None
    return OPERATIONS[name], Array(send, count), Array(receive, blocks * count), op


def test_a_call_without_elements_makes_no_form_in_place(calls: Calls) -> None:
    """Two empty arrays have one address, and the same memory passed twice means in place."""
    row = OPERATIONS["Reduce_scatter_block"]
    calls.run(row, Array(0, 0), Array(0, 0), MPI.SUM)
    calls.run(row, Array(1 << 50, 8), Array(2 << 50, 4), MPI.SUM)
    assert calls.planned == 2


def test_a_reduce_scatter_without_counts_has_no_known_form(calls: Calls) -> None:
    """The ranks exchange their counts in every such call."""
    rng = random.Random(1)
    for count in (8, 9):
        calls.run(*call_of("Reduce_scatter", count, rng))
    *arguments, _ = call_of("Reduce_scatter", 10, rng)
    assert calls.find(*arguments) is None


@pytest.mark.parametrize(
    ("name", "kib", "symmetric", "most"),
    [
        ("Allreduce", 4, False, 30),
        ("Allreduce", 4, True, 30),
        ("Allgather", 4, False, 30),
        ("Bcast", 40 << 10, True, 35),
        ("Alltoallv", 4, False, 60),
        ("Alltoallv with counts on the GPU", 4, False, 60),
        ("Alltoallv with counts on the GPU", 4, True, 60),
        ("Alltoallw", 4, False, 60),
        ("Alltoallw of columns", 4, False, 60),
        ("Reduce_scatter", 4, False, 35),
        ("Reduce_scatter in place", 4, False, 45),
        ("rms_norm", 1, False, 60),
        ("rms_norm", 1, True, 60),
    ],
)
def test_a_new_call_of_a_known_form_is_short(calls: Calls, name: str, kib: int, symmetric: bool, most: int) -> None:
    rng = random.Random(1)
    if symmetric:
        calls.add_symmetric_memory()
    for count in range(256 * kib, 256 * kib + 3):
        calls.run(*call_of(name, count, rng))
    call = call_of(name, 256 * kib + 3, rng)
    entered, files = [], set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_name)
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        calls.run(*call)
    finally:
        sys.setprofile(before)
    assert calls.planned == 1
    assert len(entered) <= most and len(files) <= 20, entered


def test_copy_engines_copy_the_data_of_each_new_call(calls: Calls, cuda: FakeCuda) -> None:
    calls.add_symmetric_memory()
    rng = random.Random(4)
    for number in range(4):
        cuda.copied.clear()
        call = call_of("Allgather", (100 << 18) + number, rng)
        calls.run(*call)
        calls.finish()
        assert {source for source, _ in cuda.copied} == {call[1].data.ptr}
    assert calls.planned == 1


def test_a_repeated_call_with_an_epilogue_gets_a_separate_plan(calls: Calls) -> None:
    rng = random.Random(5)
    calls.run(*call_of("rms_norm", 3, rng))
    again, *others = (call_of("rms_norm", rows, rng) for rows in (7, 8, 9))
    filled = calls.find(*again)
    for call in others:
        assert calls.find(*call) is filled
    for _ in range(12):
        calls.run(*again)
    assert calls.planned == 2
    assert calls.find(*again) is not filled


def test_calls_of_random_sizes_and_addresses_take_no_memory(calls: Calls) -> None:
    rng = random.Random(2)

    def make(number: int) -> int:
        """Make that many calls; return the number of blocks of memory that Python uses then."""
        for _ in range(number // 100):
            for _ in range(100):
                name = rng.choice(
                    ("Allreduce", "Allgather", "Alltoallv", "Alltoallv with counts on the GPU", "rms_norm")
                )
                calls.run(*call_of(name, rng.choice((100, 10_000, 1_000_000)) + rng.randrange(100), rng))
            calls.finish()
        gc.collect()
        return sys.getallocatedblocks()

    before = make(3_000)
    planned = calls.planned
    grown = make(15_000) - before
    assert grown < 10_000  # less than a block for each call, because the cache of calls has a bound
    assert calls.planned == planned


# Messages in stream order.

PEER, TAG = 1, 7
Route = tuple[int, int, int, int]
BOTH: Route = (PEER, TAG, PEER, MPI.ANY_TAG)
ROUTES: list[Route] = [BOTH, (PEER, 8, PEER, MPI.ANY_TAG), (PEER, TAG, PEER, 8), (0, TAG, PEER, 8)]
ROUTES += [(MPI.PROC_NULL, 0, PEER, MPI.ANY_TAG)]


class Messages:
    """The way of messages between two ranks."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        from mpicomm.collectives.gpu.plan_cache import PlanCache

        monkeypatch.setattr(sys.modules["cupy"], "ndarray", Array, raising=False)
        self._rig = Rig(cuda, monkeypatch)
        backend = SimpleNamespace(stream=lambda stream, array: STREAM)
        session: Any = SimpleNamespace(mappings=Mappings(), backend=backend, require_usable=lambda what: None)
        self._cache = PlanCache(session, self._rig.engine)
        self.planned = 0

    def find(self, send: Array | None, receive: Array, route: Route) -> Any:
        return self._cache.find_message("Sendrecv", send, receive, route)

    def exchange(self, send: Array | None, receive: Array, route: Route = BOTH) -> tuple[tuple[int, ...], ...]:
        """Make a call as the dispatcher does. Return the address, bytes and blocks of both messages in the launch."""
        call = "Sendrecv", send, receive, route
        known = self._cache.find_message(*call)
        if known is None:
            self.planned += 1
            sent = None if send is None else message(send, TAG)
            received = message(receive, None)
            known = plan = self._rig.engine.prepare_messages("Sendrecv", sent, received)
            plan.by_output = send is None
            self._cache.add_message(plan, *call, sent, received)
        self._cache.enqueue(known, None, send, receive)
        arguments, shape = self._rig.launched[-1], self._rig.shapes[-1]
        sides = arguments.sent, arguments.received
        assert shape["blocks"] == sum(side.blocks for side in sides)
        assert all(side.blocks * side.stride >= side.nbytes for side in sides)
        return tuple((side.pointer, side.nbytes, side.tag) for side in sides)


@pytest.fixture
def messages(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Messages:
    return Messages(cuda, monkeypatch)


def message(array: Array, tag: int | None) -> Message:
    return Message(PEER, Span(array.data.ptr, array.size * array.itemsize), tag)


def array_of(buffer: int, count: int, dtype: str = "f4", place: int = 0) -> Array:
    return Array((buffer << 50) + 256 * place, count, np.dtype(dtype))


LENGTHS = st.integers(0, 12) | st.integers(0, 10_000_000)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_messages_have_their_addresses_and_lengths(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Each kind of message is planned once. Messages that overlap are read, and so is one after an empty message."""
    messages = Messages(cuda, monkeypatch)
    kinds = [(data.draw(st.sampled_from(ROUTES)), data.draw(st.sampled_from(["f4", "f8", "i2"]))) for _ in range(2)]
    known: set[Any] = set()
    for number in range(6):
        route, dtype = data.draw(st.sampled_from(kinds))
        received = data.draw(LENGTHS)
        sent = data.draw(LENGTHS) if received else 1
        received = received or int(route[0] == MPI.PROC_NULL)
        place = number + 6 * data.draw(st.integers(0, 1 << 16))  # none twice, because a graph is not noted
        send = None if route[0] == MPI.PROC_NULL else array_of(1, sent, dtype, place)
        receive = array_of(2, received, dtype, place)
        if send is not None and data.draw(st.booleans()) and sent and received:
            send.data.ptr = receive.data.ptr + data.draw(st.sampled_from([1 - send.nbytes, 0, receive.nbytes - 1]))
            assert messages.find(send, receive, route) is None
            send.data.ptr = receive.data.ptr - send.nbytes
        planned, nbytes = messages.planned, np.dtype(dtype).itemsize
        (pointer, length, tag), (into, room, _) = messages.exchange(send, receive, route)
        assert (pointer, length) == ((send.data.ptr, nbytes * sent) if send is not None and sent else (0, 0)), number
        assert (into, room) == ((receive.data.ptr, nbytes * received) if received else (0, 0)), number
        assert tag == messages.exchange(send, receive, route)[0][2]
        if (route, dtype) in known:
            assert messages.planned == planned
        elif received and (sent or send is None):  # an empty message does not tell the bytes of an element
            known.add((route, dtype))


def test_the_tag_of_a_message_contains_its_length(messages: Messages) -> None:
    lengths = [5, 100_003, 1, 12]
    tags = {messages.exchange(array_of(1, each), array_of(2, 4))[0][2] for each in lengths}
    assert len(tags) == len(lengths) and messages.planned == 1


def test_a_repeated_message_gets_a_plan_with_a_graph(messages: Messages) -> None:
    for count in (4, 5):
        messages.exchange(array_of(1, count), array_of(2, count))
    send, receive = array_of(1, 6), array_of(2, 6)
    for _ in range(12):
        messages.exchange(send, receive)
    assert messages.planned == 2
