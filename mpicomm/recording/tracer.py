"""Tracer: it records the calls of one communicator, and compares the clocks of its ranks.

`DeviceTracer` measures the work that recorded calls enqueue on a device. Its hooks replace methods of the objects that
enqueue work, but only of a communicator that records. All other communicators run without any hook.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm import environment
from mpicomm.cluster.agreement import Group
from mpicomm.cluster.process import boot_id, namespace, process_number
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import HandleError, MpicommError
from mpicomm.log import logger
from mpicomm.recording.record import Category, ClockReading, Counts, Record, add_slow_path, current, now_ns, open_calls
from mpicomm.recording.recorder import Recorder

if TYPE_CHECKING:
    from mpicomm.devices.cuda.timeline import Timeline

_TAG = 3  # messages of other groups of the same communicator have other tags
_ROUNDS = 32


def clock_key() -> str:
    """Return a text that is equal on ranks that read one clock: ranks of one kernel and one time namespace."""
    return f"{boot_id()}/{namespace('time')}"


def read_clocks(group: Group, comm: MPI.Intracomm) -> ClockReading:
    """Compare this rank's clock with the clock of the first rank of ``group``. Collective, blocking.

    ``comm`` carries the group's messages. Ranks of one kernel have the same clock. Any other rank pings the first rank,
    which answers with its time, and takes the answer of the shortest round trip. Raises as `Group.allgather`. If a rank
    dies between two pings, ranks hang in MPI.
    """
    clocks = group.allgather("clocks: ranks", lambda: (clock_key(), process_number()))
    first, (first_key, reference) = group.ranks[0], clocks[0]
    others = [rank for rank, (key, _) in zip(group.ranks, clocks, strict=True) if key != first_key]

    def compare() -> ClockReading:
        if comm.rank == first:
            for rank in [rank for rank in others for _ in range(_ROUNDS)]:
                comm.recv(None, rank, _TAG)
                comm.send(now_ns(), rank, _TAG)
        if comm.rank not in others:
            return {"reference": reference, "time_ns": now_ns(), "offset_ns": 0, "uncertainty_ns": 0}
        trips = []
        for _ in range(_ROUNDS):
            begin_ns = now_ns()
            answer_ns: int = comm.sendrecv(None, first, _TAG, None, first, _TAG)
            trips.append((now_ns() - begin_ns, begin_ns, answer_ns))
        trip_ns, begin_ns, answer_ns = min(trips)
        # The first rank read its clock at some time within the round trip.
        time_ns, uncertainty_ns = begin_ns + trip_ns // 2, -(-trip_ns // 2)
        offset_ns = answer_ns - time_ns
        return {"reference": reference, "time_ns": time_ns, "offset_ns": offset_ns, "uncertainty_ns": uncertainty_ns}

    return group.allgather("clocks: times", compare)[group.rank] if others else compare()


_MAX_NAMED = 8  # ranks in the label of a communicator
_recorders: dict[environment.Recording, Recorder] = {}
_opened: Counter[int] = Counter()


class Tracer:
    """Records the calls of one communicator on this rank. ``label`` names it in traces, the same on all its ranks.

    ``reads_clocks`` is for a communicator that is made of no other communicator: its ranks compare their clocks.
    """

    def __init__(self, recorder: Recorder, label: str, *, reads_clocks: bool = False) -> None:
        self.label = label
        self.recorder = recorder
        self.counts = Counts()
        self.ordinal = -1
        """The device of the communicator's streams; -1 while there is none."""
        self._reads_clocks = reads_clocks
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
        given = [each for each in wanted if each is not None]
        trace = next((each.trace for each in given if each.trace is not None), None)
        settings = environment.Recording(trace, any(each.stats for each in given))

        def start() -> tuple[int, int]:
            number = process_number()
            if settings not in _recorders:
                _recorders[settings] = Recorder(settings, number, reports=MPI.COMM_WORLD.rank == 0)
            _opened[number] += 1
            return number, _opened[number]

        first, number = group.allgather("Communicator: trace", start)[0]
        tracer = cls(_recorders[settings], f"{first}.{number}", reads_clocks=True)
        tracer._read_clocks(group, comm)
        return tracer

    def child(self, ranks: Sequence[int]) -> Tracer:
        """Return the tracer of a communicator made of ``ranks`` of this communicator. Local.

        All its ranks find the same label, because they have made the same communicators of these ranks before.
        """
        self._children[tuple(ranks)] += 1
        names = ",".join(map(str, ranks))
        if len(ranks) > _MAX_NAMED:
            names = f"{len(ranks)} ranks {zlib.crc32(names.encode()):08x}"
        return Tracer(self.recorder, f"{self.label}/{names}#{self._children[tuple(ranks)]}")

    @contextlib.contextmanager
    def record(self, operation: str, category: Category, *, numbered: bool = False, **facts: Any) -> Iterator[Record]:
        """Record the block as a call of this thread; ``facts`` are fields of `Record`.

        ``numbered`` is for calls that all ranks make in one order.
        """
        records = open_calls.records
        record = Record(self, operation, category, nested=bool(records), **facts)
        if numbered and not records:
            self._calls += 1
            record.number = str(self._calls)
        records.append(record)
        size = "" if record.nbytes is None else f" {record.nbytes} B {record.dtype}".rstrip()
        self.recorder.open_range(record, f"{operation}{size}")
        record.start_ns = now_ns()
        try:
            yield record
        except BaseException as error:
            record.error = type(error).__name__
            raise
        finally:
            record.stop_ns = now_ns()
            del records[records.index(record) :]
            if not (record.algorithm or record.error) and category in ("collective", "message"):
                record.algorithm = "mpi"  # all other calls name their algorithm
                if record.nbytes is not None and not record.slow_ways:
                    record.why = "MPI takes host arrays of this size and type"
            self.recorder.close_ranges(record)
            self.recorder.add(record)

    def set_algorithm(self, algorithm: str, why: str) -> None:
        """Record the algorithm of this thread's call, and the reason for it."""
        record = current()
        if record is None or record.algorithm:
            return
        record.algorithm, record.why = algorithm, why
        self.recorder.open_range(record, f"{record.operation} by {algorithm}")

    def read_clocks_again(self, group: Group, comm: MPI.Intracomm) -> None:
        """Compare the clocks once more at the end, because clocks drift. Collective; raises nothing."""
        with contextlib.suppress(MpicommError):  # if a rank is missing, the rest of the teardown reports it
            self._read_clocks(group, comm)

    def _read_clocks(self, group: Group, comm: MPI.Intracomm) -> None:
        if self._reads_clocks and self.recorder.file is not None:
            self.recorder.file.add_clock(read_clocks(group, comm))


