"""The comparison of libraries: their base class, mpicomm, plain MPI, and how to open and measure them.

All ranks open a library together, and drop it together if it fails on one rank. If calls vary, a library has a list of
variations of a case, and makes the next one in each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.api.communicator import Communicator
from mpicomm.bench.measure import Call, CheckedCall, LibraryError, Machine, Measured, Measuring, Trial, collective_try
from mpicomm.bench.operations import BARRIER, IN_PLACE, POISON, ROOT, SENDRECV, Case, CaseBuffers, Content, buffers
from mpicomm.collectives.gpu.decision import ALGORITHMS
from mpicomm.collectives.operations import Operation as Collective
from mpicomm.collectives.wire import Wire
from mpicomm.mpi import types
from mpicomm.mpi.spec import Shape

_LARGEST_STAGED = 64 << 20  # larger sizes take minutes and show nothing new
_IN_RANK_ORDER = {algorithm.name for algorithm in ALGORITHMS if algorithm.in_rank_order}
_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN, "avg": mpicomm.AVG}


L = TypeVar("L", bound="Library")
OWN = "mpicomm"
UNQUANTIZED = "mpicomm-unquantized"


class Library:
    """A library to measure, and the two arrays of its calls. All methods but `missing` are collective."""

    name = ""
    version = ""
    exact = False
    """Whether its reductions are in rank order, so that the bench can compare every bit."""
    capturable = True
    """Whether CUDA graphs can capture its calls."""
    result_at_front = True
    """Whether an in-place reduce-scatter leaves its block at the front of the buffer."""
    error = 0.0
    """The largest error of an element of magnitude 1 that a rank sends; 0 unless calls quantize."""
    first: Any = None
    second: Any = None

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        self._comm = comm
        self._machine = machine

    @property
    def own(self) -> bool:
        """Whether it is mpicomm. Failures of mpicomm end the run."""
        return self.name in (OWN, UNQUANTIZED)

    @staticmethod
    def missing() -> str | None:
        """Return the package to install, or None. Local."""
        return None

    def allocate(self, nbytes: int) -> Any:
        """Return memory of the kind that is fastest for this library, as a NumPy or CuPy array of bytes."""
        return self._machine.xp.empty(nbytes, np.uint8)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        """Return the calls that can run a case, by name. The fastest counts. Raises `LibraryError`."""
        raise NotImplementedError

    def close(self) -> None:
        """Free everything but the two arrays."""

    def named(self: L, name: str, nbytes: int) -> L:
        """Return the library with a name, and with arrays of ``nbytes`` unless 0."""
        self.name = name
        if nbytes == 0:
            return self
        self.first, self.second = self.allocate(nbytes), self.allocate(nbytes)
        with self._machine.current():
            for array in (self.first, self.second):
                array.fill(0)  # because calls that vary read bytes that no case has written, perhaps slow numbers
        self._machine.finish()
        return self

    def buffers(self, case: Case, shift: int = 0) -> CaseBuffers:
        """Return the buffers of a case, ``shift`` bytes into the two arrays."""
        return buffers(case, self.first[shift:], self.second[shift:], result_at_front=self.result_at_front)


def view_bytes(pointer: int, nbytes: int, owner: object) -> Any:
    """Return device memory of another library as a CuPy array of bytes."""
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner)
    return cupy.ndarray((nbytes,), cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))


class Mpicomm(Library):
    """mpicomm's public calls. ``symmetric`` says whether its arrays come from ``comm.empty``."""

    version = mpicomm.__version__

    def __init__(
        self, comm: Communicator, machine: Machine, *, symmetric: bool, algorithm: str, wire: Wire | None = None
    ) -> None:
        super().__init__(comm, machine)
        self._symmetric = symmetric
        # On the host "auto" may leave a call to MPI, which reduces in any order.
        self.exact = machine.stream is not None if algorithm == "auto" else algorithm in _IN_RANK_ORDER
        self._options: dict[str, Any] = {}
        if machine.stream is not None:
            self._options["stream"] = machine.stream
        if algorithm != "auto":
            self._options["algorithm"] = algorithm
        if wire is not None:
            self._options["wire_dtype"] = wire.dtype
            self.error = wire.error

    def allocate(self, nbytes: int) -> Any:
        """Return an array. A symmetric array lives until the communicator is freed."""
        return self._comm.empty(nbytes, np.uint8).local if self._symmetric else super().allocate(nbytes)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        return {"": mpi_call(self._comm, case, buffers, self._options)}


