"""Descriptor: the number of an open file. The owner of the file holds it and closes it.

A plain ``int`` is a borrowed descriptor. `way_out` names the limits on descriptors in errors.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable

from mpicomm.interrupts import uninterrupted


class Descriptor(int):
    """A file descriptor that its holder owns, and closes as soon as the work with it is done. Local; do not copy it.

    If an error or a Ctrl-C comes between two steps, the last reference closes it. This does not replace `close`: an
    error keeps its frames, and so their references, as long as a caller keeps the error.
    """

    _closed = False

    @classmethod
    def of(cls, make: Callable[..., int], *arguments: object) -> Descriptor:
        """Call ``make``, such as ``os.open``, and return the descriptor that it makes."""
        with uninterrupted():
            return cls(make(*arguments))

    def close(self) -> None:
        """Close the file. A second call does nothing, because another file may have the number then."""
        with uninterrupted():
            if not self._closed:
                self._closed = True
                os.close(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else modules may be gone, and the process is about to close its files
            self.close()


def way_out(code: int | None) -> str:
    """Return the limit on descriptors that an error with this errno has hit, and how to raise the limit.

    Return "" for any other error. Root may have any number of descriptors in flight between processes. Another user may
    have as many as a process may open.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if code == errno.EMFILE:
        return f"; this process may have {limit} files open: raise the limit (ulimit -n)"
    if code == errno.ETOOMANYREFS:
        return f"; this user may have {limit} descriptors in flight between processes: raise the limit (ulimit -n)"
    return ""
