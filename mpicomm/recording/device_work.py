"""The work that recorded calls enqueue on one device.

Hooks replace methods of the objects that enqueue work, but only of a communicator that records. All other communicators
run the same code as if there were no records.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import HandleError
from mpicomm.log import logger
from mpicomm.recording.channel import Channel
from mpicomm.recording.record import current, note_slow_way, now_ns

if TYPE_CHECKING:
    from mpicomm.devices.cuda.timeline import Timeline


class DeviceWork:
    """Measures the work that calls enqueue on the device ``backend``, and notes the algorithms that engines choose."""

    def __init__(self, channel: Channel, backend: GpuBackend) -> None:
        self._channel = channel
        self._backend = backend
        self._timeline = timeline_of(backend)
        channel.ordinal = int(backend.device)
        for name in ("signal", "wait_signal", "pack", "launch"):
            _replace(backend, name, self._on_stream)
        for name in ("launcher", "fixed_launch"):
            _replace(backend, name, self._maker)
        _replace(backend, "copy", self._copy)
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
            self._channel.choose(algorithm, why)
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

    def watch(self, engine: object) -> None:
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

    def _on_stream(self, method: Callable[..., None]) -> Callable[..., None]:
        def recorded(*arguments: Any, **keywords: Any) -> None:
            with self.enqueued(arguments[-1]):
                method(*arguments, **keywords)

        return recorded

    def _maker(self, method: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
        return lambda *arguments, **numbers: self.step(method(*arguments, **numbers))

    def _copy(self, method: Callable[..., None]) -> Callable[..., None]:
        def recorded(target: int, source: int, nbytes: int, stream: int) -> None:
            record = current()
            algorithm = "copy_engine" if record is not None and record.category == "memory" else ""
            with self.enqueued(stream, algorithm):
                method(target, source, nbytes, stream)

        return recorded


class _RecordedSteps:
    """The `MessageSteps` of a backend, as recorded work."""

    def __init__(self, steps: Any, work: DeviceWork) -> None:
        self._steps = steps
        self._recorded = functools.partial(work.step, algorithm="rendezvous", why="the receiver's GPU copies it")

    def copy_in(self, place: int, **words: int) -> Callable[..., None]:
        return self._recorded(self._steps.copy_in(place, **words))

    def copy_out(self, place: int, **words: int) -> Callable[..., None]:
        return self._recorded(self._steps.copy_out(place, **words))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._recorded(getattr(self._steps, name))


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
