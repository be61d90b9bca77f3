"""Subclasses of the parts of a communicator that know the algorithm of a call and enqueue its work on a device.

They note the algorithm in the record of this thread's call, and measure the work on the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpicomm.collectives.call import Call
from mpicomm.collectives.host import selection
from mpicomm.devices.base import GpuBackend
from mpicomm.devices.host import HostBackend
from mpicomm.errors import HandleError
from mpicomm.log import logger
from mpicomm.recording.channel import Channel
from mpicomm.recording.clocks import now_ns
from mpicomm.recording.record import current, hear_of_slow_way
from mpicomm.session import Session
from mpicomm.ways.dispatch import Dispatcher
from mpicomm.ways.engines import Engines
from mpicomm.ways.on_host import InMappedMemory

if TYPE_CHECKING:
    from mpicomm.devices.cuda.timeline import Timeline


class DeviceWork:
    """Measures the work that calls enqueue on one device."""

    def __init__(self, channel: Channel, backend: GpuBackend) -> None:
        self._channel = channel
        self._backend = backend
        self._timeline = timeline_of(backend)
        channel.ordinal = int(backend.device)

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
            self._channel.choose(record, algorithm, why)
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


def timeline_of(backend: GpuBackend) -> Timeline | None:
    """Return a timeline of a GPU; None, with a warning, if its work cannot be measured. Local."""
    from mpicomm.devices.cuda.timeline import Timeline

    try:
        return Timeline(backend, now_ns)
    except HandleError as error:  # the other ranks go on to make the communicator, so this rank must not raise
        logger.warning("records have no times of GPU %s: %s", backend.device, error)
        return None


class RecordedSession(Session):
    """A `Session` whose device measures the work of calls."""

    _work: DeviceWork | None

    def _open_device(self) -> None:
        super()._open_device()
        self.measure()

    def measure(self) -> None:
        """Let the open device measure the work of calls. Local."""
        backend: Any = self.backend
        if self.channel is not None and not isinstance(backend, HostBackend):
            self._work = backend._work = DeviceWork(self.channel, backend)
            cls: Any = type(backend)
            backend.__class__ = _subclass(cls, _BACKEND_METHODS)


class RecordedEngines(Engines):
    """`Engines` that measure the work of collectives on device arrays."""

    def on_gpu(self, operation: str) -> Any:
        cache = super().on_gpu(operation)
        engine: Any = cache.engine
        if not hasattr(engine, "_work"):
            assert isinstance(self._session, RecordedSession)
            engine._work = self._session._work
            cls: Any = type(engine)
            engine.__class__ = _subclass(cls, _ENGINE_METHODS)
        return cache


class RecordedMapped(InMappedMemory):
    """`InMappedMemory` that notes the algorithm of calls."""

    def enqueue(self, call: Call, *, blocking: bool) -> None:
        record = current()
        session = self._engines._session
        if record is not None and session.channel is not None:
            name, why = call.algorithm, f'algorithm="{call.algorithm}"'
            if name == "auto":
                name, why = selection.best_mapped(call.operation, call.nbytes or 0), "by size, on mapped memory"
            one_node = len(session.placement.nodes) == 1
            session.channel.choose(record, name if one_node else "groups, mpi", why)
        super().enqueue(call, blocking=blocking)


def record_inside(collectives: Dispatcher, session: Session) -> None:
    """Let the parts of a communicator note algorithms and measure work from now on. Local."""
    parts: Any = (session, collectives._mapped, collectives.engines)
    for part, cls in zip(parts, (RecordedSession, RecordedMapped, RecordedEngines), strict=True):
        part.__class__ = cls
    assert isinstance(session, RecordedSession)
    session._work = None
    if session._has_device:
        session.measure()


def _enqueue(method: Callable[..., bool]) -> Callable[..., bool]:
    def enqueue(self: Any, plan: Any, stream: int, *arguments: Any, **keywords: Any) -> bool:
        algorithm, why, slow = plan.choice
        if slow:
            hear_of_slow_way(slow)
        with self._work.enqueued(stream, algorithm, why):
            return method(self, plan, stream, *arguments, **keywords)

    return enqueue


def _copy(method: Callable[..., None]) -> Callable[..., None]:
    def copy(self: Any, target: int, source: int, nbytes: int, stream: int) -> None:
        record = current()
        algorithm = "copy_engine" if record is not None and record.category == "memory" else ""
        with self._work.enqueued(stream, algorithm):
            method(self, target, source, nbytes, stream)

    return copy


def _on_stream(method: Callable[..., None]) -> Callable[..., None]:
    def enqueue(self: Any, *arguments: Any, **keywords: Any) -> None:
        stream = arguments[-1]  # in `signal`, `wait_signal`, `pack` and `launch`
        with self._work.enqueued(stream):
            method(self, *arguments, **keywords)

    return enqueue


def _recorded(step: Callable[..., None], work: DeviceWork, algorithm: str = "", why: str = "") -> Callable[..., None]:
    """Return ``step``, whose first argument is a stream, as recorded work."""

    def recorded(stream: int, *arguments: int, **words: int) -> None:
        with work.enqueued(stream, algorithm, why):
            step(stream, *arguments, **words)

    return recorded


def _made(method: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """Wrap a method that makes a function for launches."""

    def make(self: Any, *arguments: Any, **numbers: int) -> Callable[..., None]:
        return _recorded(method(self, *arguments, **numbers), self._work)

    return make


class _RecordedSteps:
    """The `MessageSteps` of a backend, as recorded work."""

    def __init__(self, steps: Any, work: DeviceWork) -> None:
        self._steps, self._work = steps, work

    def copy_in(self, place: int, **words: int) -> Callable[..., None]:
        return self._recorded(self._steps.copy_in(place, **words))

    def copy_out(self, place: int, **words: int) -> Callable[..., None]:
        return self._recorded(self._steps.copy_out(place, **words))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._recorded(getattr(self._steps, name))

    def _recorded(self, step: Callable[..., None]) -> Callable[..., None]:
        return _recorded(step, self._work, "rendezvous", "the receiver's GPU copies it")


def _message_steps(method: Callable[..., Any]) -> Callable[..., Any]:
    def message_steps(self: Any) -> Any:
        return _RecordedSteps(method(self), self._work)

    return message_steps


_Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_ENGINE_METHODS: tuple[tuple[str, _Wrapper], ...] = (("enqueue", _enqueue),)
_BACKEND_METHODS: tuple[tuple[str, _Wrapper], ...] = (
    ("copy", _copy),
    ("signal", _on_stream),
    ("wait_signal", _on_stream),
    ("pack", _on_stream),
    ("launch", _on_stream),
    ("launcher", _made),
    ("fixed_launch", _made),
    ("message_steps", _message_steps),
)


@functools.cache
def _subclass(cls: Any, wrappers: tuple[tuple[str, _Wrapper], ...]) -> Any:
    """Return a subclass with wrapped methods. It is made at run time, because an import of the class loads CUDA."""
    found = {name: (getattr(cls, name), wrap) for name, wrap in wrappers if hasattr(cls, name)}
    methods = {name: functools.wraps(method)(wrap(method)) for name, (method, wrap) in found.items()}
    return type(cls.__name__, (cls,), {**methods, "__doc__": cls.__doc__})
