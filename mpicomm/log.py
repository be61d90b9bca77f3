"""Logging: the standard logger "mpicomm", with lines that begin host:pid:rank.

MPICOMM_DEBUG chooses the level (WARN, INFO, TRACE), and MPICOMM_DEBUG_FILE a file instead of stderr. If a program has
a handler on the logger "mpicomm", this handler gets the records. mpicomm then adds none, so no record appears twice.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

from mpicomm import environment
from mpicomm.errors import InvalidUsageError

TRACE = logging.DEBUG - 5
logging.addLevelName(TRACE, "TRACE")

logger = logging.getLogger("mpicomm")

slow_path_listeners: list[Callable[[str], None]] = []
"""Called with the reason for every call that takes a slow path, also if the log has named the reason before."""


def report_slow_path(reason: str) -> None:
    """Tell the listeners why the call of this thread takes a slow path. Local."""
    for listener in slow_path_listeners:
        listener(reason)


@cache
def log_once(log: Callable[..., None], text: str) -> None:
    """Log a text by a method of the logger, once in this process. Local."""
    log("%s", text)


def file_name(pattern: str, rank: int) -> str:
    """Return ``pattern`` with host, pid and ``rank`` in place of %h, %p and %r."""
    for code, text in (("%h", socket.gethostname()), ("%p", str(os.getpid())), ("%r", str(rank))):
        pattern = pattern.replace(code, text)
    return pattern


def open_file(variable: str, path: str, mode: Literal["w", "a"]) -> TextIOWrapper:
    """Open the text file that a variable names. Raises `InvalidUsageError` if it cannot be opened.

    It follows no symbolic link of another user, who may have put it into a folder such as /tmp.
    """

    def opener(name: str, flags: int) -> int:
        link = Path(name)
        follows = link.is_symlink() and link.lstat().st_uid in (0, os.geteuid())  # such as /dev/stderr
        return os.open(name, flags if follows else flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, encoding="utf-8", opener=opener)  # Path.open takes no opener
    except OSError as error:
        reason = f"{path} is a symbolic link of another user" if Path(path).is_symlink() else error.strerror
        raise InvalidUsageError(
            f"{variable}={path!r} cannot be opened: {reason}: name a file that this user can write"
        ) from error


class _DebugFile(logging.FileHandler):
    """Writes to the file of MPICOMM_DEBUG_FILE. When that fails, as on a full disk, warnings go to stderr instead."""

    def _open(self) -> TextIOWrapper:
        return open_file("MPICOMM_DEBUG_FILE", self.baseFilename, "a")

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logger.removeHandler(self)
        with suppress(OSError):  # it tries to write the record again, and closes the file in any case
            self.close()
        handler = logging.StreamHandler()
        handler.setFormatter(self.formatter)
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        logger.warning("MPICOMM_DEBUG_FILE cannot be written: %s: warnings go to stderr", error.strerror)
        if record.levelno >= logging.WARNING:
            handler.handle(record)


def configure(rank: int) -> None:
    """Set up the logger from the environment, once per process; ``rank`` is the rank in MPI.COMM_WORLD.

    Rank 0 warns of variables that mpicomm does not read.
    """
    if not logger.handlers:
        level, path = environment.debug(), environment.debug_file()
        handler: logging.Handler
        handler = logging.StreamHandler() if path is None else _DebugFile(file_name(path, rank))
        prefix = f"{socket.gethostname()}:{os.getpid()}:{rank}"
        handler.setFormatter(logging.Formatter(f"{prefix} mpicomm %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel({"WARN": logging.WARNING, "INFO": logging.INFO, "TRACE": TRACE}[level])
        logger.propagate = False
    if rank == 0:
        _warn_of_unknown_variables()


@cache  # once per process, because each Communicator calls it
def _warn_of_unknown_variables() -> None:
    if unknown := environment.unknown():
        named = ", ".join(f"{name} (the nearest name that it reads is {nearest})" for name, nearest in unknown.items())
        logger.warning("mpicomm does not read %s: correct the name, or unset it", named)
