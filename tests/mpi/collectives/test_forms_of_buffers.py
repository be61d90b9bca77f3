"""Any forms of buffers on any ranks: calls against plain mpi4py's on copies in host memory.

Hypothesis chooses the calls, the same on all ranks; each rank draws the forms of its buffers. On GPUs some ranks may
pass only host arrays to calls with ``algorithm="mpi"``. Without GPUs the engine of the host stands for their engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm.activity.reading import read_activity
from mpicomm.collectives.gpu.algorithms.registry import names_for
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE
from tests.helpers.rigs.call_forms import FORMS, complete, method_name
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.device_calls import on_host_engine
from tests.helpers.rigs.message_rigs import take_for_gpu

Array = npt.NDArray[Any]
Kind = tuple[Any, int]
"""A datatype, and the bytes of an element."""

EXAMPLES = int(os.environ.get("TEST_SEQUENCES", "60"))
UNIT = 2  # int64: 16 bytes, a multiple of each type
MOST = 5
MOVED: list[Kind] = [
    (MPI.BYTE, 1), (MPI.CHAR, 1), (MPI.SIGNED_CHAR, 1), (MPI.DOUBLE, 8), ("d", 8), ("f4", 4), (MPI.LONG, 8),
    (MPI.INT64_T, 8), ("Zd", 16), (MPI.C_BOOL, 1), (MPI.AINT, 8), ("i", 4), ("e", 2), ("bfloat16", 2),
]  # fmt: skip
REDUCED: list[Kind] = [(MPI.INT64_T, 8), (MPI.LONG, 8), ("l", 8), ("q", 8), ("i8", 8), (MPI.LONG_LONG, 8)]
REDUCED_BY_MPI: list[Kind] = [("l", 8), (MPI.LONG, 8)]  # mpi4py takes only one type of MPI in both buffers
JUNK: tuple[Any, ...] = ([1.0, 2.0], (), object(), 7, "text", None, {}, np.zeros((4, 4))[::2, ::2], [b"", -1, MPI.INT])
PLAIN = MPI.Intracomm(MPI.COMM_WORLD)
QUIET: dict[str, Any] = {
    "derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck),
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """How a test makes and reads arrays on the GPU of a rank."""

    make: Callable[[Array], Any]
    read: Callable[[Any], Array]
    address: Callable[[Any], int]


def one_of(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def forms_of_host_memory(memory: Any, *, reads: bool) -> list[Any]:
    """Return objects that name the same bytes, and copies of them if the call only reads them."""
    views = [memory.view(name) for name in ("S1", "V4", "f8", "i8", "i8")]
    named = MPI.memory.fromaddress(memory.ctypes.data if memory.size else 0, memory.size)
    copies = [memory.tobytes(), bytearray(memory)] if reads else []
    return [memory, memoryview(memory), *views, named, memory.reshape(4, -1), *copies]


class Buffer:
    """A buffer of one rank: its content, and the places of its blocks, in units."""

    def __init__(
        self, content: Array, counts: Sequence[int] | None = None, places: Sequence[int] | None = None
    ) -> None:
        self.content = content
        self.counts, self.places = counts, places
        self.count = content.size // UNIT
        """Units of one block, in forms of equal blocks."""
        self.reads = self.reduces = False
        """Whether the call only reads it; whether it reduces, for which MPI takes only predefined types."""
        self.kinds = MOVED
        self.array: Any = None
        self.datatypes: list[MPI.Datatype] = []

    @property
    def is_empty(self) -> bool:
        """Whether no element is sent or received."""
        return not (sum(self.counts) if self.counts is not None else self.content.size)

    def plain(self, *, typed: bool) -> Any:
        """The argument for plain mpi4py, and the array in it."""
        array = self.content.copy()
        if self.counts is None or self.places is None:
            return array, [array, UNIT * self.count, MPI.INT64_T]
        counts, places = [UNIT * n for n in self.counts], [UNIT * n for n in self.places]
        if typed:
            return array, [array, counts, [8 * n for n in places], [MPI.INT64_T] * len(counts)]
        return array, [array, counts, places, MPI.INT64_T]

    def drawn(self, rng: np.random.Generator, gpu: Gpu | None, *, typed: bool = False) -> Any:
        """An argument in any form, on a GPU, or on the host if ``gpu`` is None."""
        if gpu is not None:
            self.array = gpu.make(self.content)
            # Libraries name the address, or the address and the length.
            named = MPI.memory.fromaddress(gpu.address(self.array), self.content.nbytes)
            return self._spec(rng, one_of(rng, [self.array, self.array, named]), typed=typed)
        odd = one_of(rng, (0, 0, 1))  # there larger elements are unaligned: mpi4py has no type for them
        self.array = np.empty(self.content.nbytes + 1, np.uint8)[odd : odd + self.content.nbytes]
        self.array[:] = self.content.view(np.uint8)
        return self._spec(rng, one_of(rng, forms_of_host_memory(self.array, reads=self.reads)), typed=typed)

    def nowhere(self, rng: np.random.Generator, *, typed: bool = False) -> Any:
        """An argument that names no memory."""
        self.kinds = [kind for kind in self.kinds if kind[0] not in ("e", "bfloat16")]
        return self._spec(rng, one_of(rng, [None, MPI.memory.fromaddress(0, 0)]), typed=typed)

    def received(self, gpu: Gpu | None) -> Array:
        """The content after the call."""
        if self.array is None:
            return self.content
        on_gpu = gpu is not None and not isinstance(self.array, np.ndarray)
        content: Array = gpu.read(self.array) if gpu is not None and on_gpu else self.array.view(np.int64)
        return content

    def _spec(self, rng: np.random.Generator, memory: Any, *, typed: bool) -> Any:
        if typed:
            return self._typed(rng, memory)
        datatype, itemsize = one_of(rng, self.kinds)
        if isinstance(datatype, MPI.Datatype) and not self.reduces and rng.integers(4) == 0:
            datatype = self._made(datatype.Dup())
        each = 8 * UNIT // itemsize
        is_typed = memory is self.array if isinstance(self.array, DeviceArray) else getattr(memory, "dtype", 0) == "i8"
        if self.counts is not None and self.places is not None:
            counts, places = [each * n for n in self.counts], [each * n for n in self.places]
            forms: list[Any] = [[memory, counts, places, datatype], [memory, (counts, places), datatype]]
            forms.append([memory, np.array(counts), np.array(places), datatype])
            if places == [sum(counts[:index]) for index in range(len(counts))]:
                forms += [(memory, tuple(counts), None, datatype), [memory, (counts, None), datatype]]
            if is_typed:
                forms.append([memory, ([UNIT * n for n in self.counts], [UNIT * n for n in self.places])])
            return one_of(rng, forms)
        count = each * self.count
        forms = [[memory, count, datatype], (memory, (count, 0), datatype), [memory, count, 0, datatype]]
        if self.count and not self.reduces:
            forms.append([memory, 1, self._made(MPI.INT64_T.Create_contiguous(UNIT * self.count))])
        if memory is not None and (is_typed or isinstance(self.array, np.ndarray)):
            forms += [[memory, datatype], (memory, None, datatype)]
        return one_of(rng, [*forms, *[memory, [memory, UNIT * self.count]] * is_typed])

    def _typed(self, rng: np.random.Generator, memory: Any) -> Any:
        assert self.counts is not None and self.places is not None
        counts, types = [], []
        for n in (UNIT * units for units in self.counts):
            if n and rng.integers(2):
                counts.append(1)
                spread = [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [1]
                whole = rng.integers(2)
                made = MPI.INT64_T.Create_contiguous(n) if whole else MPI.INT64_T.Create_darray(1, 0, [n], *spread)
                types.append(self._made(made))
            else:
                counts.append(n)
                types.append(MPI.INT64_T if n else one_of(rng, (MPI.DOUBLE, MPI.INT, MPI.SHORT_INT)))
        return [memory, (counts, [8 * UNIT * place for place in self.places]), types]

    def _made(self, datatype: MPI.Datatype) -> MPI.Datatype:
        self.datatypes.append(datatype.Commit())
        return datatype


class Call:
    """One rank's part of a call that ``seed`` draws. All but the forms of the buffers is the same on all ranks.

    ``named`` names an algorithm: on GPUs "mpi", for which some ranks may pass only host arrays, else "one_shot".
    """

    def __init__(self, name: str, form: str, seed: int, comm: Any, gpu: Gpu | None, *, named: bool) -> None:
        self._row, self._name, self._gpu = OPERATIONS[name], name, gpu
        self._method = method_name(form, name)
        self._rank, self._size = comm.rank, comm.size
        self._by_mpi = named and gpu is not None
        is_named = named and (gpu is not None or name in OF_ONE_TYPE)
        self._how = {"algorithm": "mpi" if gpu is not None else "one_shot"} if is_named else {}
        self._rng = np.random.default_rng([seed, comm.rank])  # draws of this rank only
        shared, size = np.random.default_rng(seed), comm.size
        scale = 1 if gpu is not None else one_of(shared, (1, 1, 600, 8000))
        self._n = [scale * int(shared.integers(1, MOST)) * int(shared.integers(3) > 0) for _ in range(size)]
        self._table = scale * shared.integers(0, MOST, (size, size)) * (shared.integers(0, 3, (size, size)) > 0)
        self._table[shared.integers(size)] *= int(shared.integers(2))
        self._same = scale * int(shared.integers(0, MOST))
        self._root, self._gap = int(shared.integers(size)), int(shared.integers(3))
        self._op = MPI.SUM if gpu is not None else one_of(shared, (MPI.SUM, MPI.MAX, MPI.BXOR, MPI.PROD))
        self._joins = comm.rank in shared.permutation(size)[: int(shared.integers(size))]
        """Whether this rank passes only host arrays, and joins a call that another rank has on GPUs."""
        self._content = np.random.default_rng([seed, comm.rank, 1])
        self.send, self.receive = self._buffers()
        for buffer in (self.send, self.receive):
            if buffer is not None:
                buffer.reduces = self._row.reduces
                if buffer.reduces:
                    buffer.kinds = REDUCED_BY_MPI if self._by_mpi else REDUCED
        if self.send is not None:
            self.send.reads = True
        elif self.receive is not None:
            self.receive.reads = self._row.rooted == "bcast" and self._rank == self._root

    def expected(self, comm: MPI.Intracomm) -> Array | None:
        """Return the content of this rank's receive buffer after the call of plain mpi4py. Collective."""
        typed = self._row.send == "typed"
        sent = None if self.send is None else self.send.plain(typed=typed)[1]
        array, received = (None, None) if self.receive is None else self.receive.plain(typed=typed)
        getattr(comm, self._name)(*self._arguments(sent, received))
        return array

    def run(self, comm: Any) -> Array | None:
        """Make the call; return the content of the receive buffer after it. Collective."""
        arguments = self._arguments(*self._drawn())
        complete(getattr(comm, self._method)(*arguments, **self._how))
        comm.check()
        for buffer in (self.send, self.receive):
            for datatype in buffer.datatypes if buffer is not None else ():
                datatype.Free()
        return None if self.receive is None else self.receive.received(self._gpu)

    def _arguments(self, send: Any, receive: Any) -> list[Any]:
        row = self._row
        buffers = [receive] if row.rooted == "bcast" else [send, receive]
        return [
            *buffers,
            *([[UNIT * n for n in self._n]] if row.send == "counted" else []),
            *([self._op] if row.reduces else []),
            *([self._root] if row.rooted else []),
        ]

    def _drawn(self) -> list[Any]:
        """Draw the form and the memory of each buffer. Without MPI, the buffers of a rank put the call on GPUs."""
        typed, pair = self._row.send == "typed", [self.send, self.receive]
        common = {"receive": [self.send], "send": [self.receive]}.get(self._row.rooted, pair)
        deciding = [each for each in common if each is not None]
        if self._row.counts == "same":  # an empty recvbuf of Reduce_scatter leaves the choice to sendbuf
            deciding = [each for each in deciding if not each.is_empty] or deciding
        # One of the buffers that decide lies on the GPU, or one of them nowhere.
        sure = one_of(self._rng, deciding)
        made: list[Any] = []
        for buffer in pair:
            if buffer is None:
                made.append(None)
                continue
            lies = one_of(self._rng, ("gpu", "host", "nowhere" if buffer.is_empty else "gpu"))
            empty_of_all = self._row.counts == "same" and buffer.is_empty
            if lies == "host" and not self._by_mpi and (buffer is sure or empty_of_all):
                lies = "gpu"
            if lies == "gpu" and self._joins and not empty_of_all:
                lies = "host"
            if lies == "nowhere":
                made.append(buffer.nowhere(self._rng, typed=typed))
            else:
                made.append(buffer.drawn(self._rng, self._gpu if lies == "gpu" else None, typed=typed))
        return made

    def _buffers(self) -> tuple[Buffer | None, Buffer | None]:
        row, rank, size, at_root = self._row, self._rank, self._size, self._rank == self._root
        n, same = self._n, self._same
        if row.send in ("vector", "typed") and row.receive in ("vector", "typed"):
            return self._blocks(self._table[rank].tolist()), self._blocks(self._table[:, rank].tolist())
        if row.send == "counted":
            return Buffer(self._values(sum(n))), Buffer(self._values(n[rank]))
        if "vector" in (row.send, row.receive):
            whole, one = self._blocks(n), Buffer(self._values(n[rank]))
            if row.rooted == "send":
                return whole if at_root else None, one
            return one, whole if at_root or not row.rooted else None
        buffers = []
        for shape, alone in ((row.send, row.rooted == "send"), (row.receive, row.rooted == "receive")):
            buffer = Buffer(self._values(same * (size if shape == "blocks" else 1)))
            buffer.count = same
            buffers.append(None if alone and not at_root else buffer)
        return (None, buffers[1]) if row.rooted == "bcast" else (buffers[0], buffers[1])

    def _values(self, units: int) -> Array:
        return self._content.integers(-99, 99, UNIT * units)

    def _blocks(self, counts: Sequence[int]) -> Buffer:
        places, end = [], 0
        for count in counts:
            places.append(end)
            end += count + self._gap
        empty = not sum(counts)
        return Buffer(self._values(0 if empty else end), list(counts), [0] * len(counts) if empty else places)


