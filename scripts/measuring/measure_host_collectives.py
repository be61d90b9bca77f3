"""Measure MPI against mapped memory on host arrays.

Run `mpiexec -n N python scripts/measuring/measure_host_collectives.py`. MPI and the algorithms of the host engine take
turns for each collective and size. Times are milliseconds: the slowest rank's median of the rounds. Beside each time
stands MPI's time divided by it. Sizes are sizes of a rank's largest buffer. Each line also has a plain np.copyto of as
many bytes on all ranks at once, because no collective is faster than the memory.

``--slots 512x4,1024x4`` compares KiB per slot x slots; ``--kib 256,1024`` picks sizes; ``--only Allreduce`` picks
collectives. ``--json FILE`` adds the rows to a result file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
from in_turns import in_turns
from mpi4py import MPI
from result_file import Sheet, measuring_parser

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.engine import SLOT_NBYTES, SLOTS, HostEngine
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.sharing.segments import Shared

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
WAYS = ("one_shot", "two_shot")
"""The algorithms to measure, of those that a collective has."""
NAMES = (
    *("Allreduce", "Reduce", "Reduce_scatter_block", "Scan", "Exscan"),
    *("Allgather", "Gather", "Scatter", "Alltoall", "Bcast"),
)
Ways = dict[str, Callable[[], object]]
Array = npt.NDArray[np.float32]


def arguments_of(operation: Operation, send: Array, out: Array) -> Arguments:
    """Return the arguments of a call whose largest buffer is as long as these arrays."""
    block = send.size // SIZE
    if operation.rooted == "bcast":
        return Arguments(receive=send if RANK == 0 else out)
    if (operation.send, operation.receive) == ("one", "blocks"):
        send = send[:block]
    if (operation.send, operation.receive) == ("blocks", "one"):
        out = out[:block]
    return Arguments(send, out, MPI.SUM if operation.reduces else None)


def by_mpi(operation: Operation, arguments: Arguments) -> Callable[[], object]:
    """Return MPI's call."""
    return partial(getattr(WORLD, operation.name), *operation.passed(arguments))


def by_engine(engine: HostEngine, operation: Operation, arguments: Arguments, way: str) -> Callable[[], object]:
    """Return the call through mapped memory by the algorithm ``way``."""
    call = Call(operation, arguments, RANK, SIZE, way)
    signature = call.signature
    scratch = np.empty(call.blocks.nbytes, np.uint8)
    return lambda: engine.run(selection.schedule(call, way, scratch.ctypes.data), signature)


def compare(name: str, nbytes: int, engines: dict[str, HostEngine], rounds: int) -> dict[str, float]:
    """Measure one collective at one size, check that all ways agree, and return the milliseconds of each way."""
    operation, rng = OPERATIONS[name], np.random.default_rng(RANK)
    # Sums of such values are exact, so MPI's order of additions gives the same bits.
    send = rng.integers(-8, 8, nbytes // 4 // SIZE * SIZE).astype(np.float32)
    results = {"MPI": np.zeros_like(send)}
    ways: Ways = {"MPI": by_mpi(operation, arguments_of(operation, send, results["MPI"]))}
    for label, engine in engines.items():
        for way in WAYS:
            if way in selection.algorithms_for(operation):
                result = results[f"{way} {label}".strip()] = np.zeros_like(send)
                arguments = arguments_of(operation, send, result)
                ways[f"{way} {label}".strip()] = by_engine(engine, operation, arguments, way)
    scratch = np.zeros_like(send)
    ways["np.copyto"] = lambda: np.copyto(scratch, send)
    times = {way: 1e3 * seconds for way, seconds in in_turns(ways, rounds).items()}
    same = all(np.array_equal(result, results["MPI"]) for result in results.values())
    if not WORLD.allreduce(same, MPI.LAND):
        raise SystemExit(f"{name}: MPI and mapped memory returned different values")
    return times


def main() -> None:
    """Measure and print on rank 0."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--kib", default="16,64,256,1024,4096,16384,65536")
    parser.add_argument("--slots", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    node = Group(WORLD.Dup(), range(SIZE), 30.0)
    call_log = CallLog(node)
    pairs = [pair.split("x") for pair in options.slots.split(",") if pair]
    shapes = {f"{kib}Kx{slots}": (int(kib) << 10, int(slots)) for kib, slots in pairs} or {"": (SLOT_NBYTES, SLOTS)}
    engines = {
        label: HostEngine(node, call_log, slot_nbytes=nbytes, slots=slots) for label, (nbytes, slots) in shapes.items()
    }
    columns = ["collective", "size", "way", "this way, ms", "MPI, ms", "MPI's time by this way's"]
    title = f"Collectives on host arrays through mapped memory, {SIZE} ranks"
    text = "`np.copyto` copies as many bytes on all ranks at once."
    with Sheet(WORLD, options, title, columns, digits=3, text=text) as sheet:
        for name in options.only.split(",") if options.only else NAMES:
            for kib in options.kib.split(","):
                nbytes = int(kib) << 10
                rounds = options.rounds if nbytes > 1 << 20 else 5 * options.rounds
                times = compare(name, nbytes, engines, rounds)
                for way, each in times.items():
                    if way != "MPI":
                        sheet.add(name, f"{kib} KiB", way, each, times["MPI"], times["MPI"] / each)
    parts: list[Shared] = [*engines.values(), call_log]
    for part in parts:
        part.close_peers()
        node.barrier("close")
        part.close_own()


main()
