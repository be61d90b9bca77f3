"""The command line: nccl-tests' options, and the libraries to compare with."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.content import OPS
from mpicomm.bench.model.network import Network
from mpicomm.bench.operations import ALIASES, BARRIER, OPERATIONS
from mpicomm.bench.peers import PEERS
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.collectives.wire import CODES, as_wire
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.ops import check_legal
from mpicomm.mpi.types import COVERED, covered_dtype

DTYPES = tuple(name for name in COVERED if name not in ("bool", "complex64", "complex128"))
_OF_MODELS = (
    *("model", "network", "sources", "against"),
    *("collective", "minbytes", "maxbytes", "stepfactor", "json", "plot"),
)
_NCCL_TESTS_NAMES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m mpicomm.bench",
        description="Time a collective, check its results, and compare with other libraries. Options are as in "
        "nccl-tests; on GPUs -n calls make a CUDA graph, which is timed -G times (-G 0 or --eager: call by call).",
    )
    count = arguments.count_from
    collective = arguments.name_from(OPERATIONS, "collective", aliases=ALIASES)
    result.add_argument(
        "collective",
        type=collective,
        metavar="COLLECTIVE",
        help=f"{', '.join(OPERATIONS)}; or matmul or experts, which have other options",
    )
    arguments.add_sweep_arguments(result, smallest=8, factor=2)
    dtype_name = arguments.name_from(DTYPES, "type", aliases=_NCCL_TESTS_NAMES)
    result.add_argument("-d", "--datatype", type=dtype_name, default="float32", metavar="TYPE", help=", ".join(DTYPES))
    result.add_argument("-o", "--op", choices=OPS, default="sum", help="default: sum")
    result.add_argument("-c", "--check", type=count(0), default=1, metavar="N", help="checked calls; default: 1")
    result.add_argument("-G", "--cudagraph", type=count(0), default=7, metavar="N", help="timed launches; default: 7")
    result.add_argument(
        "--eager",
        action="store_true",
        help="no graphs, on GPUs: issue is the time until a call returns, time is the time of -n calls one after the "
        "other until all are done, divided by -n",
    )
    result.add_argument(
        "--vary",
        action="store_true",
        help="each call has another size, above half of the size in the table up to it, and other addresses; no graphs",
    )
    result.add_argument("--algorithm", default="auto", metavar="NAME", help="of mpicomm's calls; default: auto")
    result.add_argument(
        "--wire-dtype",
        choices=CODES,
        help="elements of mpicomm's calls travel as codes of 8 bits; mpicomm-uncoded is mpicomm without it",
    )
    result.add_argument(
        "--buffers", choices=("symmetric", "ordinary", "both"), default="symmetric", help="default: symmetric"
    )
    peers = arguments.names_from(PEERS, "peer")
    result.add_argument("--compare", type=peers, default=[], metavar="PEER,...", help=", ".join(PEERS))
    result.add_argument("--beside", choices=("matmul",), help="time a matrix product during calls of the largest size")
    arguments.add_file_arguments(result, plot="time and bus bandwidth by size")
    arguments.add_communicator_arguments(result)
    _add_model_arguments(result)
    return result


def _add_model_arguments(result: argparse.ArgumentParser) -> None:
    model = result.add_argument_group(
        "model",
        "Predict times of float32 over several nodes, without GPU and mpirun; -b, -e, -f, --json, --plot as above.",
    )
    model.add_argument("--model", type=arguments.counts_from(1), metavar="NODES", help="numbers of nodes, as in 2,4,8")
    model.add_argument(
        "--network",
        type=_network,
        metavar="GBPS,US",
        help="of each rank's card: 10^9 bytes a second in each direction, and the latency of a message, as in 50,5",
    )
    model.add_argument(
        "--from", dest="sources", nargs="+", type=Path, metavar="FILE", help="--json results of the bench on one node"
    )
    model.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="measured runs, to state the error of the model: a JSON list of "
        '{"nodes": 2, "nbytes": 1024, "time_us": 40.5}',
    )


def dtype_and_op(options: argparse.Namespace) -> np.dtype[Any]:
    """Return the element type. Raises `InvalidUsageError` if it, or the operation on it, is not supported."""
    dtype = covered_dtype(options.datatype)
    if OPERATIONS[options.collective].reduces:
        check_legal(options.op, dtype)
    return dtype


def require_possible(options: argparse.Namespace, comm: Communicator) -> None:
    """Raise `InvalidUsageError`, on all ranks, for options that would fail after a long run or have no effect here."""
    command_line.require_one_node(comm, "the bench is for ranks of one node")
    row = OPERATIONS[options.collective].collective
    wire = as_wire(options.wire_dtype)
    if wire is not None:
        if row is None or not row.coded:
            raise InvalidUsageError("--wire-dtype is for allreduce, allgather and reduce_scatter: leave it out")
        wire.require(options.collective, covered_dtype(options.datatype), options.op if row.reduces else None)
    barrier = OPERATIONS[options.collective] is BARRIER
    on_host = comm.device == "cpu"
    for refused, why in (
        (barrier and options.algorithm != "auto", "--algorithm is not for the barrier, which has one way"),
        (barrier and options.plot, "--plot is not for the barrier, which has no sizes to draw"),
        (barrier and options.vary, "--vary is not for the barrier, which has no sizes to vary"),
        (on_host and options.eager, "--eager is for GPUs: on the host all calls are timed without graphs"),
        (on_host and options.beside, "--beside is for GPUs: on the host no product runs beside a call"),
    ):
        if refused:
            raise InvalidUsageError(f"{why}: leave it out")
    command_line.require_plot(options.plot)


def require_model(options: argparse.Namespace) -> None:
    """Raise `InvalidUsageError`, on all ranks, if --model lacks options, or for options that have no effect with it."""
    for option, value in (("--network", options.network), ("--from", options.sources)):
        if value is None:
            raise InvalidUsageError(f"--model needs {option}: python -m mpicomm.bench --help explains it")
    defaults = parser()
    for name, value in vars(options).items():
        if name not in _OF_MODELS and value != defaults.get_default(name):
            raise InvalidUsageError(f"--{name} is not for --model, which measures nothing: leave it out")
    command_line.require_plot(options.plot)


def forbid_model_arguments(options: argparse.Namespace) -> None:
    """Raise `InvalidUsageError`, on all ranks, for options that have no effect without --model."""
    for option, value in (("--network", options.network), ("--from", options.sources), ("--against", options.against)):
        if value is not None:
            raise InvalidUsageError(f"{option} is for --model NODES: add that, or leave {option} out")


def _network(text: str) -> Network:
    try:
        gb_s, latency_us = (float(part) for part in text.split(","))
    except ValueError:
        gb_s = latency_us = math.nan
    if not (0 < gb_s < math.inf and 0 < latency_us < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: use GBPS,US, two numbers above 0, as in 50,5")
    return Network(gb_s, latency_us)