def all_are_neighbors(comm: MPI.Intracomm) -> Any:
    return comm.Create_dist_graph_adjacent(range(comm.size), range(comm.size))


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    plain = all_are_neighbors(PLAIN)
    yield plain
    plain.Free()


@pytest.fixture(scope="module")
def on_host(host_comm: mpicomm.Communicator) -> Iterator[Any]:
    comm = all_are_neighbors(host_comm)
    yield comm
    comm.Free()


@pytest.fixture(scope="module")
def gpus(device: str) -> Iterator[tuple[Any, Gpu]]:
    """A communicator of GPUs, real ones or threads, and how its arrays are made."""
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank has no others that pass other buffers")
    with communicator(device) as parent, array_module(parent) as xp:
        comm = all_are_neighbors(parent)
        if device == "cpu":
            threads = take_for_gpu(comm)
            with on_host_engine(comm):
                yield (
                    comm,
                    Gpu(
                        lambda content: DeviceArray(threads, content),
                        lambda array: array.get(),
                        lambda array: int(array.memory.ctypes.data),
                    ),
                )
        else:
            yield comm, Gpu(xp.asarray, lambda array: np.asarray(array.get()), lambda array: int(array.data.ptr))
        comm.Free()


def of_forms(examples: int) -> Callable[[Any], Any]:
    """Let Hypothesis choose lists of calls: names, forms, seeds, and whether they name an algorithm."""
    names, seeds = st.sampled_from(tuple(OPERATIONS)), st.integers(0, 1 << 16)
    calls = st.tuples(names, st.sampled_from(FORMS), seeds, st.sampled_from((False, False, True)))

    def decorate(test: Any) -> Any:
        return settings(max_examples=examples, **QUIET)(given(calls=st.lists(calls, min_size=1, max_size=6))(test))

    return decorate


