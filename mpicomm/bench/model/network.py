"""The cost of the network between groups. Times are microseconds, sizes are bytes, bandwidths are 10^9 bytes a second.

The model is from Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20
(1994): a message of m bytes takes alpha + m / beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """One card for each rank: ``gb_s`` is beta in each direction, ``latency_us`` is alpha. Both are above 0."""

    gb_s: float
    latency_us: float

    def transfer_us(self, nbytes: float) -> float:
        """Return m / beta, the time in which a card sends or receives this number of bytes."""
        return nbytes / (self.gb_s * 1e3)

    def step_us(self, messages: int, nbytes: float) -> float:
        """Return alpha + messages * m / beta: a rank sends messages of ``nbytes`` each at once through its card.

        The messages share the card but not the latency. So a step to many ranks is a lower bound, because a card needs
        time for each message, and messages meet in switches.
        """
        return self.latency_us + self.transfer_us(messages * nbytes) if messages else 0.0

    def chain_us(self, steps: int, nbytes: float) -> float:
        """Return the time for data to pass ``steps`` cards one after the other, in the best number of pieces.

        k pieces take (steps + k - 1) * (alpha + m / (k * beta)). That is least for k = sqrt((steps - 1) * (m / beta) /
        alpha), or for 1 if this is less than 1.
        """
        whole_us = self.transfer_us(nbytes)
        pieces = max(1.0, math.sqrt((steps - 1) * whole_us / self.latency_us))
        return (steps + pieces - 1) * (self.latency_us + whole_us / pieces)
