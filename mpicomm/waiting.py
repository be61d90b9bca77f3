"""Waits for other processes, with low latency at first, and later without keeping a core busy; threads that wait.

Also the delay of a Ctrl-C while an object takes over the memory or the file that it will release.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SPINS = 64  # polls before the first yield: many answers come within microseconds
_YIELD_S = 1e-3
_LONGEST_PAUSE_S = 1e-3


def spin(ready: Callable[[], bool]) -> bool:
    """Poll ``ready`` until it returns true, for some microseconds; return whether it did."""
    return any(ready() for _ in range(_SPINS))


def spin_and_yield(ready: Callable[[], bool], meanwhile: Callable[[], object] | None = None) -> bool:
    """Poll ``ready`` until it returns true, for about a millisecond; return whether it did.

    After some microseconds it yields the core between polls, because ranks may outnumber cores and the peer needs a
    core. From then on it calls ``meanwhile`` between polls.
    """
    if ready() or spin(ready):  # the first poll spares the generator
        return True
    end = time.monotonic() + _YIELD_S
    while time.monotonic() < end:
        os.sched_yield()
        if meanwhile is not None:
            meanwhile()
        if ready():
            return True
    return False


def wait_until(ready: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], object] | None = None) -> bool:
    """Poll ``ready`` until it returns true, and return True; return False after ``timeout_s`` seconds.

    It begins as `spin_and_yield`. Then it sleeps between polls, longer and longer.
    """
    start = time.monotonic()
    if spin_and_yield(ready, meanwhile):
        return True
    pause_s = 1e-5
    while not ready():
        if time.monotonic() > start + timeout_s:
            return False
        if meanwhile is not None:
            meanwhile()
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
    return True


ENDING = threading.Event()
"""Set when the program ends. The threads of `start_thread` that poll look at it."""
_ends: dict[threading.Thread, Callable[[], object]] = {}
_END_S = 1.0


def start_thread(run: Callable[[], object], name: str, end: Callable[[], object] = lambda: None) -> threading.Thread:
    """Start a thread that may wait for other ranks, and end it before Python finalizes. Local.

    The thread is a daemon, because a rank that never comes would keep the interpreter from its end. But Python ends a
    daemon thread that takes the GIL again after the beginning of finalization, by unwinding its stack. If that is the
    stack of a destructor in C++ that has released the GIL, as the destructors of PyTorch's works do, the unwinding
    aborts the process. So the end of the program sets `ENDING`, calls ``end``, and waits up to a second for the thread.
    A thread that still waits for a rank then is in a frame of Python, which can be unwound.
    """

    def run_registered() -> None:
        try:
            run()
        finally:
            del _ends[thread]

    thread = threading.Thread(target=run_registered, name=name, daemon=True)
    _ends[thread] = end
    thread.start()
    return thread


# Registered here, so that it comes after the functions of the program and of other modules, which may need the threads.
@atexit.register
def _end_threads() -> None:
    ENDING.set()
    threads = list(_ends.items())
    for _, end in threads:
        end()
    until_s = time.monotonic() + _END_S
    for thread, _ in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a Ctrl-C until the end of a ``with`` block, which then raises it.

    Use it for a few local steps, such as a system call and the object that owns its result: a Ctrl-C between the two
    would leak a file or memory. Never wait for a peer inside, because a Ctrl-C must end such a wait at once.
    """
    # Python runs signal handlers only in the main thread. A handler that is no Python function raises nothing.
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            # A call, not a second signal, because the first signal may have woken an event loop by its wake-up file.
            before(*held[0])
