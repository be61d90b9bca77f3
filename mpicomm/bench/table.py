"""The table in nccl-tests' form, with two more columns for each other library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpicomm.bench.measure import Outcome
from mpicomm.bench.operations import ROOT, Case

_OWN_WIDTHS = (10, 9, 9, 8)
_PEER_WIDTHS = (10, 7)


class Table:
    """The layout for these places and peers. With ``issue`` a column has the time for which a call holds the caller."""

    def __init__(self, places: Sequence[str], peers: Sequence[str], *, issue: bool) -> None:
        self._places = places
        self._peers = peers
        self._issue = issue

    def head(self) -> list[str]:
        """Return the lines above the rows."""
        own_names = ["time", "algbw", "busbw", "#wrong"]
        own_units = ["(us)", "(GB/s)", "(GB/s)", ""]
        widths = list(_OWN_WIDTHS)
        if self._issue:
            own_names, own_units, widths = ["issue", *own_names], ["(us)", *own_units], [10, *widths]
        first = second = third = ""
        for place in self._places:
            width = sum(widths)
            first += f"{place:^{width}}"
            second += "".join(f"{name:>{n}}" for name, n in zip(own_names, widths, strict=True))
            third += "".join(f"{unit:>{n}}" for unit, n in zip(own_units, widths, strict=True))
            for peer in self._peers:
                width = self._peer_width(peer)
                first += f"{peer:>{width}}"
                second += f"{'time':>{width - _PEER_WIDTHS[1]}}{'ratio':>{_PEER_WIDTHS[1]}}"
                third += f"{'(us)':>{width - _PEER_WIDTHS[1]}}{'':>{_PEER_WIDTHS[1]}}"
        return [
            f"{'':>11}{'':>13}{'':>15}{'':>7}{'':>6}{first}",
            f"{'size':>11}{'count':>13}{'type':>15}{'redop':>7}{'root':>6}{second}",
            f"{'(B)':>11}{'(elements)':>13}{'':>15}{'':>7}{'':>6}{third}",
        ]

    def row(self, case: Case, outcomes: Mapping[str, Mapping[str, Outcome]], own: str) -> str:
        """Return the line for outcomes by place and contender. It compares the others with ``own``."""
        operation = case.operation
        op = case.op if operation.reduces else "none"
        root = ROOT if operation.rooted else -1
        line = f"{case.nbytes:>12}{case.count:>13}{case.dtype.name:>15}{op:>7}{root:>6}"
        for place in self._places:
            found = outcomes.get(place, {})
            mine = found[own]
            if self._issue:
                line += f" {_number(mine.issue_us):>9}"
            bandwidths = (case.algbw_gb_s(mine.time_us), case.busbw_gb_s(mine.time_us))
            wrong = "N/A" if mine.wrong is None else str(mine.wrong)
            cells = (_time(mine), *(f"{value:.2f}" for value in bandwidths), wrong)
            line += "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, _OWN_WIDTHS, strict=True))
            for peer in self._peers:
                other = found.get(peer)
                time, ratio = (_time(other), f"{other.time_us / mine.time_us:.2f}") if other else ("-", "-")
                line += f" {time:>{self._peer_width(peer) - _PEER_WIDTHS[1] - 1}} {ratio:>{_PEER_WIDTHS[1] - 1}}"
        return line

    @staticmethod
    def _peer_width(peer: str) -> int:
        return max(sum(_PEER_WIDTHS), len(peer) + 2)


def _time(outcome: Outcome) -> str:
    """Return a time. A star marks calls that were issued one by one although the user asked for graphs."""
    return _number(outcome.time_us) + ("*" if outcome.eager else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
