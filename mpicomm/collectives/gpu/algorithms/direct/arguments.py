"""The kernel of direct.cu and its arguments."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.ll_flags import FlaggedInboxes
from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import MAX_BLOCKS, MAX_RANKS, Team
from mpicomm.kernels.variant import Variant

# Constants and structures of direct.cu; a test compares them.
DIRECT_THREADS = 512
_LINE_NBYTES = 128
ARRIVALS_NBYTES = MAX_BLOCKS * 8
"""The size of the arrival words of one peer in an arena, one for each block."""


class Cut(ctypes.Structure):
    """The host's copy of ``Cut`` in direct.cu: a message from one rank to another, cut into parts for blocks."""

    _fields_ = [("nbytes", ctypes.c_uint64), ("part", ctypes.c_uint64)]

    @classmethod
    def of(cls, nbytes: int, blocks: int) -> Cut:
        """Return the cut of a message of ``nbytes`` for ``blocks`` blocks."""
        lines = -(-nbytes // (blocks * _LINE_NBYTES))  # parts are whole lines, so a part begins at a whole packet
        return cls(nbytes, lines * _LINE_NBYTES)


class DirectArguments(ctypes.Structure):
    """The host's copy of ``Direct`` in direct.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ctypes.c_uint64 * MAX_RANKS),
        ("targets", ctypes.c_uint64 * MAX_RANKS),
        ("going", Cut * MAX_RANKS),
        ("coming", Cut * MAX_RANKS),
        ("arrivals", ctypes.c_uint64),
        ("flagged", FlaggedInboxes),
    ]


def direct_kernel() -> Variant:
    """Return the kernel."""
    return Variant(Path(__file__).with_name("direct.cu"), "mpicomm_direct", OPTIONS)
