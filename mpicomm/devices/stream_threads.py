"""Which threads of the program use a stream, so that no thread comes between a message and its copy.

MPI lets several threads call at once. On GPUs two of them may share a stream, which carries out their work in the order
in which it was enqueued. F(m) is the copy of message m into the sender's outbox, R(m) the receiver's step, which waits
for F(m), and C a collective's kernel, which waits for the kernels of all ranks. Four orders end in a circle:

1. Thread A tells MPI of m, thread B enqueues R(n) or C, and A enqueues F(m) behind it. The peer has enqueued R(m), and
   F(n) or its C behind that. So nothing of another thread may come between: A *owes* F(m) to the stream when it tells
   MPI, and the first other thread that comes to the stream enqueues F(m) before its own work. If several threads have
   come already, A enqueues F(m) before it tells MPI.
2. Rank 0 enqueues C, then F(m). On rank 1 a listener's R(m) is enqueued ahead of the main thread's C.
3. Rank 0 waits for an answer before its C. On rank 1 the main thread's C is enqueued ahead of the listener's answer.

Against 2 and 3, blocking calls that wait for peers wait beside a stream that several threads use, and the thread waits
with them, as it does in MPI: see wait_beside.py. Then the stream itself holds no wait, and only the waits of threads
are left, which MPI's rules keep free of circles.

4. Each thread has another stream. On rank 0 thread A's C runs, and B loads a kernel, which waits for the whole device
   and holds the driver's lock. On rank 1 B's C runs, and A loads that kernel. Neither rank launches the C for which the
   other one waits.

Against 4, if several threads use the device, the thread of a blocking collective waits on the host until all ranks
launch it next. Then its kernel waits for no peer whose thread loads a kernel first. Another thread of a peer may still
load one between this meeting and the launch, a few microseconds later. Nonblocking collectives do not meet, because
they must not wait. A message is enqueued before MPI is told of it.

A thread that has a stream to itself keeps all of its work there. Its calls follow each other in the stream as they do
in the program. Only a wait that was enqueued before the first call of a second thread stays in the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident

_NOBODY, _SEVERAL = 0, -1  # no identifiers of threads


class StreamThreads:
    """The threads that use one stream, or several streams which wait for each other's work. For any thread."""

    __slots__ = ("_device", "_lock", "_owed", "user")

    def __init__(self, device: ThreadsOfStreams | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._owed: tuple[Callable[..., object], tuple[object, ...]] | None = None
        self.user = _NOBODY
        """The identifier of the only thread; `_SEVERAL` from the first call of a second one on."""

    @property
    def are_several(self) -> bool:
        """Whether several threads use the stream. A thread that has ended does not count."""
        return self.user == _SEVERAL

    def owe(self, enqueue: Callable[..., object], *arguments: object) -> None:
        """Let a call of ``enqueue`` come before the work of other threads. The caller calls `settle` later.

        Where several threads use the stream or the device, this calls it.
        """
        if self.user == _SEVERAL or (self._device is not None and self._device.are_several):
            enqueue(*arguments)
            return
        self._owed = enqueue, arguments
        # This look comes after the line above. `join` sets the user, then looks for what is owed. In whichever order
        # these four steps come, one thread sees the other, and enqueues it before it goes on.
        if self.user == _SEVERAL:
            self.settle()

    def settle(self) -> None:
        """Enqueue what is owed, unless another thread has done so. It is enqueued when this returns."""
        with self._lock:  # so that neither thread goes on while the other one enqueues
            if self._owed is not None:
                enqueue, arguments = self._owed
                enqueue(*arguments)
                self._owed = None  # after the call: where that has raised, the thread that owes it raises, too

    def forgive(self) -> bool:
        """Leave out what is owed. Return whether that was possible: else it is enqueued."""
        with self._lock:
            owed, self._owed = self._owed, None
            return owed is not None

    def join(self) -> None:
        """Count the calling thread among the users of the stream, before it enqueues anything there."""
        # Python knows a thread that it has not started from here on, so that `_has_ended` does.
        me = threading.current_thread().ident
        assert me is not None
        with self._lock:
            if self.user in (_NOBODY, me) or (self.user != _SEVERAL and _has_ended(self.user)):
                self.user = me
            else:
                self.user = _SEVERAL
        self.settle()


class ThreadsOfStreams:
    """The threads of each stream of one device, for all communicators of the process.

    ``waits_for_null`` says whether a stream and the null stream wait for each other's work. All such streams count as
    one, because work of one of them holds up the others. It returns None for a stream that captures a graph: nothing
    waits there, and CUDA refuses to say more.
    """

    def __init__(self, waits_for_null: Callable[[int], bool | None]) -> None:
        self._waits_for_null = waits_for_null
        self._of_null = StreamThreads(self)
        self._lock = threading.Lock()  # so that no thread drops the user whom another one adds
        self._users: set[int] = set()
        # By address. CUDA gives the address of a destroyed stream to another one, so there are few.
        self._known: dict[int, StreamThreads] = {0: self._of_null}

    @property
    def have_been_several(self) -> bool:
        """Whether several threads have used streams of the device; some of them may have ended."""
        return len(self._users) > 1

    @property
    def are_several(self) -> bool:
        """Whether several threads use streams of the device. A thread that has ended does not count."""
        if len(self._users) < 2:
            return False
        with self._lock:
            self._users.intersection_update([thread.ident for thread in threading.enumerate()])
            return len(self._users) > 1

    def of(self, stream: int) -> StreamThreads:
        """Return the threads of a stream, after `note`; of a stream that captures, threads that nobody else knows."""
        return self._known.get(stream) or StreamThreads()

    def note(self, stream: int) -> None:
        """Count the calling thread among the users of a stream, before it enqueues anything there."""
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
        if threads.user != _SEVERAL:
            threads.join()
        if me not in self._users:
            threading.current_thread()  # makes a thread known that Python has not started
            with self._lock:
                self._users.add(me)


def _has_ended(ident: int) -> bool:
    return all(thread.ident != ident for thread in threading.enumerate())
