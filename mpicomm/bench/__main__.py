"""The program ``python -m mpicomm.bench``: opens the contenders, measures all sizes, shows the results."""

from __future__ import annotations

import sys
from dataclasses import asdict

from mpicomm.bench import experts, matmul
from mpicomm.bench import options as options_module
from mpicomm.bench.contenders import ROOM_NBYTES, Contenders, mean_share
from mpicomm.bench.content import Content
from mpicomm.bench.machine import machine_of
from mpicomm.bench.measure import Effort, Measuring, Outcome
from mpicomm.bench.operations import OPERATIONS, Case, blocks_of
from mpicomm.bench.overlap import slowdowns
from mpicomm.bench.peers import OWN, UNCODED
from mpicomm.bench.report import ResultRow, Results, Table
from mpicomm.cli import options as command_line
from mpicomm.cli.options import header, setting
from mpicomm.collectives.wire import as_wire


def main() -> int:
    """Run the command line on this rank. Collective."""
    if sys.argv[1:2] == [matmul.NAME]:
        return matmul.main()
    if sys.argv[1:2] == [experts.NAME]:
        return experts.main()
    options = command_line.parse_args(options_module.parser())
    comm = command_line.open_communicator(options.device, options.handle)
    dtype = options_module.dtype_and_op(options)
    options_module.require_possible(options, comm)
    swept = command_line.swept_sizes(options, comm)

    operation = OPERATIONS[options.collective]
    machine = machine_of(comm)
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
        *(f"{contender.name} {contender.version}" for contender in contenders.present if not contender.own),
        *(f"{name}: {reason}" for name, reason in contenders.absent.items()),
        "",
    ]
    command_line.show(*(f"# {line}".rstrip() for line in about))

    # At least one call comes before a capture, because a graph cannot capture the set-up of a first call.
    warmups = max(1, options.warmup_iters) if graphs else options.warmup_iters
    measuring = Measuring(comm, machine, Effort(options.iters, warmups, max(1, options.cudagraph), graphs))
    with machine.current():
        content = Content(machine.xp, dtype, options.op, comm.size, cases[-1].count, reduces=operation.reduces)

    places = operation.places
    names = [contender.name for contender in contenders.present]
    issue = machine.stream is not None and not graphs
    table = Table(places, [name for name in names if name != OWN], issue=issue)
    command_line.show(*table.head())
    results = Results(OWN)
    for case in command_line.tracked(cases, operation.name):
        outcomes: dict[str, dict[str, Outcome]] = {}
        silent: dict[str, dict[str, str]] = {}
        for place in places:
            measured = contenders.measure(measuring, content, case.at(place), options.check, vary=options.vary)
            outcomes[place], silent[place] = measured
        results.rows.append(ResultRow(case, outcomes, silent))
        command_line.show(table.row(case, outcomes, OWN))
    beside = slowdowns(comm, machine, contenders, cases[-1]) if options.beside else []
    own = {contender.name for contender in contenders.present if contender.own}
    wrong = sum(count for name, count in results.wrong().items() if name in own)
    peers = {each.name: each.version for each in contenders.present if not each.own or each.name == UNCODED}
    command_line.show(*(f"# {line}" for line in results.footer()), *(f"# {slowdown}" for slowdown in beside))
    document = {
        **setting(ranks, options),
        "collective": options.collective,
        "peers": peers,
        "missing": contenders.absent,
        "results": results.document(),
        "geometric_means": results.geometric_means(),
        "beside": [asdict(slowdown) for slowdown in beside],
    }
    return command_line.finish(comm, options.json, document, wrong, close=contenders.close)


if __name__ == "__main__":
    command_line.run(main)
