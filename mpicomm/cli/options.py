"""Command lines on ranks: rank 0 reads the options and prints, and all ranks end together."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mpi4py import MPI
from rich.progress import track

import mpicomm
from mpicomm import environment
from mpicomm.api.communicator import Communicator, RankInfo
from mpicomm.cli import arguments
from mpicomm.cluster.process import end_job_if_uncaught
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.sizes import format_size
from mpicomm.waiting import wait_until

T = TypeVar("T")

_GRACE_S = 0.5  # in which all other ranks raise, too


def run(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` on every rank and exit with the status that it returns.

    If all ranks raise an error together (a wrong argument, memory that cannot be shared), rank 0 prints it once. If
    only some ranks raise an error, each prints it with its traceback, and it ends the whole job.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C ends the process, as in a program without a handler: quietly, and the shell and mpiexec see the reason.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    private = MPI.COMM_WORLD.Dup()
    end_job_if_uncaught()
    try:
        status = main()
    except Exception as error:
        if not isinstance(error, MpicommError) or not wait_until(private.Ibarrier().Test, _GRACE_S):
            sys.stderr.write(f"mpicomm: rank {private.rank} on {socket.gethostname()} failed\n")
            raise
        if private.rank == 0:
            sys.stderr.write(f"error: {error}\n")
        status = 2 if isinstance(error, InvalidUsageError) else 1
    sys.exit(status)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line on rank 0 for all ranks, so that help and errors appear once. Collective."""
    outcome: Any = None
    if MPI.COMM_WORLD.rank == 0:
        try:
            outcome = parser.parse_args()
        except SystemExit as stop:
            outcome = stop.code
        sys.stdout.flush()
    outcome = MPI.COMM_WORLD.bcast(outcome)
    if isinstance(outcome, argparse.Namespace):
        return outcome
    sys.exit(outcome)


class Run:
    """A measurement on all ranks: its options, a communicator, and the descriptions of the ranks.

    Its creation is collective. Raises `InvalidUsageError`, on all ranks, if they are on several nodes and must be on
    ``one_node``.
    """

    def __init__(self, parser: argparse.ArgumentParser, *, one_node: bool = False) -> None:
        self.options = parse_args(parser)
        self.comm = comm = Communicator(device=self.options.device, handle=self.options.handle)
        if one_node and comm.num_nodes > 1:
            nodes = f"these {comm.size} ranks are on {comm.num_nodes} nodes"
            raise InvalidUsageError(f"this command needs mapped memory; {nodes}: start them on one")
        self.ranks: list[RankInfo] = comm.allgather(comm.describe())

    def swept_sizes(self) -> list[int]:
        """Return the sizes that the options ask for, with the largest one if the steps reach it.

        Sets ``options.maxbytes`` if the user named no largest size. Raises `InvalidUsageError` if there is no size.
        """
        options = self.options
        if options.maxbytes is None:
            options.maxbytes = max(options.minbytes, 64 << 20 if self.comm.device == "cpu" else 1 << 30)
        found, nbytes = [], options.minbytes
        while nbytes <= options.maxbytes:
            found.append(nbytes)
            nbytes *= options.stepfactor
        if not found:
            bounds = f"-b {format_size(options.minbytes)} is above -e {format_size(options.maxbytes)}"
            raise InvalidUsageError(f"no size to measure: {bounds}: pass a larger -e")
        return found

    def print_header(self, title: str, *lines: str) -> None:
        """Print the command, the ranks with their devices, the handle, and ``lines``."""
        ranks, handle = self.ranks, self.ranks[0].handle
        count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
        hosts = ", ".join(sorted({info.host for info in ranks}))
        header = [f"mpicomm {mpicomm.__version__} {title}: {count} on {hosts} ({arguments.processor()})"]
        for info in ranks:
            device = f"{info.device:>2} [{info.pci_bus_id}] {info.device_name}" if info.pci_bus_id else info.device
            header.append(f" Rank {info.rank:>2} Pid {info.pid:>6} on {info.host} device {device}")
        if environment.handle(self.options.handle) != "auto":
            why = "as asked for"
        elif ranks[0].rejected:
            why = "; ".join(f"not {kind}: {reason}" for kind, reason in ranks[0].rejected.items())
        else:
            why = "the best for this device"
        show(*(f"# {line}".rstrip() for line in (*header, f"handle: {handle} ({why})", *lines)))

    def finish(self, document: dict[str, Any], wrong: int, close: Callable[[], object] = lambda: None) -> int:
        """Save the results, call ``close``, free the communicator, and print on rank 0 how it ended. Collective.

        Return the exit code. ``wrong`` counts the errors on all ranks.
        """
        options = {name: str(given) if isinstance(given, Path) else given for name, given in vars(self.options).items()}
        setting = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "options": options,
            "processor": arguments.processor(),
            "versions": arguments.versions(),
            "ranks": [rank_record(info) for info in self.ranks],
            "handle": self.ranks[0].handle,
        }
        if self.options.json is not None:
            save(self.options.json, {**setting, **document, "wrong": wrong, "ok": wrong == 0})
        close()  # after the results are saved, because a library may end the process here
        self.comm.Free()
        show("# OK" if wrong == 0 else f"# FAILED: {wrong} wrong")
        return int(wrong > 0)


def on_first_rank(comm: MPI.Intracomm, make: Callable[[], T]) -> T:
    """Return the result of ``make`` on rank 0, on all ranks. If it fails, all ranks raise the error. Collective.

    The error of another library becomes a RuntimeError, because its class may not go through MPI.
    """
    made: Any = None
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            made = make()
        except Exception as error:  # another library may raise any class
            known = isinstance(error, MpicommError)
            failure = error if known else RuntimeError(f"{type(error).__name__}: {error}")
    result, failure = comm.bcast((made, failure))
    if failure is not None:
        raise failure
    checked: T = result
    return checked


def save(path: Path | str, document: object) -> None:
    """Write JSON on rank 0 to a file, or to standard output ("-"). Collective.

    All ranks raise `InvalidUsageError` if that fails.
    """
    if path == "-":
        show(json.dumps(document, indent=2))
    else:
        on_first_rank(MPI.COMM_WORLD, lambda: arguments.write_json(Path(path), document))


def show(*lines: str) -> None:
    """Print lines on rank 0."""
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def tracked(items: Sequence[T], what: str) -> Iterable[T]:
    """Yield the items. If rank 0 has a terminal, it shows the progress meanwhile, with lines of `show` above."""
    return track(items, what, transient=True, disable=MPI.COMM_WORLD.rank != 0 or not sys.stdout.isatty())


def rank_record(info: RankInfo) -> dict[str, Any]:
    """Return the record of a rank and its links, for a JSON report."""
    is_gpu = any(info.device_uuid)  # then its UUID is as nvidia-smi writes it
    device_uuid = f"GPU-{uuid.UUID(bytes=info.device_uuid)}" if is_gpu else None
    return {**dataclasses.asdict(info), "device_uuid": device_uuid}
