"""The kernel of direct.cu and its arguments."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import MAX_BLOCKS, MAX_RANKS, FlaggedInboxes, Team
from mpicomm.kernels.variant import Variant, u64

# Constants and structures of direct.cu; a test compares them.
DIRECT_THREADS = 512
_LINE_NBYTES = 128
ARRIVALS_NBYTES = MAX_BLOCKS * 8
"""The size of the arrival words of one peer in an arena, one for each block."""


class Cut(ctypes.Structure):
    """The host's copy of ``Cut`` in direct.cu: a message from one rank to another, cut into parts for blocks."""

    _fields_ = [*u64("nbytes", "part")]


class DirectArguments(ctypes.Structure):
    """The host's copy of ``Direct`` in direct.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ctypes.c_uint64 * MAX_RANKS),
        ("targets", ctypes.c_uint64 * MAX_RANKS),
        ("going", Cut * MAX_RANKS),
        ("coming", Cut * MAX_RANKS),
        *u64("arrivals"),
        ("flagged", FlaggedInboxes),
    ]


def part_of(nbytes: int, blocks: int) -> int:
    """Return the bytes of each block's part of a message of ``nbytes``, for `Cut.part`."""
    lines = -(-nbytes // (blocks * _LINE_NBYTES))  # parts are whole lines, so a part begins at a whole packet
    return lines * _LINE_NBYTES


DIRECT_KERNEL = Variant(Path(__file__).with_name("direct.cu"), "mpicomm_direct", OPTIONS)
