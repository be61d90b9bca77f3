"""``python -m mpicomm.p2p``: the speed of writes and reads of other GPUs' memory, or of other ranks' memory."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from itertools import chain
from typing import NoReturn

import mpicomm
from mpicomm.cli import arguments, machine
from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.driver import NoGpuError, visible_devices
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.p2p.report import NBYTES_ON_GPUS, ending, link_matrices, parser, record, report

# Functions import the modules that load MPI or CuPy, if they need them.


def main() -> NoReturn:
    """Run the command line on all ranks of a job, or in only this process, without MPI."""
    if machine.launch_of(os.environ).size > 1:
        from mpicomm.cli import options as command_line
        from mpicomm.p2p import between_ranks

        command_line.run(between_ranks.main)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends the process without a traceback
    try:
        sys.exit(_in_one_process(parser().parse_args()))
    except MpicommError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2 if isinstance(error, InvalidUsageError) else 1)


def _in_one_process(options: argparse.Namespace) -> int:
    for name in ("device", "handle"):
        if getattr(options, name) != "auto":
            raise InvalidUsageError(
                f"--{name} is for ranks: start them with mpirun -np N python -m mpicomm.p2p, or leave --{name} out"
            )
    options.bytes = options.bytes or NBYTES_ON_GPUS
    wrong, matrices = 0, []
    devices: list[DeviceInfo] = []
    host = f"{socket.gethostname()} ({machine.processor()})"
    try:
        devices = visible_devices()
    except NoGpuError as error:
        sys.stdout.write(f"no GPU to measure on {host}: {error}\n")
    if devices:
        from mpicomm.p2p.one_process import OneProcess

        count = "1 GPU" if len(devices) == 1 else f"{len(devices)} GPUs"
        lines = [f"mpicomm {mpicomm.__version__} p2p: {count} on {host}"]
        lines += [f" GPU {each.ordinal:>2} [{each.pci_bus_id}] {each.name}" for each in devices]
        job = OneProcess(devices, options)
        matrices = report("GPU", lines, chain(link_matrices(job.links), job.matrices()))
        wrong = job.wrong
    if options.json:
        gpus = [
            {"ordinal": each.ordinal, "name": each.name, "uuid": machine.format_uuid(each.uuid), "pci": each.pci_bus_id}
            for each in devices
        ]
        arguments.write_json(options.json, {**machine.run_record(options), "gpus": gpus, **record(matrices, wrong)})
    if devices:
        sys.stdout.write("".join(f"{line}\n" for line in ending(wrong)))
    return int(wrong > 0)


if __name__ == "__main__":
    main()
