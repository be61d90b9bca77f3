"""The word of a slot without a packet in the sentinel protocol. Imports no CUDA package."""

from __future__ import annotations

ABSENT = 0xFFF5A3C6
"""It is ``kAbsent`` of sentinels.cuh; a test compares them."""
