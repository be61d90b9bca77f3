"""MessageDevice: what messages need of a device. `CudaBackend` has it all, as have the doubles of the tests."""

from __future__ import annotations

from typing import Any, Protocol

from mpicomm.devices.base import Backend


class SideStreams(Protocol):
    """Streams beside the user's; see ``backend.cuda_side_streams``."""

    def mark(self, stream: int) -> Any:
        """Return the point in ``stream`` that its work so far has come to."""

    def passed(self, mark: Any) -> bool:
        """Return whether the work up to a mark is done."""

    def follow(self, stream: int, mark: Any) -> None:
        """Let later work on ``stream`` wait for a mark."""

    def take(self, after: Any = None) -> int:
        """Return a stream that nobody else uses until `give_back`, and on which work follows the mark ``after``."""

    def give_back(self, stream: int) -> None:
        """Let the stream be taken again."""


class MessageDevice(Backend, Protocol):
    """A device whose streams can wait for counts in memory that other processes write. All methods are local."""

    side_streams: SideStreams

    @property
    def total_nbytes(self) -> int:
        """How much memory the device has."""

    def publish(self, word: int, count: int, stream: int) -> None:
        """Store ``count`` at ``word``, visible to all, after all earlier work of the stream."""

    def await_count(self, word: int, target: int, number: int, peer: int, stream: int) -> None:
        """Hold the stream until ``word`` has come to ``target``; after the time-out `check` names message and peer."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether what is enqueued on ``stream`` becomes part of a graph."""