class PlainMpi(Library):
    """mpi4py's own methods, on host arrays directly, on device arrays through pinned host copies."""

    capturable = False

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        self.version = " ".join(MPI.Get_library_version().splitlines()[0].split())
        self._mpi = MPI.Intracomm(comm)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        if case.operation.reduces and (types.mpi_datatype(case.dtype) is None or case.op == "avg"):
            raise LibraryError(f"MPI has no {case.op} of {case.dtype}")
        if case.dtype.isbuiltin != 1:
            raise LibraryError(f"MPI has no {case.dtype}")
        stream = self._machine.stream
        if stream is None:
            return {"": mpi_call(self._mpi, case, buffers, {})}
        if case.nbytes > _LARGEST_STAGED:
            raise LibraryError("measured up to 64 MiB")
        if case.in_place and case.operation.places != (IN_PLACE,):
            raise LibraryError("copies through the host are never in place")
        send = _pinned(buffers.send)
        receive = send if buffers.receive is buffers.send else _pinned(buffers.receive)
        call = mpi_call(self._mpi, case, CaseBuffers(send, receive), {})

        def run() -> None:
            if send is not None:
                buffers.send.get(out=send, stream=stream, blocking=False)
            stream.synchronize()
            call()
            if receive is not None:
                buffers.receive.set(receive, stream=stream)

        return {"": run}


def _pinned(array: Any) -> Any:
    if array is None:
        return None
    import cupyx

    return cupyx.empty_pinned(array.shape, np.uint8)


def mpi_call(comm: MPI.Intracomm, case: Case, buffers: CaseBuffers, options: dict[str, Any]) -> Call:
    """Return a case as a call of ``comm``'s method, of mpi4py or mpicomm, with these keyword arguments."""
    collective = case.operation.collective
    if collective is not None:
        return partial(getattr(comm, collective.name), *_arguments(collective, case, buffers), **options)
    if case.operation is SENDRECV:
        # The buffers go as bytes, because MPI carries messages of host arrays and does not know all types.
        to, (source,) = (case.rank + 1) % case.size, case.sources
        return partial(comm.Sendrecv, buffers.send, to, recvbuf=buffers.receive, source=source, **options)
    return partial(comm.Barrier, **options)


def _arguments(collective: Collective, case: Case, buffers: CaseBuffers) -> list[Any]:
    send = _buffer(buffers.send, case, collective.send, case.sent)
    receive = _buffer(buffers.receive, case, collective.receive, case.received)
    given = {"buf": receive, "sendbuf": send, "recvbuf": receive, "op": _OPS[case.op], "root": ROOT}
    if case.shares_buffer:
        given["recvbuf" if collective.rooted == "send" else "sendbuf"] = MPI.IN_PLACE
        if collective.reduces:
            given["recvbuf"] = send  # one buffer holds the input of all blocks, and the result goes to its front
    return [given[name] for name in collective.arguments]


def _buffer(array: Any, case: Case, shape: Shape, layout: Callable[[], tuple[list[int], list[int]]]) -> Any:
    """Return bytes as a buffer of elements. A type that is not NumPy's own gives a buffer with the name of the type.

    This buffer has no count, because in a buffer with a block for each rank a count is the count of one block.
    """
    if array is None:
        return None
    native = case.dtype.isbuiltin == 1
    places = [layout()] if shape == "vector" else []
    parts = [array.view(case.dtype) if native else array, *places, *([] if native else [case.dtype.name])]
    return parts if len(parts) > 1 else parts[0]


_SEED = 48
_STEP_NBYTES = 512  # PyTorch and CuPy place arrays of GPUs at multiples of it
_PLACES = 64
ROOM_NBYTES = _STEP_NBYTES * _PLACES
"""The bytes that an array for all variations has in addition to the largest case."""
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_CHECKED = 8  # variations in each check, because a call may go wrong only after a call of another size


