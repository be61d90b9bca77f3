"""A Ctrl-C before every line of a module."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


@contextlib.contextmanager
def interrupts_raise(error: type[BaseException]) -> Iterator[Callable[[], None]]:
    """Give a function that sends this process the signal of a Ctrl-C, whose handler raises ``error``."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_everywhere(act: Callable[[], object], *modules: ModuleType) -> set[str]:
    """Call ``act`` with a Ctrl-C before its first line in ``modules``, then before its second, and so on to the last.

    Return the names of the functions that have these lines; the number of lines depends on the version of Python. If no
    line is left for a Ctrl-C, the result of ``act`` is dropped.
    """
    files = {module.__file__ for module in modules}
    left = count = 0
    functions = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            if left == 0:
                sys.settrace(None)
                functions.add(frame.f_code.co_name)
                interrupt()
            left -= 1
        return trace

    with interrupts_raise(KeyboardInterrupt) as interrupt:
        while True:
            left = count
            sys.settrace(trace)
            try:
                kept = act()
            except KeyboardInterrupt:
                count += 1
            else:
                sys.settrace(None)
                del kept
                return functions
