"""Descriptor: the number of an open file, which is closed with the last reference to it if nobody has done so before.

Whoever owns a file descriptor holds one of these; a plain ``int`` is only lent.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable


class Descriptor(int):
    """A file descriptor that whoever holds it owns, and closes as soon as it has done its work. Local; do not copy it.

    That it closes itself with its last reference is for what comes in between, a Ctrl-C above all. An error does not
    replace `close`: it has the frames it came through, and they hold their references for as long as somebody keeps it.

    Python notices a Ctrl-C between any two steps of its own. What must not fall apart here is one step each: a call of
    a function in C that makes the others. Hence there is no constructor in Python either.
    """

    # On the class, which is there for as long as there are instances: `os` may be gone when the interpreter ends.
    _close = staticmethod(os.close)

    @classmethod
    def of(cls, make: Callable[..., int], *arguments: object) -> Descriptor:
        """Call ``make``, a function in C such as ``os.open``, and return the descriptor it makes."""
        return next(map(cls, itertools.starmap(make, [arguments])))

    def close(self) -> None:
        """Close the file. A second call does nothing, whoever has the number by then."""
        # The first caller takes the number and closes it. The number is not this object, which would keep itself alive.
        left = vars(self).setdefault("_left", iter([int(self)]))
        any(map(self._close, left))

    def __del__(self) -> None:
        self.close()
