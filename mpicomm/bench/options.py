"""The command line: nccl-tests' options, and the libraries to compare with."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.content import OPS
from mpicomm.bench.operations import ALIASES, BARRIER, OPERATIONS
from mpicomm.bench.peers import PEERS
from mpicomm.bench.torch_peers import TorchSymmetric
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.collectives.gpu.algorithms.registry import NAMES
from mpicomm.collectives.wire import CODES, as_wire
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.ops import check_legal
from mpicomm.mpi.types import COVERED, covered_dtype

DTYPES = tuple(name for name in COVERED if name not in ("bool", "complex64", "complex128"))
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
    names = ", ".join(("auto", *NAMES, "mpi"))
    result.add_argument(
        "--algorithm", default="auto", metavar="NAME", help=f"of mpicomm's calls: {names}; default: auto"
    )
    result.add_argument(
        "--wire-dtype",
        choices=CODES,
        help="elements of mpicomm's calls travel as fp8 or int8; mpicomm-uncoded is mpicomm without it",
    )
    result.add_argument(
        "--buffers", choices=("symmetric", "ordinary", "both"), default="symmetric", help="default: symmetric"
    )
    arguments.add_compare_argument(result, PEERS)
    result.add_argument("--beside", choices=("matmul",), help="time a matrix product during calls of the largest size")
    arguments.add_file_arguments(result)
    arguments.add_communicator_arguments(result)
    return result


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
    if options.beside and comm.device != "cpu" and TorchSymmetric.missing():
        raise InvalidUsageError(f"--beside needs PyTorch: {TorchSymmetric.missing()}, or leave it out")
    barrier = OPERATIONS[options.collective] is BARRIER
    on_host = comm.device == "cpu"
    for refused, why in (
        (barrier and options.algorithm != "auto", "--algorithm is not for the barrier, which has one way"),
        (barrier and options.vary, "--vary is not for the barrier, which has no sizes to vary"),
        (on_host and options.eager, "--eager is for GPUs: on the host all calls are timed without graphs"),
        (on_host and options.beside, "--beside is for GPUs: on the host no product runs beside a call"),
    ):
        if refused:
            raise InvalidUsageError(f"{why}: leave it out")
