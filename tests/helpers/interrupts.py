"""A Ctrl-C before every single step of a module, which is where Python lets it come in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Literal


def interrupt_everywhere(act: Callable[[], object], module: ModuleType, step: Literal["line", "opcode"]) -> int:
    """Call ``act`` with a Ctrl-C before its first step in ``module``, then before its second, and so on to the last.

    Return how many that were. What ``act`` returns is dropped where none comes in any more.
    """
    left = count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = step == "opcode"
        if event == step:
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            left -= 1
        return trace

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
            return count
