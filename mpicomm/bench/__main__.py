"""The program ``python -m mpicomm.bench``: opens the libraries, measures all sizes, shows the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from mpicomm.api.communicator import Communicator
from mpicomm.bench import compare, experts, matmul
from mpicomm.bench.compare import OWN, UNQUANTIZED, Library, Mpicomm, PlainMpi
from mpicomm.bench.libraries import Nccl, Nvshmem, SymmetricNccl, TorchSymmetric
from mpicomm.bench.measure import Measured, Measuring, machine_of
from mpicomm.bench.operations import BARRIER, DTYPES, OPERATIONS, OPS, ROOT, Case, Content, blocks_of
from mpicomm.bench.report import Report, ResultRow
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.collectives.gpu.decision import NAMES
from mpicomm.collectives.wire import WIRE_DTYPES, as_wire
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.ops import check_legal
from mpicomm.mpi.types import covered_dtype

FACTS = [("size", "(B)", 12), ("count", "(elements)", 13), ("type", "", 15), ("redop", "", 7), ("root", "", 6)]
PEERS: dict[str, type[Library]] = {
    "nccl": Nccl,
    "nccl-symmetric": SymmetricNccl,
    "torch": TorchSymmetric,
    "nvshmem": Nvshmem,
    "mpi": PlainMpi,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.command_parser(
        "bench",
        "Time a collective, check its results, and compare with other libraries. Options are as in "
        "nccl-tests; on GPUs -n calls make a CUDA graph, which is timed -G times (-G 0 or --eager: call by call).",
        peers=PEERS,
    )
    add, count = result.add_argument, arguments.count_from
    listed = f"{', '.join(OPERATIONS)}; or matmul or experts, which have other options"
    add("collective", choices=OPERATIONS, metavar="COLLECTIVE", help=listed)
    arguments.add_sweep_arguments(result, smallest=8)
    add("-d", "--datatype", choices=DTYPES, default="float32", metavar="TYPE", help=", ".join(DTYPES))
    add("-o", "--op", choices=OPS, default="sum", help="default: sum")
    add("-c", "--check", type=count(0), default=1, metavar="N", help="checked calls; default: 1")
    add("-G", "--cudagraph", type=count(0), default=7, metavar="N", help="timed launches; default: 7")
    eager = (
        "no graphs, on GPUs: issue is the time until a call returns, time is the time of -n calls one after the other "
        "until all are done, divided by -n"
    )
    add("--eager", action="store_true", help=eager)
    vary = "each call has another size, above half of the size in the table up to it, and other addresses; no graphs"
    add("--vary", action="store_true", help=vary)
    names = ", ".join(("auto", *NAMES, "mpi"))
    add("--algorithm", default="auto", metavar="NAME", help=f"of mpicomm's calls: {names}; default: auto")
    quantized = "elements of mpicomm's calls travel as fp8 or int8; mpicomm-unquantized is mpicomm without it"
    add("--wire-dtype", choices=WIRE_DTYPES, help=quantized)
    add("--buffers", choices=("symmetric", "ordinary"), default="symmetric", help="default: symmetric")
    return result


def require_possible(options: argparse.Namespace, comm: Communicator) -> None:
    """Raise `InvalidUsageError`, on all ranks, for options that would fail after a long run or have no effect here."""
    row = OPERATIONS[options.collective].collective
    wire = as_wire(options.wire_dtype)
    if wire is not None:
        if row is None or not row.quantizable:
            raise InvalidUsageError("--wire-dtype is for allreduce, allgather and reduce_scatter: leave it out")
        wire.require(options.collective, covered_dtype(options.datatype), options.op if row.reduces else None)
    barrier = OPERATIONS[options.collective] is BARRIER
    on_host = comm.device == "cpu"
    for refused, why in (
        (barrier and options.algorithm != "auto", "--algorithm is not for the barrier, which has one way"),
        (barrier and options.vary, "--vary is not for the barrier, which has no sizes to vary"),
        (on_host and options.eager, "--eager is for GPUs: on the host all calls are timed without graphs"),
    ):
        if refused:
            raise InvalidUsageError(f"{why}: leave it out")


def main() -> int:
    """Run the command line on this rank. Collective."""
    if sys.argv[1:2] == [matmul.NAME]:
        return matmul.main()
    if sys.argv[1:2] == [experts.NAME]:
        return experts.main()
    run = command_line.Run(parser(), one_node=True)
    options, comm = run.options, run.comm
    operation, dtype = OPERATIONS[options.collective], covered_dtype(options.datatype)
    if operation.reduces:
        check_legal(options.op, dtype)
    require_possible(options, comm)
    swept = run.swept_sizes()

    machine = machine_of(comm)
    cases = []
    for block in blocks_of(operation, swept, dtype, comm.size):
        share = compare.mean_share(block) if options.vary else 1.0
        cases.append(Case(operation, dtype, options.op, block, False, comm.rank, comm.size, share))
    longest = max(16, cases[-1].nbytes) + (compare.ROOM_NBYTES if options.vary else 0)
    how_called = {"symmetric": options.buffers == "symmetric", "algorithm": options.algorithm}
    wire = as_wire(options.wire_dtype)
    libraries: list[Library] = [Mpicomm(comm, machine, **how_called, wire=wire).named(OWN, longest)]
    if wire is not None:
        libraries.append(Mpicomm(comm, machine, **how_called).named(UNQUANTIZED, longest))
    opened, absent = compare.open_libraries(comm, machine, PEERS, options.compare, longest)
    libraries += opened.values()

    graphs = machine.stream is not None and not (options.eager or options.vary) and options.cudagraph > 0
    # At least one call comes before a capture, because a graph cannot capture the set-up of a first call.
    warmups = max(1, options.warmup_iters) if graphs else options.warmup_iters
    effort = {"iterations": options.iters, "warmups": warmups, "rounds": max(1, options.cudagraph)}
    measuring = Measuring(comm, machine, **effort, graphs=graphs)
    how = f"{measuring.how}{', each of another size and at other addresses' if options.vary else ''}"
    travel = f", elements travel as {options.wire_dtype}" if options.wire_dtype else ""
    arrays = f"algorithm {options.algorithm}; {options.buffers} arrays{travel}"
    with machine.current():
        content = Content(machine.xp, dtype, options.op, comm.size, cases[-1].count, reduces=operation.reduces)

    places, others = operation.places, [each.name for each in libraries if each.name != OWN]
    own, issue = [each.name for each in libraries if each.own], machine.stream is not None and not graphs
    report = Report(FACTS, places, others, ("algbw", "busbw"), own=own, issue=issue)

    def measure_all(case: Case) -> ResultRow:
        given, more = (measuring, libraries, content), {"checks": options.check, "vary": options.vary}
        return row_of(case, {place: compare.measure(*given, case.at(place), **more) for place in places})

    return report.make(run, f"bench {operation.name}", [how, arrays], cases, measure_all, libraries, absent)


def row_of(case: Case, places: Mapping[str, Measured]) -> ResultRow:
    """Return the row of a case."""
    op, root = case.op if case.operation.reduces else None, ROOT if case.operation.rooted else None
    facts = {"nbytes": case.nbytes, "count": case.count, "dtype": case.dtype.name, "op": op, "root": root}
    return ResultRow(facts, places, lambda place, time_us: case.rates(time_us))


if __name__ == "__main__":
    command_line.run(main)