def play(comm: Any, plain: Any, gpu: Gpu | None, calls: list[tuple[str, str, int, bool]]) -> None:
    for name, form, seed, named in calls:
        call, failure = Call(name, form, seed, comm, gpu, named=named), ""
        expected = call.expected(plain)
        try:
            got = call.run(comm)
            if expected is not None:
                assert got is not None
                np.testing.assert_array_equal(got, expected)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        what = f"{name} {form} {seed} {named}"
        require_success(failure, what)
        # The doctor compares the counts of calls of all ranks.
        counts = MPI.COMM_WORLD.allgather(_counts())
        assert all(each == counts[0] for each in counts), f"{what}: {counts}"


def require_success(failure: str, what: str) -> None:
    """Fail on all ranks if there is a failure on any rank, because Hypothesis must go on alike on all of them."""
    failures = [f"rank {rank}: {each}" for rank, each in enumerate(MPI.COMM_WORLD.allgather(failure)) if each]
    assert not failures, f"{what}: {'; '.join(failures)}"


def _counts() -> set[tuple[int, int, int]]:
    """Return how many calls this rank has made of each communicator, and how many of them MPI has carried out."""
    found = read_activity(os.getpid())
    assert found is not None
    return {(calls.key, calls.made, calls.by_mpi) for calls in found.communicators}


