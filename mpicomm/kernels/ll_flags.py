"""Where the flags of the LL wire lie: the host's copy of what is in ll_flags.cuh. Imports nothing of CUDA."""

from __future__ import annotations

import ctypes


class FlaggedInboxes(ctypes.Structure):
    """The host's copy of ``FlaggedInboxes`` in ll_flags.cuh; a test compares them."""

    _fields_ = [("sets", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]
