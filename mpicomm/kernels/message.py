"""The kernels of message.cu and signal.cu: their arguments and blocks."""

from __future__ import annotations

import ctypes
import struct

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import KERNEL_DIR, Variant, u32, u64

# Constants and structures of message.cu and signal.cu; a test compares them.
MESSAGE_THREADS = 512
MESSAGE_WORDS = 32
"""The words of a message for each side, which is also the largest number of blocks of a step."""


class MessageStep(ctypes.Structure):
    """The host's copy of ``MessageStep`` in message.cu."""

    _fields_ = [
        *u64("target", "source", "nbytes", "ready", "done", "timeout_ns", "record", "failed"),
        *u32("awaits", "sent", "taken", "peer"),
    ]


MESSAGE_STEP = struct.Struct("=" + "".join({8: "Q", 4: "I"}[ctypes.sizeof(field[1])] for field in MessageStep._fields_))
"""Packs a `MessageStep`, in a fifth of the time that ctypes takes to fill the structure."""

BLOCK_NBYTES = 16 << 10
"""The bytes that a block copies, if `MESSAGE_WORDS` blocks are enough."""

MESSAGE_KERNEL = Variant(KERNEL_DIR / "message.cu", "mpicomm_message", options_for(None))


class SignalArguments(ctypes.Structure):
    """The host's copy of ``Signal`` in signal.cu."""

    _fields_ = [*u64("count", "inbox", "timeout_ns", "record", "failed"), *u32("peer", "waits")]


SIGNAL_KERNEL = Variant(KERNEL_DIR / "signal.cu", "mpicomm_signal", options_for(None))
"""Sends a signal, or waits for one."""


def blocks_of_message(nbytes: int) -> int:
    """Return the number of blocks that copy a message of ``nbytes``, 1 or more; the same for sender and receiver."""
    blocks = -(-nbytes // BLOCK_NBYTES)
    return blocks if blocks < MESSAGE_WORDS else MESSAGE_WORDS
