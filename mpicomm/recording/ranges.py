"""NVTX ranges of calls, which Nsight Systems and other tools show beside the kernels."""

from __future__ import annotations

import importlib
from typing import Any

from mpicomm.errors import InvalidUsageError
from mpicomm.recording.record import Record

_DOMAIN = "mpicomm"


class Ranges:
    """Opens a range for each call, with operation, bytes and type, and an inner range with the algorithm."""

    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx

    @classmethod
    def find(cls, *, required: bool) -> Ranges | None:
        """Return ranges of the package nvtx, or None without the package.

        Raises `InvalidUsageError` if the package is missing and ``required``.
        """
        try:
            return cls(importlib.import_module("nvtx"))
        except ImportError as error:
            if not required:
                return None
            raise InvalidUsageError(
                f'MPICOMM_TRACE="nvtx" needs the package nvtx: pip install -e ".[nvtx]", or name a file ({error})'
            ) from error

    def begin(self, record: Record) -> None:
        """Open the range of a call."""
        size = "" if record.nbytes is None else f" {record.nbytes} B {record.dtype}".rstrip()
        self._nvtx.push_range(message=f"{record.operation}{size}", domain=_DOMAIN)
        record.ranges += 1

    def choose(self, record: Record) -> None:
        """Open the range of the algorithm of a call."""
        self._nvtx.push_range(message=f"{record.operation} by {record.algorithm}", domain=_DOMAIN)
        record.ranges += 1

    def end(self, record: Record) -> None:
        """Close the ranges of a call. A call by MPI gets a mark, because MPI names its algorithm only at the end."""
        if record.ranges == 1 and record.algorithm:
            self._nvtx.mark(message=f"{record.operation} by {record.algorithm}", domain=_DOMAIN)
        while record.ranges:
            self._nvtx.pop_range(domain=_DOMAIN)
            record.ranges -= 1
