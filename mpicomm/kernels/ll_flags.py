"""The inboxes of the LL protocol: the host's copy of the structure in ll_flags.cuh. Imports no CUDA package."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.variant import u64


class FlaggedInboxes(ctypes.Structure):
    """The host's copy of ``FlaggedInboxes`` in ll_flags.cuh; a test compares them."""

    _fields_ = [*u64("sets", "nbytes")]
