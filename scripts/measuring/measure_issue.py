"""Measure how long a call holds the host: `mpiexec -n N python scripts/measuring/measure_issue.py [--json FILE]`.

A *known* call is the same each time. A *new* call has another size than all calls before, between half of ``--kib`` and
``--kib``, and other addresses. If the ranks have counts, the counts of a new call are other counts. A Communicator
makes the calls of arrays, and NCCL's C functions make them with arguments that are converted before.
`torch.distributed` makes calls of groups of the backends mpicomm and NCCL in one job.

Times are microseconds. mpicomm and its peer take turns in ``ROUNDS`` rounds, which share the ``--calls`` calls of each.
The time is the lowest median of a round, of the slowest rank. So another load of the machine at times does not matter.
Up to 20 calls are in flight. Then the ranks wait for the calls and for each other, outside the time. The script
compares each byte that the new calls leave. Without GPUs the arrays are NumPy's, and gloo takes NCCL's place in
`torch.distributed`. measure_torch.py times a step of DistributedDataParallel.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI
from needed import torch
from result_file import Sheet, measuring_parser
from torch import distributed as dist
from varied_arrays import FLOAT, Pools

import mpicomm
import mpicomm.torch
from mpicomm.bench.compare import Mpicomm, mpi_call, open_libraries
from mpicomm.bench.libraries import Nccl
from mpicomm.bench.measure import Call, LibraryError, collective_try, machine_of
from mpicomm.bench.operations import IN_PLACE, OPERATIONS, OUT_OF_PLACE, ROOT, Case, CaseBuffers

WORLD = MPI.COMM_WORLD
ROUNDS = 5
IN_FLIGHT = 20
WARM_UPS = 40
"""Calls before those that count: the first ones set up memory and compile kernels."""
Make = Callable[[Pools, int], Call]
"""Returns the call number so of the pools."""


@dataclass(frozen=True)
class Row:
    """A call, with the functions that make it."""

    name: str
    operation: str
    """The operation of the bench, which knows the results of the call."""
    place: str
    own: Make
    peer: Make | None = None
    known_alone: bool = False
    """Whether only known calls can be made."""


class Session:
    """The objects that the rows need: the Communicator, the groups, and the device of all arrays."""

    def __init__(self, stack: ExitStack) -> None:
        dist.init_process_group("mpicomm")
        stack.callback(dist.destroy_process_group)
        device = mpicomm.torch.communicator().device
        if device != "cpu":
            torch.cuda.set_device(device)
        self.device = torch.device("cpu" if device == "cpu" else f"cuda:{device}")
        self.comm = stack.enter_context(mpicomm.Communicator(WORLD, device=device))
        self.machine = machine_of(self.comm)
        self.peer = "gloo" if device == "cpu" else "NCCL"
        self.peer_group = dist.new_group(backend=self.peer.lower())
        self.stack = stack
        self.own_arrays = Mpicomm(self.comm, self.machine, symmetric=False, algorithm="auto")
        self.nccl = open_libraries(self.comm, self.machine, {"nccl": Nccl}, ["nccl"])[0].get("nccl")
        if self.nccl is not None:
            stack.callback(self.nccl.close)

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def host_times(calls: Iterable[Call], finish: Call) -> list[float]:
    """Return the microseconds that each call holds the host; the ranks meet after each 20 calls. Collective."""
    times = []
    clock = time.perf_counter_ns
    for number, call in enumerate(calls):
        if number % IN_FLIGHT == 0:
            finish()
            WORLD.Barrier()
        begin = clock()
        call()
        times.append((clock() - begin) / 1e3)
    finish()
    return times


def slowest(times: Sequence[float]) -> float:
    """Return the median of the slowest rank. Collective."""
    return float(WORLD.allreduce(statistics.median(times), MPI.MAX))


def measure(session: Session, pools: Pools, makes: Sequence[Make], calls: int, *, known_alone: bool) -> list[Any]:
    """Return the microseconds of a known call and of a new one by each of ``makes``. Collective.

    Exits if a call leaves wrong bytes.
    """
    number = len(makes)
    pools.reset()
    repeated = [make(pools, each) for each, make in enumerate(makes)]
    known = in_rounds(session, [repeat(call) for call in repeated], calls)
    if pools.repeatable:
        check(pools, range(number))
    if known_alone:
        return [(each, None) for each in known]
    pools.reset()
    news = range(number, number * (1 + WARM_UPS + calls))
    made = [[make(pools, each) for each in news[place::number]] for place, make in enumerate(makes)]
    new = in_rounds(session, made, calls)
    check(pools, news)
    return [*zip(known, new, strict=True)]


def in_rounds(session: Session, ways: Sequence[Iterable[Call]], calls: int) -> list[float]:
    """Return the microseconds of the calls of each way, which take turns. Collective."""
    begun = [iter(way) for way in ways]
    for each in begun:
        host_times(islice(each, WARM_UPS), session.finish)
    of_rounds = [
        [slowest(host_times(islice(each, calls // ROUNDS), session.finish)) for each in begun] for _ in range(ROUNDS)
    ]
    return [min(medians) for medians in zip(*of_rounds, strict=True)]


def check(pools: Pools, called: Iterable[int]) -> None:
    """Raise on all ranks if these calls left anything wrong. Collective."""
    wrong = WORLD.allreduce(pools.count_wrong(called))
    if wrong:
        raise ValueError(f"{pools.cases[0].operation.name} left {wrong} wrong bytes")


def array_rows(session: Session) -> list[Row]:
    """Return the calls of the Communicator."""
    comm, machine = session.comm, session.machine

    def of_peer(peer: Any, pools: Pools, number: int) -> Call:
        call: Call = peer.prepare(pools.cases[number], pools.arrays(number))[""]
        return call

    def of_tensors(pools: Pools, number: int) -> Call:
        place = pools.tensors(number)
        viewed = (None if part is None else SimpleNamespace(view=partial(_same, part)) for part in _parts(place))
        return mpi_call(comm, pools.cases[number], CaseBuffers(*viewed), {})

    def nonblocking(pools: Pools, number: int) -> Call:
        send, receive = (part.view(FLOAT) for part in _parts(pools.arrays(number)))
        return lambda: comm.Iallreduce(send, receive, stream=machine.stream).Wait()

    def persistent(pools: Pools, number: int) -> Call:
        send, receive = (part.view(FLOAT) for part in _parts(pools.arrays(number)))
        request = comm.Allreduce_init(send, receive, stream=machine.stream)
        session.stack.callback(request.Free)

        def run() -> None:
            request.Start()
            request.Wait()

        return run

    def counted(pools: Pools, number: int) -> Call:
        import cupy

        send, receive = (part.view(FLOAT) for part in _parts(pools.arrays(number)))
        case = pools.cases[number]
        counts, coming = cupy.asarray(case.sent()[0]), cupy.zeros(WORLD.size, np.int64)
        return lambda: comm.Alltoallv([send, counts], [receive, coming], stream=machine.stream)

    own = partial(of_peer, session.own_arrays)
    nccl = partial(of_peer, session.nccl) if session.nccl is not None else None
    names = ("allreduce", "allgather", "reduce_scatter", "alltoall", "bcast", "reduce", "gather", "scatter")
    titles = {name: OPERATIONS[name].collective.name for name in (*names, "alltoallv", "allgatherv")}  # type: ignore[union-attr]
    arrays = "NumPy arrays" if machine.stream is None else "CuPy arrays"
    rows = [Row(f"`{title}`, {arrays}", name, OPERATIONS[name].places[0], own, nccl) for name, title in titles.items()]
    rows += [
        Row(f"`Sendrecv` that MPI matches, {arrays}", "sendrecv", OUT_OF_PLACE, own, nccl),
        Row(f"`Iallreduce` and `Wait`, {arrays}", "allreduce", OUT_OF_PLACE, nonblocking),
        Row(f"persistent `Start` and `Wait`, {arrays}", "allreduce", OUT_OF_PLACE, persistent, known_alone=True),
    ]
    if machine.stream is not None:
        rows.append(Row("`Alltoallv` with counts on the GPU, CuPy arrays", "alltoallv", OUT_OF_PLACE, counted))
    rows += [Row(f"`{titles[name]}`, tensors", name, OPERATIONS[name].places[0], of_tensors) for name in titles]
    return rows


def torch_rows(session: Session) -> list[Row]:
    """Return the calls of `torch.distributed`, blocking, and with ``async_op=True`` and a wait right after it."""

    def all_reduce(case: Case, place: CaseBuffers, **options: Any) -> Any:
        return partial(dist.all_reduce, place.send, **options)

    def broadcast(case: Case, place: CaseBuffers, **options: Any) -> Any:
        return partial(dist.broadcast, place.send, src=ROOT, **options)

    def into(function: Callable[..., Any], case: Case, place: CaseBuffers, **options: Any) -> Any:
        return partial(function, place.receive, place.send, **options)

    def splits(case: Case, place: CaseBuffers, **options: Any) -> Any:
        sent, received = case.sent()[0], case.received()[0]
        send, receive = place.send[: sum(sent)], place.receive[: sum(received)]
        return partial(dist.all_to_all_single, receive, send, received, sent, **options)

    def make(call: Callable[..., Any], group: Any, begun: bool, pools: Pools, number: int) -> Call:
        ready = call(pools.cases[number], pools.tensors(number), group=group, async_op=begun)
        return (lambda: ready().wait()) if begun else ready

    # PyTorch 2.14 has other names for two of them, and takes microseconds to warn of the old ones.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, tuple[str, str, Callable[..., Any]]] = {
        "`dist.all_reduce`": ("allreduce", IN_PLACE, all_reduce),
        f"`dist.{gather.__name__}`": ("allgather", OUT_OF_PLACE, partial(into, gather)),
        f"`dist.{scatter.__name__}`": ("reduce_scatter", OUT_OF_PLACE, partial(into, scatter)),
        "`dist.all_to_all_single`": ("alltoall", OUT_OF_PLACE, partial(into, dist.all_to_all_single)),
        "`dist.all_to_all_single` with splits": ("alltoallv", OUT_OF_PLACE, splits),
        "`dist.broadcast`": ("bcast", IN_PLACE, broadcast),
    }
    own, peer = dist.group.WORLD, session.peer_group
    return [
        Row(
            f"{name}, `async_op=True` and `wait`" if begun else name,
            operation,
            place,
            partial(make, call, own, begun),
            partial(make, call, peer, begun),
        )
        for begun in (False, True)
        for name, (operation, place, call) in calls.items()
    ]


def _parts(place: CaseBuffers) -> tuple[Any, Any]:
    return place.send, place.receive


def _same(tensor: Any, dtype: Any) -> Any:
    return tensor


def run_row(session: Session, row: Row, nbytes: int, calls: int) -> list[Any]:
    """Measure a row. Collective. A peer that fails on all ranks has no times."""
    makes = [row.own] if row.peer is None else [row.own, row.peer]
    pools = Pools(
        OPERATIONS[row.operation], row.place, nbytes, len(makes) * (1 + WARM_UPS + calls), WORLD.rank, WORLD.size
    )
    pools.put(session.device)
    if row.peer is not None:
        try:
            collective_try(session.comm, row.peer(pools, 0))
        except LibraryError as failure:
            if WORLD.rank == 0:
                sys.stdout.write(f"{session.peer}: {failure}\n")
            makes.pop()
    times = measure(session, pools, makes, calls, known_alone=row.known_alone)
    session.comm.check()
    (own_known, own_new), (peer_known, peer_new) = [*times, (None, None)][:2]
    return [row.name, own_known, peer_known, own_new, peer_new]


def main() -> None:
    """Measure, and print each row on rank 0."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--kib", type=int, default=64, help="of the largest buffer of a rank; default: 64")
    parser.add_argument("--calls", type=int, default=200, help="that count; default: 200")
    parser.add_argument("--only", default="", help="rows whose names have one of these texts, as in Alltoallv,dist.")
    options = parser.parse_args()
    if options.calls < ROUNDS:
        parser.error(f"--calls={options.calls}: at least one for each of {ROUNDS} rounds")
    torch.set_num_threads(1)  # of each rank, because the ranks share the cores
    with ExitStack() as stack:
        session = Session(stack)
        columns = ["call", *(f"{what}: {who}, us" for what in ("known", "new") for who in ("mpicomm", session.peer))]
        software = {"torch": torch.__version__}
        if session.nccl is not None:
            software |= {"NCCL": session.nccl.version, "NCCL of torch": ".".join(map(str, torch.cuda.nccl.version()))}
        title = f"The host's time in a call, known and new, {WORLD.size} ranks, {options.kib} KiB"
        text = (
            f"mpicomm and its peer take turns in {ROUNDS} rounds of {options.calls // ROUNDS} calls. Times are the "
            "lowest medians of a round, of the slowest rank. A known call is the same each time. A new "
            f"call has another size, above {options.kib / 2:g} KiB, other addresses, and other counts if the ranks "
            "have counts. NCCL's calls of arrays are its C functions, and their arguments are converted before."
        )
        with Sheet(session.comm, options, title, columns, digits=1, text=text, versions=software) as sheet:
            for row in (*array_rows(session), *torch_rows(session)):
                if any(each in row.name for each in options.only.split(",")):
                    sheet.add(*run_row(session, row, options.kib << 10, options.calls))


main()
