"""Measure strided exchanges beside flat ones: `mpirun -np 2 python -m mpi4py scripts/measuring/measure_strided.py`.

An array that is split along its first axis becomes an array that is split along its second axis, and the other way.
An Alltoallw of subarrays does so, into an ordinary and into a symmetric array, and so does a plan of `redistribution`.
Beside them stand an Alltoall of as many bytes, and a copy into packed memory by the array library with an Alltoall
after it. The second table has the halos of a field: a Neighbor_alltoallw of rows or columns, and two Sendrecvs with
copies before and after them. In a ring of two ranks each is the other's neighbour twice. The third table has
collectives of groups of columns beside the same collectives of as many consecutive bytes.

On GPUs CUDA graphs of calls run twice, and events time the second run. Without GPUs the clock times the calls. Before
each run the results are poison, and after it the script compares each byte. ``--divide`` makes the arrays smaller.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI
from result_file import Sheet, measuring_parser

import mpicomm
from mpicomm.bench.measure import Call, Machine, machine_of
from mpicomm.collectives.operations import OPERATIONS

WORLD = MPI.COMM_WORLD
EXCHANGES: tuple[tuple[tuple[int, ...], str], ...] = (
    ((64, 64, 64), "complex64"),
    ((256, 256, 256), "complex64"),
    ((512, 512, 512), "complex64"),
    ((512, 512, 512), "complex128"),
    ((2048, 4096, 16), "float32"),
    ((8192, 8192), "float32"),
)
HALO = 4096
"""Rows and columns of the field whose halos are exchanged."""
GROUPS = ((1 << 13, 1), (1 << 14, 64), (1 << 17, 64))
"""The rows of a matrix of float64, and the columns of each rank in it."""
ROUNDS, WARM_UPS, IN_FLIGHT = 7, 30, 20
LARGE = 64 << 20
POISON = 0xA5


@dataclass
class Runs:
    """Times calls on one machine, and compares what they leave."""

    comm: mpicomm.Communicator
    machine: Machine

    def time_us(self, name: str, call: Call, nbytes: int, result: Any = None, expected: Any = None) -> float:
        """Return the microseconds of a call; exit if ``result`` differs from ``expected``. Collective."""
        machine, count = self.machine, IN_FLIGHT if nbytes < LARGE else 5
        with machine.current():
            for _ in range(WARM_UPS):
                call()
            graph = machine.capture(call, count)
            if result is not None:
                bytes_of(result)[...] = POISON
            self.meet()  # no peer stores into a result before it is poison
            if graph is None:
                call()
            else:
                machine.launch(graph)
            machine.finish()
            if result is not None and WORLD.allreduce(not bool((bytes_of(result) == bytes_of(expected)).all())):
                sys.exit(f"{name} left wrong bytes")
            times = []
            for _ in range(ROUNDS):
                self.meet()
                timed = machine.time_calls(call, count) if graph is None else machine.time_graph(graph)
                times.append(timed.complete)
            self.meet()
        return 1e6 * slowest(times)

    def issue_us(self, call: Call) -> float:
        """Return the microseconds for which a known call holds the host. Collective."""
        times = []
        with self.machine.current():
            for _ in range(2 * ROUNDS):
                self.meet()
                times.append(self.machine.time_calls(call, IN_FLIGHT))
        return 1e6 * slowest([each.issue or each.complete for each in times[ROUNDS:]])

    def meet(self) -> None:
        """Wait for the device and for the other ranks."""
        self.machine.finish()
        WORLD.Barrier()


def slowest(times: Sequence[float]) -> float:
    """Return the median of the slowest rank. Collective."""
    return float(WORLD.allreduce(statistics.median(times), MPI.MAX))


def bytes_of(array: Any) -> Any:
    """Return the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def content(xp: Any, shape: Sequence[int], dtype: str, box: Sequence[slice]) -> Any:
    """Return the elements of the whole array in ``box``. Each of their words tells where in the array it lies."""
    words = np.dtype(dtype).itemsize // 4
    index = xp.arange(words, dtype=np.uint32)
    for axis, part in enumerate(box):
        places = xp.arange(part.start, part.stop, dtype=np.uint32)
        stride = np.uint32(words * math.prod(shape[axis + 1 :]) & 0xFFFFFFFF)
        index = index + (places * stride).reshape(-1, *[1] * (len(shape) - axis))
    index *= np.uint32(2654435761)  # odd, so words differ if their places do
    return index.reshape(*index.shape[:-2], index.shape[-2] * words).view(dtype)


