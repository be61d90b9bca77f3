"""The operations of a GPU that messages need. `CudaBackend` has them, and so have the doubles of the tests."""

from __future__ import annotations

from typing import Any, Protocol

from mpicomm.devices.base import Backend


class SideStreams(Protocol):
    """Streams beside the user's; see ``mpicomm.devices.cuda.side_streams``."""

    def mark(self, stream: int) -> Any:
        """Return a mark behind all work that is on ``stream`` so far."""

    def passed(self, mark: Any) -> bool:
        """Return whether the work before a mark is done."""

    def follow(self, stream: int, mark: Any) -> None:
        """Let later work on ``stream`` wait for a mark."""

    def take(self, after: Any = None) -> int:
        """Return a stream that is the caller's until `give_back`. Its work follows the mark ``after``, where given."""

    def give_back(self, stream: int) -> None:
        """Let the stream be taken again."""


class MessageDevice(Backend, Protocol):
    """A device whose streams can wait for counts in memory that other processes write. All methods are local."""

    side_streams: SideStreams

    @property
    def total_nbytes(self) -> int:
        """Bytes of memory of the device."""

    def publish(self, word: int, count: int, stream: int) -> None:
        """Store ``count`` at ``word`` after all earlier work of the stream, with release: the work is visible first."""

    def await_count(self, word: int, target: int, number: int, peer: int, stream: int) -> None:
        """Hold the stream until ``word`` has reached ``target``. After the time-out `check` names message and peer."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether the stream captures a CUDA graph."""


class SideStream:
    """A ``with`` block that has a side stream to itself. Its work follows the mark ``after``, where given."""

    __slots__ = ("_after", "_stream", "_streams")

    def __init__(self, streams: SideStreams, after: Any = None) -> None:
        self._streams = streams
        self._after = after

    def __enter__(self) -> int:
        self._stream = self._streams.take(self._after)
        return self._stream

    def __exit__(self, *exception: object) -> None:
        self._streams.give_back(self._stream)
