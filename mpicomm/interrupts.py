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

    For a few local steps, such as a system call and the object that owns its result: a Ctrl-C between the two would
    leave a file or memory to nobody. Never for a wait for a peer, which a Ctrl-C must end at once.
    """
    # Python runs signal handlers in the main thread alone. What is no Python handler raises nothing, and stays.
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
            # Called, not sent to this process again: whoever listens for the signal itself has heard it already.
            before(*held[0])
