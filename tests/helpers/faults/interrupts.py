"""A trap at a line that a program runs, and a Ctrl-C before every line of a module."""

from __future__ import annotations

import collections
import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
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


REPEATS = 3  # a line counts this often: the lines of loops that wait would hide all others


class Trap:
    """Counts the lines that are run in files, and calls ``act`` at number ``at``; 0 only counts.

    ``is_watched`` says whether a file counts.
    """

    def __init__(
        self,
        is_watched: Callable[[str], bool],
        at: int = 0,
        act: Callable[[], None] | None = None,
        repeats: int = REPEATS,
    ) -> None:
        self._is_watched, self._at, self._act, self._repeats = is_watched, at, act, repeats
        self._seen: collections.Counter[tuple[CodeType, int]] = collections.Counter()
        self.lines = 0
        self.where = self.function = ""

    def __enter__(self) -> Trap:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._line if self._is_watched(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "line":
            place = (frame.f_code, frame.f_lineno)
            self._seen[place] += 1
            if self._seen[place] <= self._repeats:
                self.lines += 1
                if self.lines == self._at and self._act is not None:
                    sys.settrace(None)
                    self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                    self.function = frame.f_code.co_name
                    self._act()
        return self._line
