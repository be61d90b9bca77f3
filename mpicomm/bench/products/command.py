"""The command line of ``python -m mpicomm.bench matmul``."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import GpuMachine
from mpicomm.bench.products import contenders
from mpicomm.bench.products.cases import Matrices, ProductCase, cases_of
from mpicomm.bench.products.contenders import PEERS, FusedTorch, Prepare, SerialNccl
from mpicomm.bench.products.measure import ProductClock, Timed, measure
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.cli.report import header, setting
from mpicomm.errors import InvalidUsageError
from mpicomm.products.libraries import cupy_stream

NAME = "matmul"
_OWN = "mpicomm"
_PARTS = ("collective", "product")
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog=f"python -m mpicomm.bench {NAME}",
        description="Time products that overlap with a collective, check their results, and compare with their parts "
        "and with other libraries.",
    )
    result.add_argument("matmul", choices=(NAME,), help=argparse.SUPPRESS)
    result.add_argument(
        "--rows", type=_sizes, metavar="N,...", help="of the product; default: 1K,4K,16K, on the cpu 256,512"
    )
    result.add_argument("--shape", type=_shape, metavar="K,N", help="of the weights; default: 8K,7K, on the cpu 1K,512")
    count = arguments.count_from
    result.add_argument("-d", "--datatype", choices=_DTYPES, default=None, help="default: bfloat16, on the cpu float32")
    result.add_argument("-n", "--iters", type=count(1), default=5, metavar="N", help="calls of a round; default: 5")
    result.add_argument("-G", "--rounds", type=count(1), default=7, metavar="N", help="timed rounds; default: 7")
    result.add_argument("--eager", action="store_true", help="no graphs, on GPUs")
    peers = arguments.names_from(PEERS, "peer")
    result.add_argument("--compare", type=peers, default=[], metavar="PEER,...", help=", ".join(PEERS))
    arguments.add_file_arguments(result)
    arguments.add_communicator_arguments(result)
    return result


def main() -> int:
    """Run the command line on this rank. Collective."""
    options = command_line.parse_args(parser())
    comm = command_line.open_communicator(options.device, options.handle)
    on_host = comm.device == "cpu"
    options.rows = options.rows or ([256, 512] if on_host else [1024, 4096, 16384])
    options.shape = options.shape or ((1024, 512) if on_host else (8192, 7168))
    _require_possible(options, comm)
    dtype = options.datatype or ("float32" if on_host else "bfloat16")
    inner, columns = options.shape
    cases = cases_of(options.rows, inner, columns, comm.size)
    clock = ProductClock(comm, options.iters, graphs=not options.eager)
    with clock.current():
        opened, absent = _open_peers(options.compare, comm, clock)
    parties: dict[str, Prepare] = {
        "collective": contenders.collective(comm),
        "product": lambda matrices: (matrices.product(), lambda: None),
        _OWN: contenders.own(comm),
        "serial": contenders.serial(comm),
        **{name: peer.prepare for name, peer in opened.items()},
    }
    ranks = comm.allgather(comm.describe())
    graphs = comm.device != "cpu" and not options.eager
    about = [
        *header(f"bench {NAME}", ranks, options.handle),
        f"timed: {'graphs of ' if graphs else ''}{options.iters} calls, slowest rank, median of {options.rounds} "
        f"rounds; {dtype}",
        *(f"{name} {peer.version}" for name, peer in opened.items()),
        *(f"{name}: {reason}" for name, reason in absent.items()),
        "times in us; ratio: mpicomm divided by the larger of collective and product",
        f"{'call':>22}{'rows':>8}" + "".join(f"{name:>11}" for name in (*parties, "ratio")) + f"{'#wrong':>8}",
    ]
    if graphs:
        about[-2:-2] = [f"{name}: call by call, not in graphs" for name, peer in opened.items() if not peer.capturable]
    command_line.show(*(f"# {line}".rstrip() for line in about))
    results, wrong = [], 0
    for case in cases:
        times, silent = measure(comm, clock, Matrices(case, comm, dtype), parties, opened, options.rounds)
        wrong += sum(times[name].wrong or 0 for name in (_OWN, "serial"))
        results.append(
            {**asdict(case), "times": {name: each._asdict() for name, each in times.items()}}
            | {"ratio": _ratio(times), "missing": silent}
        )
        command_line.show(_row(case, times, list(parties)))
    for peer in opened.values():
        peer.close()
    peers = {name: peer.version for name, peer in opened.items()}
    document = {**setting(ranks, options), "datatype": dtype, "peers": peers, "results": results, "absent": absent}
    return command_line.finish(comm, options.json, document, wrong)


def _row(case: ProductCase, times: dict[str, Timed], names: list[str]) -> str:
    cells = "".join(f"{times[name].time_us:>11.1f}" if name in times else f"{'-':>11}" for name in names)
    bad = sum(each.wrong or 0 for each in times.values())
    return f"{case.kind:>24}{case.rows:>8}{cells}{_ratio(times):>11.3f}{bad:>8}"


def _ratio(times: dict[str, Timed]) -> float:
    return times[_OWN].time_us / max(times[name].time_us for name in _PARTS)


def _open_peers(names: list[str], comm: Communicator, clock: ProductClock) -> tuple[dict[str, Any], dict[str, str]]:
    opened: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name in names:
        reasons = [reason for reason in comm.allgather(contenders.missing(name, comm)) if reason]
        if reasons:
            absent[name] = reasons[0]
            continue
        machine = GpuMachine()
        machine.stream = cupy_stream(machine.xp, clock.stream.cuda_stream)
        opened[name] = (SerialNccl if name == "nccl" else FusedTorch)(comm, machine)
    return opened, absent


def _require_possible(options: argparse.Namespace, comm: Communicator) -> None:
    command_line.require_one_node(comm, "the bench is for ranks of one node")
    if comm.device == "cpu" and options.eager:
        raise InvalidUsageError("--eager is for GPUs: on the host all calls are timed without graphs: leave it out")
    if comm.device == "cpu" and options.datatype == "bfloat16":
        raise InvalidUsageError("--datatype bfloat16 is for GPUs: on the host pass float32")
    if comm.device != "cpu" and importlib.util.find_spec("torch") is None:
        raise InvalidUsageError(f"bench {NAME} on GPUs needs PyTorch: pip install torch")


def _sizes(text: str) -> list[int]:
    return [arguments.parse_size(part) for part in text.split(",")]


def _shape(text: str) -> tuple[int, int]:
    sizes = _sizes(text)
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: use K,N, the two sizes of the weights, as in 8K,7K")
    return sizes[0], sizes[1]