def shares(length: int) -> list[slice]:
    """Divide an axis among the ranks, as `numpy.array_split` does."""
    parts = [len(part) for part in np.array_split(np.empty(length, bool), WORLD.size)]
    return [slice(*bounds) for bounds in pairwise(accumulate(parts, initial=0))]


def subarray(shape: Sequence[int], axis: int, part: slice, element: MPI.Datatype) -> MPI.Datatype:
    """Return the datatype of the elements in ``part`` of an axis."""
    sizes, starts = list(shape), [0] * len(shape)
    sizes[axis], starts[axis] = part.stop - part.start, part.start
    return element.Create_subarray(list(shape), sizes, starts).Commit()


def exchange(runs: Runs, shape: tuple[int, ...], dtype: str) -> list[Any]:
    """Return the row of one array. Collective."""
    comm, xp, size, rank = runs.comm, runs.machine.xp, WORLD.size, WORLD.rank
    element = MPI.Datatype.fromcode(np.dtype(dtype).char)
    rows, columns = shares(shape[0]), shares(shape[1])
    whole = [slice(0, length) for length in shape]
    with runs.machine.current():
        by_rows = content(xp, shape, dtype, [rows[rank], *whole[1:]])
        by_columns = content(xp, shape, dtype, [whole[0], columns[rank], *whole[2:]])
        result, back = xp.empty_like(by_columns), xp.empty_like(by_rows)
    of_rows = [subarray(by_rows.shape, 1, part, element) for part in columns]
    of_columns = [subarray(by_columns.shape, 0, part, element) for part in rows]
    ones, zeros = [1] * size, [0] * size

    def forward(result: Any) -> Call:
        return lambda: comm.Alltoallw(
            [by_rows, ones, zeros, of_rows], [result, ones, zeros, of_columns], stream=runs.machine.stream
        )

    def backward() -> None:
        comm.Alltoallw([by_columns, ones, zeros, of_columns], [back, ones, zeros, of_rows], stream=runs.machine.stream)

    name, nbytes = f"{' x '.join(map(str, shape))} {dtype}", by_rows.nbytes
    time_us: Callable[..., float] = partial(runs.time_us, nbytes=nbytes)
    flat = packing = symmetric = None
    if shape[0] % size == shape[1] % size == 0:
        packed = xp.empty((size, len(by_rows), shape[1] // size, *shape[2:]), dtype)
        blocks = by_rows.reshape(len(by_rows), size, -1, *shape[2:]).swapaxes(0, 1)

        def pack_and_exchange() -> None:
            packed[...] = blocks
            comm.Alltoall(packed, result, stream=runs.machine.stream)

        flat = time_us(f"{name}: Alltoall", lambda: comm.Alltoall(packed, result, stream=runs.machine.stream))
        packing = time_us(f"{name}: packing", pack_and_exchange, result=result, expected=by_columns)
        with comm.empty(by_columns.shape, dtype) as array:
            symmetric = time_us(f"{name}: symmetric", forward(array.local), result=array.local, expected=by_columns)
    there = time_us(f"{name}: 0 to 1", forward(result), result=result, expected=by_columns)
    here = time_us(f"{name}: 1 to 0", backward, result=back, expected=by_rows)
    issue = runs.issue_us(forward(result)) if nbytes < LARGE else None
    with comm.redistribution(shape, dtype, from_=0, to=1) as plan:
        if (plan.source_shape, plan.target_shape) != (by_rows.shape, by_columns.shape):
            sys.exit(f"{name}: the plan has other parts")

        def planned(result: Any) -> float:
            return time_us(
                f"{name}: plan",
                lambda: plan(by_rows, result, stream=runs.machine.stream),
                result=result,
                expected=by_columns,
            )

        plans: list[float | None] = [planned(result), None]
        if flat is not None:
            with comm.empty(by_columns.shape, dtype) as array:
                plans[1] = planned(array.local)
    for datatype in (*of_rows, *of_columns):
        datatype.Free()
    ratios = [None if flat is None or each is None else each / flat for each in (there, here, symmetric, *plans)]
    return [name, nbytes / (1 << 20), flat, there, here, symmetric, *plans, packing, *ratios, issue]


EXCHANGE_COLUMNS = [
    "array",
    "MiB of a rank",
    "Alltoall, us",
    "Alltoallw 0 to 1, us",
    "1 to 0, us",
    "0 to 1, symmetric, us",
    "plan 0 to 1, us",
    "plan, symmetric, us",
    "packing and Alltoall, us",
    "0 to 1, of Alltoall",
    "1 to 0, of Alltoall",
    "symmetric, of Alltoall",
    "plan, of Alltoall",
    "plan, symmetric, of Alltoall",
    "host's time, us",
]


def halo(runs: Runs, grid: Any, axis: int, length: int, end: str) -> list[Any]:
    """Return the row of one axis: the outer layers of each field get the layers beside them. Collective."""
    xp, stream = runs.machine.xp, runs.machine.stream
    before, after = grid.Shift(0, 1)
    with runs.machine.current():
        field = xp.arange(length * length, dtype="float64").reshape(length, length) + WORLD.rank * length**2
        cells, other, expected = xp.empty_like(field), xp.empty_like(field), xp.empty_like(field)
        bytes_of(expected)[...] = POISON
    layer: list[Any] = [slice(None)] * 2

    def at(place: int) -> tuple[Any, ...]:
        return (*layer[:axis], place, *layer[axis + 1 :])

    with runs.machine.current():
        for place, inner, peer in ((0, -2, before), (-1, 1, after)):
            if peer != MPI.PROC_NULL:
                expected[at(place)] = field[at(inner)] + (peer - WORLD.rank) * length**2
    sent, received = (
        [subarray(field.shape, axis, slice(place, place + 1), MPI.DOUBLE) for place in places]
        for places in ((1, length - 2), (0, length - 1))
    )

    def neighbours() -> None:
        grid.Neighbor_alltoallw([field, [1, 1], [0, 0], sent], [cells, [1, 1], [0, 0], received], stream=stream)

    lines = [xp.empty(length) for _ in range(4)]

    def messages() -> None:
        lines[0][...] = field[at(1)]
        lines[1][...] = field[at(-2)]
        grid.Sendrecv(lines[0], before, 0, lines[2], after, 0, stream=stream)
        grid.Sendrecv(lines[1], after, 1, lines[3], before, 1, stream=stream)
        if after != MPI.PROC_NULL:
            other[at(-1)] = lines[2]
        if before != MPI.PROC_NULL:
            other[at(0)] = lines[3]

    name = f"{length} {('rows', 'columns')[axis]} apart, {end}"
    times = []
    for what, call, result in (("neighbours", neighbours, cells), ("messages", messages, other)):
        times.append(runs.time_us(f"{name}: {what}", call, 0, result, expected))
    issue = runs.issue_us(neighbours)
    for datatype in (*sent, *received):
        datatype.Free()
    return [name, *times, issue]


def columns_of(runs: Runs, name: str, rows: int, width: int) -> list[Any]:
    """Return the row of one collective. Collective."""
    comm, xp, stream, row = runs.comm, runs.machine.xp, runs.machine.stream, OPERATIONS[name]
    vector = MPI.DOUBLE.Create_vector(rows, width, width * WORLD.size)
    group = vector.Create_resized(0, 8 * width).Commit()
    each, blocks = [1] * WORLD.size, [*range(WORLD.size)]
    count, root = rows * width, [0] if row.rooted else []
    sent = np.random.default_rng(WORLD.rank).random((rows, WORLD.size * width))
    expected = np.frombuffer(bytes([POISON]) * sent.nbytes).reshape(sent.shape).copy()

    def arguments(send: Any, receive: Any, *, flat: bool = False) -> list[Any]:
        found: list[Any] = []
        for array, shape, needs in ((send, row.send, "send"), (receive, row.receive, "receive")):
            if row.rooted == needs and WORLD.rank:
                found.append(None)
            elif shape == "vector":
                counts = [count] * WORLD.size, [count * block for block in blocks]
                found.append([array, counts] if flat else [array, each, blocks, group])
            else:
                number = count * (WORLD.size if shape == "blocks" else 1)
                found.append(array.reshape(-1)[:number] if flat else [array, 1, group])
        return found + root

    getattr(WORLD, name)(*arguments(sent, expected))
    with runs.machine.current():
        send, wanted = xp.asarray(sent), xp.asarray(expected)
        result = xp.empty_like(wanted)
    method = partial(getattr(comm, name), stream=stream)
    spaced, flat = (partial(method, *arguments(send, result, flat=flat)) for flat in (False, True))
    what = f"{name}, {rows} x {width}"
    times = [
        runs.time_us(f"{what}, flat", flat, 8 * count),
        runs.time_us(what, spaced, 8 * count, result, wanted),
    ]
    for datatype in (group, vector):
        datatype.Free()
    return [what, 8 * count / (1 << 20), *times, times[1] / times[0]]


def main() -> None:
    """Measure, and print each row on rank 0."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--divide", type=int, default=1, help="divide each length by this number; default: 1")
    options = parser.parse_args()
    with mpicomm.Communicator(WORLD) as comm:
        runs = Runs(comm, machine_of(comm))
        way = "A CUDA graph of calls runs twice, and events time the second run. " if runs.machine.stream else ""
        text = f"{way}Times are medians of {ROUNDS} runs, of the slowest rank. "
        title = f"Arrays split along axis 0 and arrays split along axis 1, {WORLD.size} ranks"
        explained = text + "Alltoall moves as many bytes, in one block for each rank. The plan is of `redistribution`."
        with Sheet(comm, options, title, EXCHANGE_COLUMNS, text=explained) as sheet:
            for shape, dtype in EXCHANGES:
                sheet.add(*exchange(runs, tuple(max(1, n // options.divide) for n in shape), dtype))
        columns = ["layer", "Neighbor_alltoallw, us", "copies and two Sendrecvs, us", "host's time, us"]
        title = f"Halos of a field of float64, {WORLD.size} ranks"
        explained = text + "The outer layers of each field get the layers beside them."
        with Sheet(comm, options, title, columns, text=explained) as sheet:
            for end in ("line", "ring"):
                with comm.Create_cart([WORLD.size], periods=[end == "ring"]) as grid:
                    for axis in (0, 1):
                        sheet.add(*halo(runs, grid, axis, HALO // options.divide, end))
        columns = ["collective, rows x columns", "MiB of a block", "consecutive, us", "columns, us", "times as long"]
        title = f"Groups of columns of a matrix of float64, {WORLD.size} ranks"
        with Sheet(comm, options, title, columns, text=text) as sheet:
            for rows, width in GROUPS:
                for name in ("Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Gather", "Scatter"):
                    sheet.add(*columns_of(runs, name, max(1, rows // options.divide), width))


main()
