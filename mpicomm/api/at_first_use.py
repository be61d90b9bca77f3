"""Parts of a communicator that are made at its first use, because many communicators of a program carry no call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Part = TypeVar("Part")
_lock = threading.RLock()


class AtFirstUse(Generic[Part]):
    """An attribute that ``make`` makes for each object. After that the object has it like any other attribute."""

    def __init__(self, make: Callable[[Any], Part]) -> None:
        self._make = make
        self._name = make.__name__

    @overload
    def __get__(self, owner: None, cls: type) -> AtFirstUse[Part]: ...

    @overload
    def __get__(self, owner: object, cls: type) -> Part: ...

    def __get__(self, owner: object | None, cls: type) -> AtFirstUse[Part] | Part:
        """Return the part of ``owner``. Python asks here only until the object has the attribute."""
        if owner is None:
            return self
        with _lock:  # all threads get the same part, even if their first calls come at once
            parts = vars(owner)
            if self._name not in parts:
                parts[self._name] = self._make(owner)
            made: Part = parts[self._name]
            return made
