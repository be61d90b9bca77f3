"""The command line of ``python -m mpicomm.bench experts``, its measurements and its table."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench.experts.routes import Routes
from mpicomm.bench.experts.torch_nccl import TorchNccl
from mpicomm.bench.machine import Call, GpuMachine, HostMachine, Machine, time_calls
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.cli.report import header, setting
from mpicomm.experts.experts import Experts
from mpicomm.experts.shape import BY_EXPERT, DTYPES, LAYOUTS
from mpicomm.mpi.types import covered_dtype

NAME = "experts"
_ROOM = 2
"""A rank has room for so many times the rows that come if all experts get the same."""
_ROUNDS = 7


@dataclass(frozen=True)
class ExpertsRow:
    """The times of one number of tokens, in microseconds: the slowest rank's in a round, and the median of rounds."""

    tokens: int
    layout: str
    crossing_nbytes: int
    """The bytes that cross the links of a GPU in a dispatch, one way: the most of all ranks."""
    dispatch_us: float
    combine_us: float
    even_us: float
    """An even ``Alltoall`` of mpicomm of as many rows to each rank."""
    copy_us: float | None
    """The same bytes by a copy engine, both ways at once; None on the host."""
    wrong: int
    nccl_dispatch_us: float | None = None
    nccl_combine_us: float | None = None
    nccl_even_us: float | None = None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m mpicomm.bench experts",
        description="Time dispatch and combine of a mixture of experts, and check every row. On GPUs -n calls make a "
        "CUDA graph. Each token has --top-k different experts, which are drawn at random.",
    )
    count = arguments.count_from
    result.add_argument("experts", choices=[NAME], help=argparse.SUPPRESS)
    result.add_argument(
        "--tokens",
        type=arguments.counts_from(1),
        metavar="N,...",
        help="of a rank; also the max_tokens of the Experts object; default: 128,4096, on the cpu 16,128",
    )
    hidden = "elements of a token; default: 7168, on the cpu 1024"
    result.add_argument("--hidden", type=count(1), metavar="N", help=hidden)
    result.add_argument("--experts", dest="num_experts", type=count(1), default=64, metavar="N", help="default: 64")
    result.add_argument("--top-k", type=count(1), default=8, metavar="N", help="experts of a token; default: 8")
    result.add_argument("-d", "--datatype", choices=DTYPES, help="default: bfloat16, on the cpu float32")
    layouts = arguments.names_from(LAYOUTS, "layout")
    result.add_argument("--layouts", type=layouts, default=LAYOUTS, metavar="NAME,...", help="experts, tokens")
    result.add_argument("--blocks", type=count(2), metavar="N", help="the most blocks of a launch")
    result.add_argument("-n", "--iters", type=count(1), default=10, metavar="N", help="timed iterations; default: 10")
    result.add_argument("--compare", choices=("nccl",), help="time NCCL through PyTorch, too")
    arguments.add_file_arguments(result)
    arguments.add_communicator_arguments(result)
    return result


def main() -> int:
    """Run the command line on this rank. Collective."""
    options = command_line.parse_args(parser())
    comm = command_line.open_communicator(options.device, options.handle)
    machine: Machine = HostMachine() if comm.device == "cpu" else GpuMachine()
    tokens, hidden, dtype = ([16, 128], 1024, "float32") if comm.device == "cpu" else ([128, 4096], 7168, "bfloat16")
    options.tokens, options.hidden = options.tokens or tokens, options.hidden or hidden
    options.datatype = options.datatype or dtype
    ranks = comm.allgather(comm.describe())
    about = [
        *header("bench experts", ranks, options.handle),
        f"hidden {options.hidden} of {options.datatype}, top {options.top_k} of {options.num_experts} experts",
        "GB/s: the bytes that cross the links of a GPU, each way",
    ]
    command_line.show(*(f"# {line}" for line in about), _head(options.compare is not None))
    rows = []
    with machine.current():
        peer = None
        if options.compare is not None and machine.stream is not None:
            peer = TorchNccl(comm, machine.stream.ptr)
            command_line.show(f"# {peer.version}")
        for count in options.tokens:
            for layout in options.layouts:
                rows.append(_measure(options, comm, machine, count, layout, peer))
                command_line.show(_line(rows[-1]))
        if peer is not None:
            peer.close()
    wrong = sum(row.wrong for row in rows)
    document = {**setting(ranks, options), "experts": [asdict(row) for row in rows]}
    return command_line.finish(comm, options.json, document, wrong, "wrong rows")


