"""A rank whose death its launcher does not see, so that the launcher does not end the ranks that survive it."""

from __future__ import annotations

import os
import time
from pathlib import Path

KILLED = "killed"


def begin_in_child(results: Path) -> None:
    """Return in a child, before MPI starts; the parent, which the launcher watches, lives until all ranks are done.

    The ranks are done when ``results`` has the file `done`. The parent leaves the file `KILLED` there when a signal has
    killed the child, and the kernel has closed its connections.
    """
    child = os.fork()
    if child == 0:
        return
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        (results / KILLED).touch()
    elif os.WEXITSTATUS(status) != 0:
        os._exit(1)  # this ends the job
    while not (results / "done").exists():
        time.sleep(0.02)
    os._exit(0)
