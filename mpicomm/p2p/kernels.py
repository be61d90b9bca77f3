"""The kernels of p2p.cu, and the host's copies of their arguments. Imports no CUDA package."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import Variant

COPY_THREADS = 512


class Holding(ctypes.Structure):
    """The host's copy of ``Holding`` in p2p.cu."""

    _fields_ = [("released", ctypes.c_uint64), ("limit_ns", ctypes.c_uint64)]


class Copying(ctypes.Structure):
    """The host's copy of ``Copying`` in p2p.cu."""

    _fields_ = [("target", ctypes.c_uint64), ("source", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class Rally(ctypes.Structure):
    """The host's copy of ``Rally`` in p2p.cu."""

    _fields_ = [
        ("mine", ctypes.c_uint64),
        ("theirs", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("budget_ns", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("rounds", ctypes.c_uint32),
        ("serves", ctypes.c_uint32),
    ]


class Chase(ctypes.Structure):
    """The host's copy of ``Chase`` in p2p.cu."""

    _fields_ = [("word", ctypes.c_uint64), ("result", ctypes.c_uint64), ("loads", ctypes.c_uint32)]


HOLD, COPY, RALLY, CHASE = (
    Variant(Path(__file__).with_name("p2p.cu"), f"mpicomm_p2p_{name}", options_for(None))
    for name in ("hold", "copy", "rally", "chase")
)
