"""`mpirun -np N python -m mpicomm PROGRAM` runs a program that knows only mpi4py on a Communicator."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from mpi4py import run

from mpicomm import environment

USAGE = """usage: mpirun -np N python -m mpicomm [--stream-order] SCRIPT [ARGUMENT ...]
   or: mpirun -np N python -m mpicomm [--stream-order] -m MODULE [ARGUMENT ...]
   or: mpirun -np N python -m mpicomm [--stream-order] -c CODE [ARGUMENT ...]

Runs a program that knows only mpi4py: MPI.COMM_WORLD, and every communicator made from it, is an mpicomm.Communicator,
so that its upper-case methods take GPU arrays. Blocking calls on GPU arrays are complete on return, as in a CUDA-aware
MPI. An exception that a rank does not catch ends the job, as with python -m mpi4py. MPICOMM_DEVICE, MPICOMM_HANDLE and
MPICOMM_TIMEOUT stand for the arguments of Communicator.

  --stream-order return from calls on GPU arrays when they are enqueued (or MPICOMM_ORDER=stream)
  -h, --help     print this text
  --version      print the version

Tools, each with --help: python -m mpicomm.info, .doctor, .bench, .tune, .p2p, .ring, .trace
"""
_TOOLS = ("info", "doctor", "bench", "tune", "p2p", "ring", "trace")
_HELP = "see python -m mpicomm --help"


def main(arguments: list[str]) -> int:
    """Run the program that the arguments name; return the exit code of an information or an error."""
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    if first == "--version":
        from mpicomm import __version__

        sys.stdout.write(f"mpicomm {__version__}\n")
        return 0
    stream_order = True if first == "--stream-order" else None
    if stream_order:
        del sys.argv[1]  # mpi4py's runner reads the rest
        arguments = arguments[1:]
    fault = _usage_error(arguments)
    if fault:
        if environment.local_id() == 0:
            sys.stderr.write(f"mpicomm: {fault}\n")
        return 2
    try:
        from mpicomm.world import install

        install(stream_order=stream_order)
    except BaseException:
        run.set_abort_status(1)  # as for an exception of the program: the other ranks must not wait for this rank
        raise
    run.main()
    return 0


def _usage_error(arguments: list[str]) -> str:
    """Return why the arguments name no program, and the way out, or ""."""
    if not arguments:
        return f"no program is named: {_HELP}"
    first = arguments[0]
    if first in ("-m", "-c") and len(arguments) == 1:
        return f"{first} needs an argument: {_HELP}"
    if first == "-m":
        exists = _module_exists(arguments[1])
        return "" if exists else f"there is no module {arguments[1]!r} on the path of this Python: correct the name"
    if first.startswith("-"):
        return "" if first in ("-c", "-") else f"unknown option {first}: {_HELP}"
    tool = f", or start the tool by python -m mpicomm.{first}" if first in _TOOLS else ""
    return "" if Path(first).exists() else f"there is no file {first!r}: name the file of a program{tool}"


def _module_exists(module: str) -> bool:
    """Return whether a module can be found, without an import: the program imports its packages after `install`."""
    package, *names = module.split(".")
    spec = find_spec(package) if package else None
    for name in names:
        path = None if spec is None else spec.submodule_search_locations
        package = f"{package}.{name}"
        spec = None if path is None else PathFinder.find_spec(package, path)
    return spec is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
