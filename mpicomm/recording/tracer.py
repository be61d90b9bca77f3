"""Tracer: the records of one communicator, how ranks begin to record together, and the offsets of their clocks.

Also the work that recorded calls enqueue on one device: hooks replace methods of the objects that enqueue work, but
only of a communicator that records. All other communicators run the same code as if there were no records.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicomm import environment
from mpicomm.cluster.agreement import Group
from mpicomm.cluster.process import boot_id, namespace, process_number
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import HandleError, MpicommError
from mpicomm.log import logger
from mpicomm.recording.record import Category, Counts, Reading, Record, current, note_slow_way, now_ns, open_records
from mpicomm.recording.recorder import Recorder

if TYPE_CHECKING:
    from mpicomm.devices.cuda.timeline import Timeline

_TAG = 3  # messages of other groups of the same communicator have other tags
_ROUNDS = 32


def clock_key() -> str:
    """Return a text that is the same on ranks that read one clock: ranks of one kernel and one time namespace."""
    return f"{boot_id()}/{namespace('time')}"


def read_clocks(group: Group, comm: MPI.Intracomm) -> Reading:
    """Compare this rank's clock with the clock of the first rank of ``group``. Collective, blocking.

    ``comm`` carries the group's messages. Ranks of one kernel have the same clock. Each other rank asks the first rank
    for its time, again and again, and believes the fastest answer. Raises as `Group.allgather`. If a rank dies between
    two answers, ranks hang in MPI.
    """
    told = group.allgather("clocks: ranks", lambda: (clock_key(), process_number()))
    others = [index for index, (key, _) in enumerate(told) if key != told[0][0]]
    reference = told[0][1]

    def compare() -> Reading:
        if group.rank in others:
            return _ask(comm, group.ranks[0], reference)
        if group.rank == 0:
            question = np.zeros(1, np.int64)
            for rank in [group.ranks[index] for index in others for _ in range(_ROUNDS)]:
                comm.Recv(question, rank, _TAG)
                comm.Send(np.array([now_ns()], np.int64), rank, _TAG)
        return {"reference": reference, "time_ns": now_ns(), "offset_ns": 0, "uncertainty_ns": 0}

    return group.allgather("clocks: times", compare)[group.rank] if others else compare()


def _ask(comm: MPI.Intracomm, first: int, reference: int) -> Reading:
    answer, question = np.zeros(1, np.int64), np.zeros(1, np.int64)
    rounds = []
    for _ in range(_ROUNDS):
        begin = now_ns()
        comm.Sendrecv(question, first, _TAG, answer, first, _TAG)
        rounds.append((now_ns() - begin, begin, int(answer[0])))
    taken, begin, first_ns = min(rounds)
    # The first rank read its clock at some time between the two, and at no other time.
    middle = begin + taken // 2
    offset_ns, uncertainty_ns = first_ns - middle, -(-taken // 2)
    return {"reference": reference, "time_ns": middle, "offset_ns": offset_ns, "uncertainty_ns": uncertainty_ns}


_MOST_NAMED = 8  # ranks in the label of a communicator
_recorders: dict[environment.Recording, Recorder] = {}
_made: Counter[int] = Counter()


class Tracer:
    """The records of one communicator on this rank. ``label`` is its name in traces, the same on all its ranks.

    ``reads_clocks`` is for a communicator that is made of no other communicator: its ranks compare their clocks.
    """

    def __init__(self, recorder: Recorder, label: str, *, reads_clocks: bool = False) -> None:
        self.label = label
        self._reads_clocks = reads_clocks
        self.counts = Counts()
        self.ordinal = -1
        """The device of the communicator's streams; -1 while there is none."""
        self._recorder = recorder
        self._calls = 0
        self._children: Counter[tuple[int, ...]] = Counter()

    @classmethod
    def open(cls, group: Group, comm: MPI.Intracomm, wanted: Sequence[environment.Recording | None]) -> Tracer:
        """Begin to record a communicator. Collective.

        ``wanted`` has the settings of all ranks, of which at least one asks for records. The settings of the first rank
        that has some hold for all ranks, because launchers such as mpirun may give a variable to one rank alone.
        ``comm`` carries the messages of ``group``, which holds all ranks. Raises `InvalidUsageError`, on every rank
        alike, if a file cannot be written.
        """
        settings = [each for each in wanted if each is not None]
        trace = next((each.trace for each in settings if each.trace is not None), None)
        mine = environment.Recording(trace, any(each.stats for each in settings))

        def start() -> tuple[int, int]:
            number = process_number()
            if mine not in _recorders:
                _recorders[mine] = Recorder(mine, number, reports=MPI.COMM_WORLD.rank == 0)
            _made[number] += 1
            return number, _made[number]

        first, number = group.allgather("Communicator: trace", start)[0]
        tracer = cls(_recorders[mine], f"{first}.{number}", reads_clocks=True)
        tracer._read_clocks(group, comm)
        return tracer

    def child(self, ranks: Sequence[int]) -> Tracer:
        """Return the tracer of a communicator made of ``ranks`` of this communicator. Local.

        All its ranks find the same label, because they have made the same communicators of these ranks before.
        """
        self._children[tuple(ranks)] += 1
        said = ",".join(map(str, ranks))
        if len(ranks) > _MOST_NAMED:
            said = f"{len(ranks)} ranks {zlib.crc32(said.encode()):08x}"
        return Tracer(self._recorder, f"{self.label}/{said}#{self._children[tuple(ranks)]}")

    def begin(self, operation: str, category: Category, *, numbered: bool = False, **facts: Any) -> Record:
        """Begin the record of a call of this thread, which has these ``facts`` of `Record`.

        ``numbered`` is for calls that all ranks make in one order.
        """
        records = open_records()
        record = Record(self.label, operation, category, nested=bool(records), **facts)
        if numbered and not records:
            self._calls += 1
            record.number = str(self._calls)
        records.append(record)
        size = "" if record.nbytes is None else f" {record.nbytes} B {record.dtype}".rstrip()
        self._recorder.open_range(record, f"{operation}{size}")
        record.start_ns = now_ns()
        return record

    def set_algorithm(self, algorithm: str, why: str) -> None:
        """Note the algorithm of this thread's call, and the reason for it, as soon as the call knows them."""
        record = current()
        if record is None or record.algorithm:
            return
        record.algorithm, record.why = algorithm, why
        self._recorder.open_range(record, f"{record.operation} by {algorithm}")

    def end(self, record: Record) -> None:
        """End the record of a call of this thread."""
        record.stop_ns = now_ns()
        records = open_records()
        while records and records.pop() is not record:
            pass
        if not (record.algorithm or record.error) and record.category in ("collective", "message"):
            record.algorithm = "mpi"  # all other calls name their algorithm
            if record.nbytes is not None and not record.slow_ways:
                record.why = "MPI takes host arrays of this size and type"
        self._recorder.close_ranges(record)
        self._recorder.add(record, self.ordinal, self.counts)

    def flush(self) -> None:
        """Write all known events to the trace file."""
        self._recorder.flush()

    def read_clocks_again(self, group: Group, comm: MPI.Intracomm) -> None:
        """Read the ranks' clocks once more before they part, because clocks drift. Collective; it raises nothing."""
        with contextlib.suppress(MpicommError):  # if a rank is missing, the rest of the teardown reports it
            self._read_clocks(group, comm)

    def _read_clocks(self, group: Group, comm: MPI.Intracomm) -> None:
        if self._reads_clocks and self._recorder.file is not None:
            self._recorder.file.add_clock(read_clocks(group, comm))