def draw(largest: int, wanted: int) -> list[tuple[int, int]]:
    """Return ``wanted`` different variations of a call on at most ``largest`` elements, or all that exist.

    A variation is a block and how many bytes into their arrays its buffers begin, as in a program with changing batches
    and an allocator that places arrays anew. Blocks have more than half of ``largest``, so that each call has the
    algorithm and the geometry of the largest. Every rank draws the same variations.
    """
    smallest = largest // 2 + 1
    possible = (largest - smallest + 1) * _PLACES
    drawn = np.random.default_rng([_SEED, largest]).choice(possible, min(wanted, possible), replace=False)
    return [(smallest + number // _PLACES, number % _PLACES * _STEP_NBYTES) for number in drawn.tolist()]


def mean_share(largest: int) -> float:
    """Return the mean block of all variations, divided by ``largest``."""
    return (largest // 2 + 1 + largest) / 2 / largest


def measure(
    measuring: Measuring, libraries: Iterable[Library], content: Content, case: Case, checks: int, *, vary: bool = False
) -> Measured:
    """Measure a case with ``checks`` checked calls, as `Measuring.run`. If calls ``vary``, it is in variations."""
    trials: list[Trial] = []
    failures: dict[str, str] = {}
    for library in libraries:
        try:
            trials += _trials(measuring, content, library, case, checks, vary=vary)
        except LibraryError as failure:
            failures[library.name] = str(failure)
    return measuring.run(trials, failures)


def open_libraries(
    comm: Communicator, machine: Machine, known: Mapping[str, type[Library]], names: Iterable[str], nbytes: int = 0
) -> tuple[dict[str, Any], dict[str, str]]:
    """Open libraries by their names among the ``known`` ones, with arrays of ``nbytes``. Collective.

    Return those that all ranks can open, and why the others are absent. Multicast is off for all.
    """
    os.environ.update(_WITHOUT_MULTICAST)

    def open_one(name: str) -> Library:
        made = known[name]
        if machine.stream is None and made is not PlainMpi:
            raise LibraryError("skipped, because it needs GPUs and these ranks are on the cpu")
        # All ranks check before one of them waits for another rank.
        reason = next((reason for reason in comm.allgather(made.missing()) if reason is not None), None)
        if reason is not None:
            raise LibraryError(reason)
        return made(comm, machine).named(name, nbytes)

    opened: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            opened[name] = collective_try(comm, partial(open_one, name))
        except LibraryError as failure:
            absent[name] = str(failure)
    return opened, absent


def _trials(
    measuring: Measuring, content: Content, library: Library, case: Case, checks: int, *, vary: bool
) -> list[Trial]:
    """Return a trial for each call of `Library.prepare`. Raises `LibraryError`."""
    variations = [(case, library.buffers(case))]
    if vary:
        checks *= _CHECKED
        num_calls = checks + measuring.warmups + measuring.iterations * measuring.rounds
        varied = [(replace(case, block=block), shift) for block, shift in draw(case.block, num_calls)]
        variations = [(one, library.buffers(one, shift)) for one, shift in varied]
    if case.operation is BARRIER:
        checks = 0

    def check(variation: tuple[Case, CaseBuffers], call: Call) -> CheckedCall:
        def write() -> None:
            if vary:  # a call that reads at the last call's addresses must not find the same data
                library.first[: variation[0].nbytes + ROOM_NBYTES].fill(POISON)
            content.prepare(*variation)

        exact, error = library.exact, library.error
        return CheckedCall(write, call, lambda: content.count_wrong(*variation, exact=exact, error=error))

    prepared = measuring.step(lambda: [library.prepare(*variation) for variation in variations], own=library.own)
    facts: dict[str, Any] = {"own": library.own, "capturable": library.capturable, "check_graph": not case.in_place}
    if case.operation.reduces:
        # The data is fresh, because sums in place grow with every call, and PyTorch's two-shot changes its input.
        facts["refresh"] = partial(content.prepare, case, library.buffers(case))
    trials = []
    for way in prepared[0]:
        calls = [ways[way] for ways in prepared]
        checked = [check(*each) for each in islice(cycle(zip(variations, calls, strict=True)), checks)]
        trials.append(Trial(library.name, _in_turn(calls, checks), checked, way=way, **facts))
    return trials


def _in_turn(calls: Sequence[Call], start: int) -> Call:
    """Return a call that makes the next call of ``calls`` each time, and begins with number ``start``."""
    if len(calls) == 1:
        return calls[0]
    turns = islice(cycle(calls), start, None)
    return lambda: next(turns)()
