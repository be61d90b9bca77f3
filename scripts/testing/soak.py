"""Random calls for a long time: `mpiexec -n N python scripts/testing/soak.py --seconds 3600`, from the project's root.

Each round makes new communicators and streams. It calls random collectives (blocking, nonblocking and persistent, of
all types and sizes), puts, gets, signals, messages, calls on windows and registrations. On GPUs it also replays graphs
of collectives, and calls collectives on arrays large enough for copy engines. The script checks all results; kernels
check the results of graphs. It prints the number and the rate of its calls, and the growth of the process since the
first tenth of the time. It exits with 1 if a result is wrong or a resource grows.

``--repeat N`` begins again with the first round after N rounds, and measures growth from the end of two times N rounds.
By then a device holds the code of all kernels, about 60 MiB, so that the code does not count as growth.

``--communicators 10000`` and ``--registrations 100000`` make and free so many instead. ``--late 10000`` makes so many
calls on arrays of 4 to 240 MiB; before half of them each rank's GPU idles for a random time. ``--device cpu|auto``
picks the device. With ``--hosts N`` the ranks claim to be on N hosts. ``--json FILE`` adds a row to a result file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

from soak_rounds import MIB, WORLD, Soak

from mpicomm.cli.arguments import output_file
from mpicomm.cli.options import rank_record
from tests.helpers.rigs.communicators import array_module, communicator

sys.path.append(str(Path(__file__).parents[1] / "measuring"))
from result_file import LONG_RUNS, Table, add_tables, hardware, today

SETTLED_S = 0.3  # after that time the threads that complete requests have ended
Rounds = Iterator[tuple[float, Callable[[], object]]]
"""The share of all work that is done before a round, and the work of the round."""
# The allocators of Python, NumPy and MPI keep fragments of memory, so memory may grow by this much.
ALLOWED = {"descriptors": 0, "mappings": 0, "threads": 0, "MiB of memory": 24, "MiB of device memory": 64}


def resources(soak: Soak) -> dict[str, int]:
    """Return the resources of this process, and this rank's share of the memory in use on its device. Collective."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)  # now and then glibc keeps tens of MiB of freed memory, and they are no growth
    maps = Path("/proc/self/maps").read_text().splitlines()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = 0
    if soak.device != "cpu":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()
        WORLD.Barrier()  # before it, another rank on the device may still hold blocks of its pools
        free, total = cupy.cuda.runtime.memGetInfo()
        WORLD.Barrier()  # after it another rank may allocate again
        used = total - free
    return {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "mappings": sum("/memfd:mpicomm" in line or "/psm_" in line for line in maps),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "MiB of memory": pages * os.sysconf("SC_PAGESIZE") // MIB,
        "MiB of device memory": used // soak.sharing // MIB,
    }


def settled_resources(soak: Soak) -> dict[str, int]:
    """Return the `resources` when all ranks have come and the threads of their requests have ended. Collective."""
    WORLD.Barrier()
    time.sleep(SETTLED_S)
    return resources(soak)