class DeviceTracer:
    """Measures the work that calls enqueue on the device ``backend``, and notes the algorithms that engines choose."""

    def __init__(self, tracer: Tracer, backend: GpuBackend) -> None:
        self._tracer = tracer
        self._backend = backend
        self._timeline = timeline_of(backend)
        tracer.ordinal = int(backend.device)
        for name in ("signal", "wait_signal", "pack", "launch"):
            _replace(backend, name, self._on_stream)
        _replace(backend, "launcher", self._maker)
        _replace(backend, "graph_of", lambda make: lambda enqueue: enqueue)  # its launches are measured one by one
        _replace(backend, "copy", functools.partial(self._on_stream, of_memory="copy_engine"))
        _replace(backend, "message_steps", lambda steps: lambda: _RecordedSteps(steps(), self))

    @contextlib.contextmanager
    def enqueued(self, stream: int, algorithm: str = "", why: str = "") -> Iterator[None]:
        """Count the work that the block enqueues on ``stream`` as work of the current call, with this algorithm.

        A call has one interval in each stream, from the begin of its first piece to the end of its last piece.
        """
        record = current()
        if record is None:  # work of a set-up
            yield
            return
        if algorithm:
            self._tracer.set_algorithm(algorithm, why)
        interval = next((each for each in record.intervals if each.stream == stream), None)
        if interval is None:
            if self._backend.is_capturing(stream):
                record.captured = True
            elif self._timeline is not None and (interval := self._timeline.begin(stream)) is not None:
                record.intervals.append(interval)
        try:
            yield
        finally:
            if interval is not None:
                interval.extend()

    def trace_engine(self, engine: object) -> None:
        """Measure the plans that an engine enqueues, and note their algorithms. Local."""

        def hook(enqueue: Callable[..., bool]) -> Callable[..., bool]:
            def recorded(plan: Any, stream: int, *arguments: Any, **keywords: Any) -> bool:
                algorithm, why, slow = plan.choice
                if slow:
                    note_slow_way(slow)
                with self.enqueued(stream, algorithm, why):
                    return enqueue(plan, stream, *arguments, **keywords)

            return recorded

        _replace(engine, "enqueue", hook)

    def step(self, step: Callable[..., None], algorithm: str = "", why: str = "") -> Callable[..., None]:
        """Return ``step``, whose first argument is a stream, as recorded work."""

        def recorded(stream: int, *arguments: int, **words: int) -> None:
            with self.enqueued(stream, algorithm, why):
                step(stream, *arguments, **words)

        return recorded

    def _on_stream(self, method: Callable[..., None], of_memory: str = "") -> Callable[..., None]:
        """Return a method whose last argument is a stream; ``of_memory`` is its algorithm in a call on memory."""

        def recorded(*arguments: Any, **keywords: Any) -> None:
            record = current()
            algorithm = of_memory if record is not None and record.category == "memory" else ""
            with self.enqueued(arguments[-1], algorithm):
                method(*arguments, **keywords)

        return recorded

    def _maker(self, method: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
        return lambda *arguments, **numbers: self.step(method(*arguments, **numbers))


class _RecordedSteps:
    """The `MessageSteps` of a backend, as recorded work."""

    def __init__(self, steps: Any, work: DeviceTracer) -> None:
        self._steps = steps
        self._recorded = functools.partial(work.step, algorithm="rendezvous", why="the receiver's GPU copies it")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        step = getattr(self._steps, name)
        if name in ("copy_in", "copy_out"):  # they make a step
            return lambda place, **words: self._recorded(step(place, **words))
        return self._recorded(step)


def timeline_of(backend: GpuBackend) -> Timeline | None:
    """Return a timeline of a GPU; None, with a warning, if its work cannot be measured. Local."""
    from mpicomm.devices.cuda.timeline import Timeline

    try:
        return Timeline(backend, now_ns)
    except HandleError as error:  # the other ranks go on to make the communicator, so this rank must not raise
        logger.warning("records have no times of GPU %s: %s", backend.device, error)
        return None


def _replace(part: object, name: str, hook: Callable[[Any], Any]) -> None:
    if hasattr(part, name):
        setattr(part, name, hook(getattr(part, name)))
