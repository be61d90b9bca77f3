"""The kernels of packets.cu: their arguments, variants, and how messages are spread over threads."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.load import Variant
from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.team import MAX_RANKS, Team

# Constants and structures of packets.cu; a test compares them.
OVERSEERS = 32
STAGES = 2
SLOT_NBYTES = 16
_SENTINEL_UNIT_NBYTES = 16
_FLAG_UNIT_NBYTES = 8
FEWEST_LAPS = 4
"""Steps that an inbox must hold where there are more of them: see packets.cu."""


class PacketArguments(ctypes.Structure):
    """The host's copy of ``Packets`` in packets.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ctypes.c_uint64 * MAX_RANKS),
        ("receives", ctypes.c_uint64 * MAX_RANKS),
        ("send_nbytes", ctypes.c_uint64 * MAX_RANKS),
        ("receive_nbytes", ctypes.c_uint64 * MAX_RANKS),
        ("own", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("output_nbytes", ctypes.c_uint64),
        ("inboxes", ctypes.c_uint64 * MAX_RANKS),
        ("inbox_nbytes", ctypes.c_uint64),
        ("flagged", ctypes.c_uint64),
        ("flagged_nbytes", ctypes.c_uint64),
        ("steps", ctypes.c_uint32),
        ("laps", ctypes.c_uint32),
        ("sources", ctypes.c_uint32),
        ("targets", ctypes.c_uint32),
    ]


def most_workers(size: int) -> int:
    """Return how many threads of a block can move data between ``size`` ranks: ``kWorkers`` in packets.cu."""
    return (256 if size > 4 else 512) - OVERSEERS


def packet_kernel(reduction: tuple[str, str] | None, size: int, *, sentinel: bool, fan_out: bool) -> Variant:
    """Return the kernel for ``size`` ranks and ``(dtype, op)``, or the one that does not reduce; as `options_for`."""
    wire = ("-DMPICOMM_SENTINEL",) if sentinel else ()
    stages = ("-DMPICOMM_FAN_OUT",) if fan_out else ()
    options = (*options_for(reduction), f"-DMPICOMM_RANKS={size}", *wire, *stages)
    return Variant("packets.cu", "mpicomm_packets", options)


def flags_can_carry(dtype: str) -> bool:
    """Whether an element fits into a packet with flags."""
    return dtype != "complex128"


def unit_nbytes(*, sentinel: bool) -> int:
    """Return how many bytes of the message a packet carries."""
    return _SENTINEL_UNIT_NBYTES if sentinel else _FLAG_UNIT_NBYTES