def main() -> None:
    """Run, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--communicators", type=int, default=0)
    parser.add_argument("--registrations", type=int, default=0)
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1, help="the hosts that the ranks claim to be on")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    if options.hosts > 1:
        os.environ["MPICOMM_HOSTID"] = f"host{WORLD.rank * options.hosts // WORLD.size}"
        os.environ.setdefault("NCCL_HOSTID", f"rank{WORLD.rank}")  # NCCL takes no two ranks of a host on one GPU
    resource_tracker.ensure_running()  # started later, its descriptor would count as growth
    soak = Soak(options.device, options.seed)
    if options.late and soak.device == "cpu":
        parser.error("--late is for GPUs, and these ranks have none: leave it out")
    if options.communicators:
        run(soak, _parts(options.communicators, soak.communicators), "communicators made and freed", options.json)
    elif options.late:
        what = "collectives of 4 to 240 MiB, each rank's GPU late at random before half of them"
        run(soak, _parts(options.late, soak.late), what, options.json)
    elif options.registrations:
        with communicator(options.device) as comm, array_module(comm) as xp:
            rounds = _parts(options.registrations, lambda cycles: soak.register(comm, xp, cycles))
            run(soak, rounds, "memory registered and closed", options.json)
    else:
        what = "random calls on new communicators each round"
        if options.hosts > 1:
            what += f", ranks that claim to be on {options.hosts} hosts"
        if options.repeat:
            what += f", the same {options.repeat} rounds again and again"
        run(soak, _timed(soak, options.seconds, options.repeat), what, options.json)


def run(soak: Soak, rounds: Rounds, what: str, file: Path | None) -> None:
    """Run all rounds and print the outcome. Exit with 1 if a resource has grown since the first tenth."""
    before: dict[str, int] = {}
    start, shown = time.monotonic(), 0.0
    for share, work in rounds:
        if share >= 0.1 and not before:
            before = settled_resources(soak)
        work()
        if share >= shown:
            shown += 0.1
            most = _most(resources(soak))
            if WORLD.rank == 0:
                elapsed = f"{time.monotonic() - start:8.0f} s"
                sys.stdout.write(f"{elapsed}  {dict(soak.done)}, at most on any rank: {most}\n")
                sys.stdout.flush()
    seconds = time.monotonic() - start
    after = settled_resources(soak)
    growth = {name: after[name] - before[name] for name in after}
    most = _most(growth)
    if WORLD.rank == 0:
        rates = {name: f"{count} ({count / seconds:.1f}/s)" for name, count in soak.done.items()}
        sys.stdout.write(f"{seconds:.0f} s on {WORLD.size} ranks, device {soak.device}: {rates}\n")
        sys.stdout.write(f"all results are right; grown by, at most on any rank: {most}\n")
    if any(most[name] > ALLOWED[name] for name in most):
        sys.stdout.write(f"rank {WORLD.rank} has grown: {growth}\n")
        sys.exit(1)
    if file is not None:
        _record(file, soak, f"{what}; {WORLD.size} ranks, {seconds:.0f} s", most)


def _record(file: Path, soak: Soak, what: str, growth: dict[str, int]) -> None:
    """Add the row of a run to a result file. Collective."""
    with communicator("cpu" if soak.device == "cpu" else "auto") as comm:
        ranks = WORLD.gather({**rank_record(comm.describe()), "node": 0})  # other hosts are claimed
    if ranks is None:
        return
    done = ", ".join(f"{count:,} {name}" for name, count in soak.done.items())
    if soak.device == "cpu":
        del growth["MiB of device memory"]
    same = ", ".join(name.removeprefix("MiB of ") for name, more in growth.items() if more <= 0)
    parts = ["no wrong bit", *([f"no growth in {same}"] if same else [])]
    parts += [f"{more} {name} more" for name, more in growth.items() if more > 0]
    row = [what, today(), done, "; ".join(parts)]
    where = hardware(ranks)
    title = "Long runs on the host" if soak.device == "cpu" else "Long runs on GPUs"
    add_tables(file, [Table("Reliability", title, where, LONG_RUNS, [row])])


def _most(mine: dict[str, int]) -> dict[str, int]:
    """Return the largest number of each resource on any rank. Collective."""
    everybody = WORLD.allgather(mine)
    return {name: max(each[name] for each in everybody) for name in mine}


def _timed(soak: Soak, seconds: float, repeat: int) -> Rounds:
    """Yield rounds until the time is over: the same number on all ranks, at least two and three times ``repeat``."""
    start = time.monotonic()
    number, share, least = 0, 0.0, max(2, 3 * repeat)
    while share < 1 or number < least:
        which = number % repeat if repeat else number
        # Before 2 * repeat rounds `run` hears of a share below a tenth, so that it does not measure growth from there.
        settled = number >= 2 * repeat
        yield share if settled else min(share, 0.09), lambda which=which: soak.round(which)  # type: ignore[misc]
        number += 1
        share = WORLD.bcast((time.monotonic() - start) / seconds)


def _parts(count: int, work: Callable[[int], object]) -> Rounds:
    """Yield the same work in twenty parts."""
    for part in range(20):
        cycles = (part + 1) * count // 20 - part * count // 20
        yield part / 20, lambda cycles=cycles: work(cycles)  # type: ignore[misc]


if __name__ == "__main__":
    main()
