"""The program ``python -m mpicomm.bench``: opens the contenders, measures all sizes, shows the results."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench import options as options_module
from mpicomm.bench.beside import Slowdown, slowdowns
from mpicomm.bench.contenders import OWN, UNCODED, Contenders
from mpicomm.bench.content import Content
from mpicomm.bench.experts import command as experts
from mpicomm.bench.machine import GpuMachine, HostMachine, Machine
from mpicomm.bench.measure import ROOM_NBYTES, Effort, Measuring, Outcome, mean_share
from mpicomm.bench.operations import OPERATIONS, Case, blocks_of
from mpicomm.bench.products import command as products
from mpicomm.bench.results import ResultRow, Results
from mpicomm.bench.table import Table
from mpicomm.cli import options as command_line
from mpicomm.cli.report import header, setting
from mpicomm.collectives.wire import as_wire


def main() -> int:
    """Run the command line on this rank. Collective."""
    if sys.argv[1:2] == [products.NAME]:
        return products.main()
    if sys.argv[1:2] == [experts.NAME]:
        return experts.main()
    options = command_line.parse_args(options_module.parser())
    comm = command_line.open_communicator(options.device, options.handle)
    dtype = options_module.dtype_and_op(options)
    options_module.require_possible(options, comm)
    swept = command_line.swept_sizes(options, comm)

    operation = OPERATIONS[options.collective]
    machine: Machine = HostMachine() if comm.device == "cpu" else GpuMachine()
    cases = [
        Case(
            operation, dtype, options.op, block, False, comm.rank, comm.size, mean_share(block) if options.vary else 1.0
        )
        for block in blocks_of(operation, swept, dtype, comm.size)
    ]
    contenders = Contenders(comm, machine, max(16, cases[-1].nbytes) + (ROOM_NBYTES if options.vary else 0))
    kinds = ("symmetric", "ordinary") if options.buffers == "both" else (options.buffers,)
    contenders.open_own(kinds, options.algorithm, as_wire(options.wire_dtype))
    contenders.open_peers(options.compare)

    ranks = comm.allgather(comm.describe())
    graphs = machine.stream is not None and not (options.eager or options.vary) and options.cudagraph > 0
    how = f"{options.cudagraph} launches of a graph of {options.iters} calls" if graphs else f"{options.iters} calls"
    how += ", each of another size and at other addresses" if options.vary else ""
    about = [
        *header(f"bench {operation.name}", ranks, options.handle),
        f"timed: {how}, slowest rank, median; algorithm {options.algorithm}; {' and '.join(kinds)} arrays"
        f"{f', elements travel as {options.wire_dtype}' if options.wire_dtype else ''}",
        *(f"{contender.name} {contender.peer.version}" for contender in contenders.present if not contender.own),
        *(f"{name}: {reason}" for name, reason in contenders.absent.items()),
        "",
    ]
    command_line.show(*(f"# {line}".rstrip() for line in about))

    # At least one call comes before a capture, because a graph cannot capture the set-up of a first call.
    warmups = max(1, options.warmup_iters) if graphs else options.warmup_iters
    effort = Effort(options.iters, warmups, options.check, max(1, options.cudagraph), graphs, options.vary)
    with machine.current():
        content = Content(machine.xp, dtype, options.op, comm.size, cases[-1].count, reduces=operation.reduces)
    measuring = Measuring(comm, machine, content, contenders, effort)
    results = sweep(measuring, cases, contenders, issue=machine.stream is not None and not graphs)
    beside = slowdowns(comm, machine, contenders, cases[-1]) if options.beside else []
    return finish(options, comm, ranks, contenders, results, beside)


def sweep(measuring: Measuring, cases: list[Case], contenders: Contenders, *, issue: bool) -> Results:
    """Measure all cases and print the table. Collective."""
    places = cases[0].operation.places
    names = [contender.name for contender in contenders.present]
    table = Table(places, [name for name in names if name != OWN], issue=issue)
    command_line.show(*(f"#{line}".rstrip() for line in table.head()))
    results = Results(OWN)
    for case in cases:
        outcomes: dict[str, dict[str, Outcome]] = {}
        silent: dict[str, dict[str, str]] = {}
        for place in places:
            outcomes[place], silent[place] = measuring.run(case.at(place))
        results.rows.append(ResultRow(case, outcomes, silent))
        command_line.show(table.row(case, outcomes, OWN))
    return results


def finish(
    options: argparse.Namespace,
    comm: Communicator,
    ranks: list[Any],
    contenders: Contenders,
    results: Results,
    beside: list[Slowdown],
) -> int:
    """Print the summary, write the files, close everything. Return the exit status. Collective."""
    own = {contender.name for contender in contenders.present if contender.own}
    wrong = sum(count for name, count in results.wrong().items() if name in own)
    peers = {each.name: each.peer.version for each in contenders.present if not each.own or each.name == UNCODED}
    command_line.show(*(f"# {line}" for line in results.footer()), *(f"# {slowdown}" for slowdown in beside))
    document = {
        **setting(ranks, options),
        "collective": options.collective,
        "peers": peers,
        "missing": contenders.absent,
        "results": results.document(),
        "geometric_means": {
            name: {place: mean for place, (mean, _) in places.items()}
            for name, places in results.geometric_means().items()
        },
        "beside": [asdict(slowdown) for slowdown in beside],
        "wrong": wrong,
        "ok": wrong == 0,
    }
    command_line.save(options.json, document)
    contenders.close()  # after the results are shown, because a library may end the process here
    comm.Free()
    command_line.show("# OK" if wrong == 0 else f"# FAILED: {wrong} wrong")
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    command_line.run(main)
