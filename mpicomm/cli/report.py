"""The setting of a measurement: the lines above a table, and the first fields of a JSON report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import mpicomm
from mpicomm import environment
from mpicomm.api.communicator import RankInfo
from mpicomm.cli import machine
from mpicomm.cli import options as command_line
from mpicomm.devices.base import Link


def header(title: str, ranks: Sequence[RankInfo], requested_handle: str) -> list[str]:
    """Return the lines that name the command, the ranks with their devices, and the handle."""
    hosts = sorted({info.host for info in ranks})
    count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    lines = [f"mpicomm {mpicomm.__version__} {title}: {count} on {', '.join(hosts)} ({machine.processor()})"]
    for info in ranks:
        device = f"{info.device:>2} [{info.pci_bus_id}] {info.device_name}" if info.pci_bus_id else info.device
        lines.append(f" Rank {info.rank:>2} Pid {info.pid:>6} on {info.host} device {device}")
    if environment.handle(requested_handle) != "auto":
        why = "as asked for"
    elif ranks[0].rejected:
        why = "; ".join(f"not {kind}: {reason}" for kind, reason in ranks[0].rejected.items())
    else:
        why = "the best for this device"
    return [*lines, f"handle: {ranks[0].handle} ({why})"]


def paths(links: Sequence[Sequence[Link]]) -> list[str]:
    """Return the lines of a table of the paths to memory, with a row and a column for each rank."""
    width = max(len(link.path) for row in links for link in row) + 2
    lines = ["path (row: rank, column: peer)", " " * 4 + "".join(f"{peer:>{width}}" for peer in range(len(links)))]
    return lines + [f"{rank:>4}" + "".join(f"{link.path:>{width}}" for link in row) for rank, row in enumerate(links)]


def setting(ranks: Sequence[RankInfo], options: argparse.Namespace) -> dict[str, Any]:
    """Return the date, the command and the machine of a measurement, for the JSON file."""
    return {
        **machine.run_record(options),
        "ranks": [command_line.rank_record(info) for info in ranks],
        "handle": ranks[0].handle,
    }
