"""The kernels of p2p.cu, and the host's copies of their arguments. Imports no CUDA package."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import Variant, u32, u64

COPY_THREADS = 512


class Holding(ctypes.Structure):
    """The host's copy of ``Holding`` in p2p.cu."""

    _fields_ = [*u64("released", "limit_ns")]


class Copying(ctypes.Structure):
    """The host's copy of ``Copying`` in p2p.cu."""

    _fields_ = [*u64("target", "source", "nbytes")]


class Rally(ctypes.Structure):
    """The host's copy of ``Rally`` in p2p.cu."""

    _fields_ = [*u64("mine", "theirs", "result", "budget_ns", "limit_ns"), *u32("rounds", "serves")]


class Chase(ctypes.Structure):
    """The host's copy of ``Chase`` in p2p.cu."""

    _fields_ = [*u64("word", "result"), *u32("loads")]


HOLD, COPY, RALLY, CHASE = (
    Variant(Path(__file__).with_name("p2p.cu"), f"mpicomm_p2p_{name}", options_for(None))
    for name in ("hold", "copy", "rally", "chase")
)