class DeviceTracer:
    """Measures the work that calls enqueue on the device ``backend``, and records the algorithms of engines."""

    def __init__(self, tracer: Tracer, backend: GpuBackend) -> None:
        self._tracer = tracer
        self._backend = backend
        self._timeline = timeline_of(backend)
        tracer.ordinal = int(backend.device)
        for name in ("signal", "wait_signal", "pack", "launch"):
            _replace(backend, name, functools.partial(self._traced, stream_at=-1))
        _replace(backend, "copy", functools.partial(self._traced, stream_at=-1, algorithm_on_memory="copy_engine"))
        _replace(backend, "launcher", self._traced_result)
        _replace(backend, "graph_of", lambda make: lambda enqueue: enqueue)  # its launches are measured one by one
        _replace(backend, "message_steps", lambda steps: lambda: _TracedSteps(steps(), self._traced))

    @contextlib.contextmanager
    def enqueued(self, stream: int, algorithm: str = "", why: str = "") -> Iterator[None]:
        """Measure the work that the block enqueues on ``stream`` as work of the current call, with this algorithm.

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
        """Measure the plans that an engine enqueues, and record their algorithms. Local."""

        def hook(enqueue: Callable[..., bool]) -> Callable[..., bool]:
            def traced(plan: Any, stream: int, *arguments: Any, **keywords: Any) -> bool:
                algorithm, why, slow = plan.choice
                if slow:
                    add_slow_path(slow)
                with self.enqueued(stream, algorithm, why):
                    return enqueue(plan, stream, *arguments, **keywords)

            return traced

        _replace(engine, "enqueue", hook)

    def _traced(
        self,
        enqueue: Callable[..., None],
        *,
        stream_at: int = 0,
        algorithm: str = "",
        why: str = "",
        algorithm_on_memory: str = "",
    ) -> Callable[..., None]:
        """Return a function that measures the work of ``enqueue``, whose argument ``stream_at`` is a stream.

        ``algorithm_on_memory`` is the algorithm of calls on memory, such as `SymmetricArray.put`.
        """

        def traced(*arguments: Any, **keywords: Any) -> None:
            record = current()
            on_memory = record is not None and record.category == "memory"
            with self.enqueued(arguments[stream_at], algorithm_on_memory if on_memory else algorithm, why):
                enqueue(*arguments, **keywords)

        return traced

    def _traced_result(self, make: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
        return lambda *arguments, **keywords: self._traced(make(*arguments, **keywords))


class _TracedSteps:
    """The `MessageSteps` of a backend, as recorded work."""

    def __init__(self, steps: Any, traced: Callable[..., Callable[..., None]]) -> None:
        self._steps = steps
        self._traced = functools.partial(traced, algorithm="rendezvous", why="the receiver's GPU copies it")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        step = getattr(self._steps, name)
        if name in ("copy_in", "copy_out"):  # they make a step
            return lambda *arguments, **keywords: self._traced(step(*arguments, **keywords))
        return self._traced(step)


def timeline_of(backend: GpuBackend) -> Timeline | None:
    """Return a timeline of a GPU; None, with a warning, if its work cannot be measured. Local."""
    from mpicomm.devices.cuda.timeline import Timeline

    try:
        return Timeline(backend, now_ns)
    except HandleError as error:  # the other ranks go on to make the communicator, so this rank must not raise
        logger.warning("records have no times of GPU %s: %s", backend.device, error)
        return None


def _replace(target: object, name: str, hook: Callable[[Any], Any]) -> None:
    if hasattr(target, name):
        setattr(target, name, hook(getattr(target, name)))