@of_forms(EXAMPLES)
def test_on_gpus(gpus: tuple[Any, Gpu], plain: Any, calls: list[tuple[str, str, int, bool]]) -> None:
    comm, gpu = gpus
    comm.Bcast(gpu.make(np.zeros(1, np.int32)))  # there has been a call on GPUs
    play(comm, plain, gpu, calls)


@of_forms(EXAMPLES // 2)
def test_on_the_host(on_host: Any, plain: Any, calls: list[tuple[str, str, int, bool]]) -> None:
    play(on_host, plain, None, calls)


@settings(max_examples=EXAMPLES, **QUIET)
@given(
    n=st.sampled_from((0, 1, 2, 17, 3000, 40_000)),
    seed=st.integers(0, 1 << 20),
    way=st.sampled_from(("Sendrecv", "Isendrecv", "two", "init")),
)
def test_messages_in_a_row_with_walls(host_comm: mpicomm.Communicator, n: int, seed: int, way: str) -> None:
    comm, rng = host_comm, np.random.default_rng([seed, host_comm.rank])
    left, right = (each if 0 <= each < comm.size else MPI.PROC_NULL for each in (comm.rank - 1, comm.rank + 1))
    sent, received = (Buffer(np.full(UNIT * n, value, np.int64)) for value in (comm.rank, 99))
    sent.reads = True
    send = one_of(rng, JUNK) if right == MPI.PROC_NULL else sent.drawn(rng, None)
    receive = one_of(rng, JUNK) if left == MPI.PROC_NULL else received.drawn(rng, None)
    if way == "Sendrecv":
        comm.Sendrecv(send, right, 3, receive, left, 3)
    elif way == "Isendrecv":
        comm.Isendrecv(send, right, 3, receive, left, 3).Wait()
    elif way == "two":
        MPI.Request.Waitall([comm.Irecv(receive, left, 3), one_of(rng, [comm.Isend, comm.Issend])(send, right, 3)])
    else:
        requests = [comm.Recv_init(receive, left, 3), comm.Send_init(send, right, 3)]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        for request in requests:
            request.Free()
    alike = bool((received.received(None) == (99 if left == MPI.PROC_NULL else left)).all())
    require_success("" if alike else "other data", f"{way} of {n}, seed {seed}")
    for datatype in (*sent.datatypes, *received.datatypes):
        datatype.Free()


@pytest.mark.parametrize("name", ["Reduce", "Allreduce", "Scan", "Exscan", "Reduce_scatter_block"])
@pytest.mark.parametrize("form", FORMS)
def test_reductions_of_empty_buffers_at_one_address(host_comm: mpicomm.Communicator, name: str, form: str) -> None:
    for empty in (MPI.memory.fromaddress(0, 0), np.empty(0)):
        complete(getattr(host_comm, method_name(form, name))([empty, MPI.DOUBLE], [empty, MPI.DOUBLE]), starts=2)


@pytest.mark.parametrize("name", ["Allgather", "Allreduce", "Alltoall", "Gather", "Reduce", "Reduce_scatter_block"])
def test_host_arrays_with_every_algorithm(gpus: tuple[Any, Gpu], device: str, name: str) -> None:
    comm, gpu = gpus
    row = OPERATIONS[name]
    for algorithm in ("auto", *names_for(row, in_rank_order=True)):
        for count in (3, 1000, 1_000_003) if device == "cuda" else (3, 1000):
            sent = np.arange(count * (comm.size if row.send == "blocks" else 1), dtype=np.int32) + comm.rank
            got = np.zeros(count * (comm.size if row.receive == "blocks" else 1), np.int32)
            expected, at_root = got.copy(), not row.rooted or comm.rank == 0
            getattr(MPI.COMM_WORLD, name)(sent, expected if at_root else None)
            # In a rooted call the input is on the GPUs, because all ranks pass it.
            for inputs_on_gpu in (True,) if row.rooted else (True, False):
                target = got.copy() if inputs_on_gpu else gpu.make(got)
                source = gpu.make(sent) if inputs_on_gpu else sent
                getattr(comm, name)(source, target if at_root else None, algorithm=algorithm)
                comm.check()
                result = target if inputs_on_gpu else gpu.read(target)
                assert not at_root or np.array_equal(result, expected), (algorithm, count, inputs_on_gpu)
