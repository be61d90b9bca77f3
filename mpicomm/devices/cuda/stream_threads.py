"""The threads of the program that use a stream, so that no thread comes between a message and its copy.

MPI lets several threads call at once. On GPUs two of them may share a stream, which carries out their work in the order
in which they enqueue it. F(m) is the copy of message m into the sender's outbox. R(m) is the step of the receiver,
which waits for F(m). C is the kernel of a collective, which waits for the kernels of all ranks. Four orders deadlock:

1. Thread A tells MPI of m, thread B enqueues R(n) or C, and A enqueues F(m) after that. The peer has enqueued R(m), and
   F(n) or its C after that. So no work of another thread may come between. A *defers* F(m) when A tells MPI. The first
   other thread that comes to the stream enqueues F(m) before its work. If several threads have already come, A enqueues
   F(m) before it tells MPI.
2. Rank 0 enqueues C, then F(m). On rank 1 a listener enqueues R(m) before the main thread enqueues C.
3. Rank 0 waits for an answer before its C. On rank 1 the main thread enqueues C before the listener enqueues the
   answer.

Against 2 and 3, if several threads use a stream, blocking calls that wait for peers run on a side stream. The calling
thread waits for it, as it does in MPI: see `synchronized_side_stream`. Then the stream itself holds no wait. Only the
waits of threads are left, and MPI's rules keep these free of deadlocks.

4. Each thread has another stream. On rank 0 the C of thread A runs, and B loads a kernel, which waits for the whole
   device and holds the driver's lock. On rank 1 the C of thread B runs, and A loads that kernel. No rank launches the C
   for which the other rank waits.

Against 4, if several threads use the device, a blocking collective begins with a barrier on the host, after which all
ranks only launch it. Then its kernel waits for no peer whose thread loads a kernel first. Another thread of a peer may
still load a kernel between the barrier and the launch, a few microseconds later. Nonblocking collectives have no
barrier, because they must not wait. A thread enqueues a message before it tells MPI of it.

A thread that is the only user of a stream keeps all its work there. Its calls follow each other in the stream as in the
program. Only a wait that it enqueued before the first call of a second thread stays in the stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

_UNUSED, _SHARED = 0, -1  # these are not identifiers of threads


class StreamThreads:
    """The threads that use one stream, or several streams that wait for each other's work. For any thread."""

    __slots__ = ("_deferred", "_device", "_lock", "user")

    def __init__(self, device: ThreadsOfStreams | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._deferred: tuple[Callable[..., object], tuple[object, ...]] | None = None
        self.user = _UNUSED
        """The identifier of the only thread; `_SHARED` from the first call of a second thread on."""

    @property
    def is_shared(self) -> bool:
        """Whether several threads use the stream. A thread that has ended does not count."""
        return self.user == _SHARED

    def defer(self, enqueue: Callable[..., object], *arguments: object) -> None:
        """Let a call of ``enqueue`` come before the work of other threads. The caller calls `flush` later.

        If several threads use the stream or the device, this calls ``enqueue`` at once.
        """
        if self.user == _SHARED or (self._device is not None and self._device.is_shared):
            enqueue(*arguments)
            return
        self._deferred = enqueue, arguments
        # This look comes after the line above. `join` sets the user, then looks for the deferred call. In whichever
        # order these four steps come, one thread sees the other, and makes the deferred call before it goes on.
        if self.user == _SHARED:
            self.flush()

    def flush(self) -> None:
        """Make the deferred call, unless another thread has made it. The work is enqueued when this returns."""
        with self._lock:  # so that neither thread goes on while the other thread enqueues
            if self._deferred is not None:
                enqueue, arguments = self._deferred
                enqueue(*arguments)
                self._deferred = None  # after the call: if the call raises, the thread that has deferred it raises, too

    def join(self) -> None:
        """Register the calling thread as a user of the stream, before it enqueues anything there."""
        # From here on Python also knows a thread that it has not started, and `_has_ended` finds the thread.
        me = threading.current_thread().ident
        assert me is not None
        with self._lock:
            if self.user in (_UNUSED, me) or (self.user != _SHARED and _has_ended(self.user)):
                self.user = me
            else:
                self.user = _SHARED
        self.flush()


class ThreadsOfStreams:
    """The threads of each stream of one device, for all communicators of the process.

    ``waits_for_null`` says whether a stream and the null stream wait for each other's work. All such streams count as
    one, because work of one of them delays the others. The function returns None for a stream that captures a graph:
    no work waits there, and CUDA refuses to say more.
    """

    def __init__(self, waits_for_null: Callable[[int], bool | None]) -> None:
        self._waits_for_null = waits_for_null
        self._of_null = StreamThreads(self)
        self._lock = threading.Lock()  # so that no thread drops a user that another thread adds
        self._users: set[int] = set()
        self.was_shared = False
        """Whether several threads have used streams of the device; some of them may have ended."""
        # By address. CUDA gives the address of a destroyed stream to another stream, so there are few.
        self._known: dict[int, StreamThreads] = {0: self._of_null}

    @property
    def is_shared(self) -> bool:
        """Whether several threads use streams of the device. A thread that has ended does not count."""
        if len(self._users) < 2:
            return False
        with self._lock:
            self._users.intersection_update([thread.ident for thread in threading.enumerate()])
            self.was_shared = len(self._users) > 1
            return self.was_shared

    def of(self, stream: int) -> StreamThreads:
        """Return the threads of a stream, after `add_user`. A stream that captures gets a new object each time."""
        return self._known.get(stream) or StreamThreads()

    def add_user(self, stream: int) -> None:
        """Register the calling thread as a user of a stream, before it enqueues anything there."""
        threads = self._known.get(stream)
        if threads is None:
            waits = self._waits_for_null(stream)
            if waits is None:
                return
            found = self._of_null if waits else StreamThreads(self)
            threads = self._known.setdefault(stream, found)  # another thread may have been faster
        me = get_ident()
        if threads.user == me:
            return
        if threads.user != _SHARED:
            threads.join()
        if me not in self._users:
            threading.current_thread()  # lets Python know a thread that it has not started
            with self._lock:
                self._users.add(me)
                self.was_shared = len(self._users) > 1


def _has_ended(ident: int) -> bool:
    return all(thread.ident != ident for thread in threading.enumerate())


class SideStream:
    """A ``with`` block that has a side stream to itself. If ``after`` is given, the work follows that mark."""

    __slots__ = ("_after", "_stream", "_streams")

    def __init__(self, streams: Any, after: Any = None) -> None:
        self._streams = streams
        self._after = after

    def __enter__(self) -> int:
        stream: int = self._streams.acquire(self._after)
        self._stream = stream
        return stream

    def __exit__(self, *exception: object) -> None:
        self._streams.release(self._stream)


@contextlib.contextmanager
def synchronized_side_stream(backend: Any, stream: int, after: Any = None) -> Iterator[int]:
    """Provide a side stream for work that waits for peers; wait for this work at the end of the ``with`` block.

    The work follows the mark ``after``, or the work that ``stream`` has at this call. Raises as `check` does.
    """
    streams = backend.side_streams
    with SideStream(streams, streams.mark(stream) if after is None else after) as side:
        yield side
        backend.synchronize(side)
    backend.check()
