"""``python -m mpicomm.info``: shows the ranks' devices, paths to memory, memory of a communicator, and versions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpicomm import environment
from mpicomm.api.communicator import Communicator
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.cluster.process import query_cuda_aware
from mpicomm.collectives.gpu import tuning
from mpicomm.devices.base import Link, slowest_gb_s
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.sizes import rich_console, rich_table

if TYPE_CHECKING:
    from rich.table import Table


def collect(comm: Communicator) -> dict[str, Any]:
    """Return all facts to show, ready for JSON. Collective."""
    outcome = first_calls(comm)
    here = comm.describe()
    record = command_line.rank_record(here)
    record["environment"] = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("MPICOMM_")}
    return {
        "ranks": comm.allgather(record),
        "first_calls": outcome,
        "processor": arguments.processor(),
        "cuda_aware_mpi": query_cuda_aware()._asdict(),
        "tuning": algorithms(here.device_name, here.links) if comm.device != "cpu" else [],
        "multi_process_service": environment.multi_process_service(),
        "order_under_the_runner": "stream" if environment.stream_order(None) else "complete",
        "versions": arguments.versions(),
    }


def first_calls(comm: Communicator) -> str:
    """Make a small Allreduce, and on GPUs an Alltoallv, which set up their memory. Collective.

    Return "work", or the error of this rank. The caller shows the other facts in any case, because they may tell the
    cause.
    """
    try:
        with comm.zeros(comm.size) as sent, comm.zeros(comm.size) as received:
            comm.Allreduce(sent.local, received.local, algorithm="one_shot")
            if comm.device != "cpu":
                counts = [1] * comm.size
                comm.Alltoallv([sent.local, counts], [received.local, counts])
            comm.check()
    except MpicommError as error:
        return str(error)
    return "work"


def algorithms(device_name: str, links: Iterable[Link]) -> list[str]:
    """Return the algorithms of collectives on GPU arrays, for these links of the first rank, or the table's error."""
    try:
        return tuning.find(device_name, lambda: slowest_gb_s(links)).describe()
    except InvalidUsageError as error:
        return [str(error)]


def group_ranks(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Return (ranks, name, value) for the settings of all ranks; ranks with the same value share a line."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, named in enumerate(settings):
        for item in named.items():
            holders.setdefault(item, []).append(rank)
    return [
        ("all" if len(ranks) == len(settings) else ", ".join(map(str, ranks)), name, value)
        for (name, value), ranks in holders.items()
    ]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables to print."""
    ranks = found["ranks"]
    columns = {name: name for name in ("rank", "host", "pid", "node", "device")}
    columns |= {"device_name": "name", "device_uuid": "UUID", "pci_bus_id": "PCI id", "numa_node": "NUMA node"}
    result = [
        rich_table("Ranks", columns.values(), ([_cell(info[name]) for name in columns] for info in ranks)),
        rich_table(
            "Paths to memory (row: rank, column: peer)",
            ("rank", *map(str, range(len(ranks))), "handle"),
            ([str(info["rank"]), *map(_path, info["links"]), info["handle"]] for info in ranks),
        ),
    ]
    for title, heads, settings in (
        (
            "Memory after the first collectives",
            ("ranks", "purpose", "memory"),
            [{use["purpose"]: _held(use) for use in info["memory"]} for info in ranks],
        ),
        ("Better handles that were refused", ("ranks", "handle", "reason"), [info["rejected"] for info in ranks]),
        (
            "Better engines between peer domains that were refused",
            ("ranks", "engine", "reason"),
            [info["internode_rejected"] for info in ranks],
        ),
        ("Environment", ("ranks", "variable", "value"), [info["environment"] for info in ranks]),
    ):
        if rows := group_ranks(settings):
            result.append(rich_table(title, heads, rows))

    mpi, first = found["cuda_aware_mpi"], ranks[0]
    aware = {True: "yes", False: "no", None: "unknown"}[mpi["aware"]]
    reductions = {"auto": "by MPI or mpicomm", "ordered": "by mpicomm, in rank order"}[first["reductions"]]
    system = {
        "processor": found["processor"],
        **found["versions"],
        "MPI is CUDA-aware": f"{aware} ({mpi['how']})",
        "reductions of host arrays": reductions,
    }
    if first["internode"]:
        system["engine between peer domains"] = first["internode"]
    if first["device"] != "cpu":
        runs = "runs" if found["multi_process_service"] else "does not run, so ranks that share a GPU take turns"
        system["NVIDIA's multi-process service"] = runs
        under = {"stream": "stream-ordered, by MPICOMM_ORDER", "complete": "complete on return"}
        runner = under[found["order_under_the_runner"]]
        system["blocking calls on GPU arrays"] = f"stream-ordered; under python -m mpicomm {runner}"
    system["first collectives"] = found["first_calls"]
    if found["tuning"]:
        source, *choices = found["tuning"]
        rows_of_choices = (line.split(": ", 1) for line in (*choices, *first["products"]))
        title = f"Algorithms of collectives on GPU arrays: {source}"
        result.append(rich_table(title, ("call", "algorithm"), rows_of_choices))
    return [*result, rich_table("System of rank 0", ("part", "version"), system.items())]


def _path(link: Mapping[str, Any]) -> str:
    carries = "" if link["gb_s"] is None else f" {link['gb_s']:.3g} GB/s"
    return f"{link['path']}{carries}"


def _held(use: Mapping[str, Any]) -> str:
    parts = (("device", use["device_nbytes"]), ("host", use["host_nbytes"]))
    return ", ".join(f"{place}: {nbytes / 1024:,.0f} KiB" for place, nbytes in parts if nbytes)


def _cell(value: object) -> str:
    return "-" if value in (None, "", -1) else str(value)


def main() -> int:
    """Run the command line on this rank. Collective."""
    parser = arguments.command_parser(
        "info",
        "Show the ranks' devices, how they open each other's memory, how much memory a communicator takes, "
        "and the versions in use.",
        json="output",
    )
    options = command_line.parse_args(parser)
    comm = Communicator(device=options.device, handle=options.handle)
    found, rank = collect(comm), comm.rank
    comm.Free()
    if options.json is not None:
        command_line.save(options.json, found)
    elif rank == 0:
        console = rich_console(sys.stdout)
        for table in tables(found):
            console.print(table)
    return 0


if __name__ == "__main__":
    command_line.run(main)
