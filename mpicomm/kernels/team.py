"""What every kernel of a communicator is told: the host's copies of what is in team.cuh. Imports nothing of CUDA."""

from __future__ import annotations

import ctypes

# Constants and structures of team.cuh; a test compares them.
LANES = 32  # of a warp: kLanes in memory_order.cuh
MAX_RANKS = 8
MAX_BLOCKS = 256
LINE_NBYTES = 128
HEAD_NBYTES = 2432
"""What lies at the start of an arena: the abort word, what others have announced and what was announced to them, and
numbers of launches. All zero at first."""
EXCHANGE, MISMATCH, MESSAGE = 2, 3, 4
"""``enum Operation`` of faults.cuh, but for signals."""
ABORT_OPERATION = 7
"""The byte of an arena, the last of the abort word, that says for which operation a rank has given up."""


class Faults(ctypes.Structure):
    """What kernels are given: the host's copy of ``Faults`` in faults.cuh."""

    _fields_ = [("record", ctypes.c_uint64), ("failed", ctypes.c_uint64)]


class Team(ctypes.Structure):
    """The host's copy of ``Team`` in team.cuh."""

    _fields_ = [
        ("arenas", ctypes.c_uint64 * MAX_RANKS),
        ("faults", Faults),
        ("timeout_ns", ctypes.c_uint64),
        ("names", ctypes.c_uint32 * MAX_RANKS),
        ("size", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("tags", ctypes.c_uint32 * MAX_RANKS),
    ]
