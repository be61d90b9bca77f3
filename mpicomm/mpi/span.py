"""Span: consecutive elements in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """``count`` consecutive elements at address ``pointer``."""

    pointer: int
    count: int
