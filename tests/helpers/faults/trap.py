"""A trap at one of the lines that a program runs in some files."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

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
