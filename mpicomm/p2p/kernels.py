"""The kernels of p2p.cu, and the host's copies of their arguments. Imports no CUDA package."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import Variant, u32, u64

COPY_THREADS = 512


class Gate(ctypes.Structure):
    """The host's copy of ``Gate`` in p2p.cu."""

    _fields_ = [*u64("released", "limit_ns")]


class Copying(ctypes.Structure):
    """The host's copy of ``Copying`` in p2p.cu."""

    _fields_ = [*u64("target", "source", "nbytes")]


class PingPong(ctypes.Structure):
    """The host's copy of ``PingPong`` in p2p.cu."""

    _fields_ = [*u64("mine", "theirs", "result", "budget_ns", "limit_ns"), *u32("rounds", "serves")]


class PointerChase(ctypes.Structure):
    """The host's copy of ``PointerChase`` in p2p.cu."""

    _fields_ = [*u64("word", "result"), *u32("loads")]


GATE, COPY, PING_PONG, POINTER_CHASE = (
    Variant(Path(__file__).with_name("p2p.cu"), f"mpicomm_p2p_{name}", options_for(None))
    for name in ("gate", "copy", "ping_pong", "pointer_chase")
)
