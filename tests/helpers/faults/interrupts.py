"""A Ctrl-C before every line of a module."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType

from tests.helpers.faults.trap import Trap


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
    functions = set()
    with interrupts_raise(KeyboardInterrupt) as interrupt:
        for at in itertools.count(1):
            trap = Trap(files.__contains__, at, interrupt, repeats=sys.maxsize)
            try:
                with trap:
                    kept = act()
            except KeyboardInterrupt:
                functions.add(trap.function)
            else:
                del kept  # not before: an interrupt in a destructor is lost
                break
    return functions
