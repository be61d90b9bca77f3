"""Hold a Ctrl-C back while memory or a file comes into the hands of the object that gives it back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the end of a ``with`` block, which then raises it.

    Use it for a few local steps, such as a system call and the object that owns its result: a Ctrl-C between the two
    would leak a file or memory. Never wait for a peer inside, because a Ctrl-C must end such a wait at once.
    """
    # Python runs signal handlers in the main thread alone. A handler that is no Python function raises nothing.
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
            # A call, not a second signal, because an event loop may have noticed the first one by its wake-up file.
            before(*held[0])
