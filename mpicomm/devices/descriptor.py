"""Descriptor: the number of an open file, whose owner closes it; else the last reference to it does.

Whoever owns a file descriptor holds one of these; a plain ``int`` is only lent. Errors name the limits
on descriptors by `way_out`.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable

from mpicomm.interrupts import uninterrupted


class Descriptor(int):
    """A file descriptor that its holder owns, and closes as soon as it has done its work. Local; do not copy it.

    It closes itself with its last reference for the sake of errors and of a Ctrl-C between two steps. That does not
    replace `close`: an error holds the frames that it came through, and so their references, as long as it is kept.
    """

    _closed = False

    @classmethod
    def of(cls, make: Callable[..., int], *arguments: object) -> Descriptor:
        """Call ``make``, such as ``os.open``, and return the descriptor that it makes."""
        with uninterrupted():
            return cls(make(*arguments))

    def close(self) -> None:
        """Close the file. A second call does nothing: another file may have the number by then."""
        with uninterrupted():
            if not self._closed:
                self._closed = True
                os.close(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else modules may be gone, and the process is about to close its files
            self.close()


def way_out(code: int | None) -> str:
    """Return what to add to an error with this errno: the limit on descriptors that it is of, and how to raise it.

    Return "" for any other error. Root may have any number of descriptors in flight between processes, and another user
    as many as a process may open.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if code == errno.EMFILE:
        return f"; this process may have {limit} files open: raise the limit (ulimit -n)"
    if code == errno.ETOOMANYREFS:
        return f"; this user may have {limit} descriptors in flight between processes: raise the limit (ulimit -n)"
    return ""
