"""The kernel of direct.cu and its arguments."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.load import Variant
from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import MAX_BLOCKS, MAX_RANKS, Team

# Constants and structures of direct.cu; a test compares them.
DIRECT_THREADS = 512
_LINE_NBYTES = 128
ARRIVALS_NBYTES = MAX_BLOCKS * 8
"""What each rank of an arena's peers says in it of its blocks."""


class Cut(ctypes.Structure):
    """The host's copy of ``Cut`` in direct.cu."""

    _fields_ = [("nbytes", ctypes.c_uint64), ("part", ctypes.c_uint64), ("chunk", ctypes.c_uint64)]

    @classmethod
    def of(cls, nbytes: int, blocks: int, chunks: int) -> Cut:
        """Return what goes one way between two ranks, cut for so many blocks, and a part into so many chunks."""
        part = _ceil(nbytes, blocks)
        return cls(nbytes, part, _ceil(part, chunks))


class DirectArguments(ctypes.Structure):
    """The host's copy of ``Direct`` in direct.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ctypes.c_uint64 * MAX_RANKS),
        ("targets", ctypes.c_uint64 * MAX_RANKS),
        ("going", Cut * MAX_RANKS),
        ("coming", Cut * MAX_RANKS),
        ("arrivals", ctypes.c_uint64),
        ("chunks", ctypes.c_uint32),
        ("source", ctypes.c_uint32),
        ("relays", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


def direct_kernel() -> Variant:
    """Return the kernel."""
    return Variant("direct.cu", "mpicomm_direct", OPTIONS)


def _ceil(nbytes: int, pieces: int) -> int:
    return -(-nbytes // (pieces * _LINE_NBYTES)) * _LINE_NBYTES  # so that pieces begin at whole packets
