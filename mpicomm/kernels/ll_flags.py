"""The inboxes of the LL protocol: the host's copy of the structure in ll_flags.cuh. Imports no CUDA package."""

from __future__ import annotations

import ctypes


class FlaggedInboxes(ctypes.Structure):
    """The host's copy of ``FlaggedInboxes`` in ll_flags.cuh; a test compares them."""

    _fields_ = [("sets", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]
