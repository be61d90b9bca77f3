"""Exceptions that would make this rank wait for other ranks: what it prints, and how it ends the job."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from types import TracebackType

from mpi4py import MPI

from mpicomm.errors import MpicommError
from mpicomm.log import logger

_SILENT_S = 2.0  # ranks that fail alike leave a block at about the same time, and none of them waits
_FORWARD_S = 0.2  # an MPI launcher that has to abort drops output that it has not forwarded yet


@cache  # once per process
def end_job_if_uncaught() -> None:
    """Let an exception that this rank does not catch end the job, as ``python -m mpi4py`` does. Local.

    Otherwise this rank would wait in MPI_Finalize for ranks that wait for it, for ever.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        before(kind, error, place)
        is_alone = MPI.Is_finalized() or not MPI.Is_initialized() or MPI.COMM_WORLD.size == 1
        if not is_alone and not hasattr(sys, "ps1"):  # the interactive prompt goes on
            from mpi4py import run

            sys.stderr.flush()
            time.sleep(_FORWARD_S)
            run.set_abort_status(error)

    sys.excepthook = hook


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Call ``close``, which waits for other ranks, at the end of a ``with`` block that ``error`` has left, if any.

    The other ranks may never come. So the traceback is logged before a long wait, and ``error`` stays the error that
    the caller sees if ``close`` fails.
    """
    if not isinstance(error, Exception):
        close()
        return

    def say() -> None:
        text = "".join(traceback.format_exception(error))
        logger.error("this rank waits for the others at the end of a with block that an exception has left:\n%s", text)

    timer = threading.Timer(_SILENT_S, say)
    timer.daemon = True
    timer.start()
    try:
        close()
    except MpicommError as late:
        logger.warning("%s", late)
    finally:
        timer.cancel()