def _measure(
    options: argparse.Namespace, comm: Communicator, machine: Machine, tokens: int, layout: str, peer: TorchNccl | None
) -> ExpertsRow:
    dtype, top_k, experts = covered_dtype(options.datatype), options.top_k, options.num_experts
    routes = Routes(machine, comm.rank, comm.size, (tokens, options.hidden), top_k, experts, dtype)
    room = min(comm.size * tokens * top_k, _ROOM * tokens * top_k + 64) if layout == BY_EXPERT else None
    numbers = experts, options.hidden, tokens, top_k, dtype
    with Experts(comm, *numbers, capacity=room, blocks=options.blocks, layout=layout) as made:
        received = made.dispatch(routes.x, routes.ids, routes.weights)
        sums = made.combine(received.x, received)

        def dispatch() -> None:
            made.dispatch(routes.x, routes.ids, routes.weights, out=received)

        def combine() -> None:
            made.combine(received.x, received, out=sums)

        def timed(call: Call, *, graph: bool = True) -> float:
            return _time(comm, machine, call, options.iters, graph=graph and machine.stream is not None)

        dispatch_us, combine_us = timed(dispatch), timed(combine)
        comm.check(machine.stream)
        wrong = routes.count_wrong_rows(received) + routes.count_wrong_sums(sums, weighted=layout == BY_EXPERT)
    crossing = max(comm.allgather(routes.crossing)) * options.hidden * dtype.itemsize
    shape = (comm.size * tokens, options.hidden * dtype.itemsize)
    sent, taken = comm.zeros(shape, "u1"), comm.zeros(shape, "u1")
    even_us = timed(lambda: comm.Alltoall(sent.local, taken.local))
    copy_us = None
    if machine.stream is not None and comm.size > 1:
        nbytes, following = crossing // (comm.size - 1), (comm.rank + 1) % comm.size
        source, target = sent.local.reshape(-1)[:nbytes], taken
        copy_us = timed(lambda: target.put(source, following)) * (comm.size - 1)
    sent.close()
    taken.close()
    row = ExpertsRow(tokens, layout, crossing, dispatch_us, combine_us, even_us, copy_us, comm.allreduce(wrong))
    if peer is None:
        return row
    calls = peer.calls(routes)
    # The host waits within the first call, so no graph can have it.
    times = {name: timed(call, graph=name == "even") for name, call in calls.items()}
    dispatch_us, combine_us, even_us = (times[name] for name in ("dispatch", "combine", "even"))
    return replace(row, nccl_dispatch_us=dispatch_us, nccl_combine_us=combine_us, nccl_even_us=even_us)


def _time(comm: Communicator, machine: Machine, call: Call, iterations: int, *, graph: bool) -> float:
    """Return the time of a call in microseconds. Collective."""
    for _ in range(2):
        call()
    machine.finish()
    comm.barrier()
    captured = machine.capture(call, iterations) if graph else None

    def once() -> float:
        if captured is not None:
            return machine.time_graph(captured).complete
        return time_calls(machine, call, iterations).complete

    rounds: list[float] = []
    for _ in range(_ROUNDS):
        comm.barrier()
        rounds.append(max(comm.allgather(once())))
    return statistics.median(rounds) * 1e6


_COLUMNS: tuple[tuple[str, Callable[[ExpertsRow], Any]], ...] = (
    ("tokens", lambda row: row.tokens),
    ("layout", lambda row: row.layout),
    ("dispatch", lambda row: row.dispatch_us),
    ("GB/s", lambda row: row.crossing_nbytes / row.dispatch_us / 1e3),
    ("combine", lambda row: row.combine_us),
    ("GB/s", lambda row: row.crossing_nbytes / row.combine_us / 1e3),
    ("even", lambda row: row.even_us),
    ("copy GB/s", lambda row: None if row.copy_us is None else row.crossing_nbytes / row.copy_us / 1e3),
    ("wrong", lambda row: row.wrong),
)
_NCCL_COLUMNS: tuple[tuple[str, Callable[[ExpertsRow], Any]], ...] = (
    ("nccl disp.", lambda row: row.nccl_dispatch_us),
    ("nccl comb.", lambda row: row.nccl_combine_us),
    ("nccl even", lambda row: row.nccl_even_us),
)


def _head(compares: bool) -> str:
    columns = _COLUMNS + (_NCCL_COLUMNS if compares else ())
    return "#" + "".join(f"{name:>11}" for name, _ in columns)


def _line(row: ExpertsRow) -> str:
    columns = _COLUMNS + (_NCCL_COLUMNS if row.nccl_even_us is not None else ())
    return " " + "".join(f"{_cell(value(row)):>11}" for _, value in columns)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int | str) else f"{value:.1f}"
