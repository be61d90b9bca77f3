"""Delay a Ctrl-C while an object takes over the memory or the file that it will release."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


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
