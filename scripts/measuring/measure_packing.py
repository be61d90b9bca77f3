"""Measure the kernel that packs and unpacks derived datatypes, on one GPU.

Run `python scripts/measuring/measure_packing.py`. It times a launch that packs and a launch that unpacks, each beside a
copy of as many bytes within the device. A CUDA graph of 20 launches runs twice, and events time the second run. The
data is random, and the memory of results holds poison before. NumPy checks each byte that the graphs write, and the
bytes beside the elements. ``--json FILE`` adds the rows to a result file.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from needed import cupy
from result_file import Sheet, command, measuring_parser

import mpicomm
from mpicomm.bench.measure import GpuMachine
from mpicomm.collectives.packed import PackJob, pack_launches
from mpicomm.devices.cuda.backend import CudaBackend
from mpicomm.devices.cuda.load import kernels_of
from mpicomm.mpi.layout import layout_of
from mpicomm.sizes import format_size

SIZES = (1 << 20, 64 << 20)
LAUNCHES, ROUNDS = 20, 7
POISON = 0xA5
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """A datatype, and the same elements as NumPy selects them."""

    name: str
    datatype: MPI.Datatype
    count: int
    shape: tuple[int, ...]
    """The shape of the memory, as bytes."""
    keys: tuple[Any, ...]
    """The indices of the parts of an element, which follow each other on the last axis of packed memory."""

    def packed(self, memory: Bytes) -> Bytes:
        """Return the packed bytes of ``memory``."""
        parts = [memory.reshape(self.shape)[key] for key in self.keys]
        return np.concatenate(parts, axis=-1).reshape(-1)

    def unpack(self, packed: Bytes, memory: Bytes) -> None:
        """Put packed bytes into ``memory``."""
        shaped, start = memory.reshape(self.shape), 0
        for key in self.keys:
            *outer, width = shaped[key].shape
            shaped[key] = packed.reshape(*outer, -1)[..., start : start + width]
            start += width


def vector(run: int, nbytes: int) -> Case:
    """Return runs with gaps of their length between them."""
    count = nbytes // run
    datatype = MPI.BYTE.Create_vector(count, run, 2 * run)
    return Case(f"vector of {run} B", datatype, 1, (count, 2 * run), ((slice(None), slice(run)),))


def face(axis: int, nbytes: int) -> Case:
    """Return one layer of float64 of a box with 16 layers on that axis."""
    cells = nbytes // 8
    width = 1 << (cells.bit_length() // 2)
    sizes = [cells // width, width]
    sizes.insert(axis, 16)
    part, starts = list(sizes), [0, 0, 0]
    part[axis], starts[axis] = 1, 5
    key: list[Any] = [slice(start, start + n) for start, n in zip(starts, part, strict=True)]
    key[2] = slice(8 * starts[2], 8 * (starts[2] + part[2]))
    datatype = MPI.DOUBLE.Create_subarray(sizes, part, starts)
    return Case(f"face of a box on axis {axis}", datatype, 1, (*sizes[:2], 8 * sizes[2]), (tuple(key),))


def indexed(run: int, nbytes: int) -> Case:
    """Return runs in random order, with gaps."""
    order = np.random.default_rng(run).permutation(nbytes // run)
    datatype = MPI.BYTE.Create_hindexed_block(run, (2 * run * order).tolist())
    return Case(f"indexed, {run} B at random", datatype, 1, (len(order), 2 * run), ((order, slice(run)),))


def structs(nbytes: int) -> Case:
    """Return an array of structures: three float64, a gap, four float32, a gap."""
    fields = MPI.Datatype.Create_struct([3, 4], [0, 32], [MPI.DOUBLE, MPI.FLOAT])
    datatype = fields.Create_resized(0, 64)
    fields.Free()
    count = nbytes // 40
    keys = ((slice(None), slice(0, 24)), (slice(None), slice(32, 48)))
    return Case("struct of 24 and 16 B", datatype, count, (count, 64), keys)


CASES: tuple[Callable[[int], Case], ...] = (
    lambda nbytes: Case("contiguous", MPI.BYTE.Create_contiguous(nbytes), 1, (nbytes,), (slice(None),)),
    *(lambda nbytes, run=run: vector(run, nbytes) for run in (8, 16, 64, 512, 4096)),
    *(lambda nbytes, axis=axis: face(axis, nbytes) for axis in range(3)),
    *(lambda nbytes, run=run: indexed(run, nbytes) for run in (16, 64)),
    structs,
)


def measured(case: Case, backend: CudaBackend, gpu: GpuMachine) -> tuple[int, dict[str, float]]:
    """Return the packed bytes of a case, and microseconds of each launch; exit if NumPy has other bytes."""
    layout = layout_of(case.datatype)
    assert layout is not None
    layout = layout.repeated(case.count)
    nbytes, stream = layout.nbytes, gpu.stream.ptr
    rng = cupy.random.default_rng(nbytes)
    memory = cupy.empty(int(np.prod(case.shape)), np.uint8)
    packed = cupy.empty(nbytes + 64, np.uint8)  # no element has the last bytes
    other = cupy.empty(nbytes, np.uint8)
    jobs = [PackJob(memory.data.ptr, layout, 0)]

    def call(unpacks: bool) -> Callable[[], object]:
        (launch,) = pack_launches(backend, jobs, packed.data.ptr, unpacks=unpacks)
        with backend.current():
            kernel = kernels_of(backend.info).load(launch.variant)
            enqueue = kernel.launcher(launch.arguments, launch.blocks, launch.threads, early=launch.early).launch
        return lambda: enqueue(stream)

    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: backend.copy(other.data.ptr, packed.data.ptr, nbytes, stream),
        "pack": call(False),
        "unpack": call(True),
    }
    graphs = {name: gpu.capture(each, LAUNCHES) for name, each in calls.items()}

    def run(name: str) -> None:
        backend.synchronize()  # CuPy writes the data on its own stream
        gpu.launch(graphs[name])
        gpu.finish()

    memory[:] = rng.integers(0, 256, memory.size, np.uint8)
    packed[:] = POISON
    run("pack")
    expected = np.full(packed.size, POISON, np.uint8)
    expected[:nbytes] = case.packed(memory.get())
    require_same(f"{case.name}: pack", packed.get(), expected)

    packed[:nbytes] = rng.integers(0, 256, nbytes, np.uint8)
    memory[:] = POISON
    run("unpack")
    expected = np.full(memory.size, POISON, np.uint8)
    case.unpack(packed.get()[:nbytes], expected)
    require_same(f"{case.name}: unpack", memory.get(), expected)

    rounds = {name: [gpu.time_graph(graph).complete for _ in range(ROUNDS)] for name, graph in graphs.items()}
    return nbytes, {name: 1e6 * statistics.median(seconds) for name, seconds in rounds.items()}


def require_same(what: str, found: Bytes, expected: Bytes) -> None:
    """Exit if bytes differ."""
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        sys.exit(f"{what}: {wrong.size} bytes are wrong, the first at {wrong[0]}")


def main() -> None:
    """Measure and print; write the table if a file is named."""
    parser = measuring_parser(__doc__)
    options = parser.parse_args()
    columns = ["datatype", "packed", "copy, us", "pack, us", "unpack, us"]
    columns += ["pack, GB/s", "unpack, GB/s", "pack, % of the copy's rate", "unpack, % of the copy's rate"]
    text = (
        "GB/s count packed bytes. The copy moves as many bytes within the device. A CUDA graph of "
        f"{LAUNCHES} launches runs twice, and events time the second run. Times are medians of {ROUNDS}."
    )
    with mpicomm.Communicator(MPI.COMM_SELF) as comm:
        if comm.device == "cpu":
            sys.exit("measure_packing.py needs a GPU")
        backend, gpu = CudaBackend(int(comm.device), timeout_s=30), GpuMachine()
        title = "Packing of derived datatypes"
        with Sheet(comm, options, title, columns, text=text, command=command()) as sheet:
            for size in SIZES:
                for make in CASES:
                    case = make(size)
                    nbytes, us = measured(case, backend, gpu)
                    case.datatype.Free()
                    rates = [round(nbytes / us[way] / 1e3) for way in ("pack", "unpack")]
                    shares = [round(100 * us["copy"] / us[way]) for way in ("pack", "unpack")]
                    sheet.add(case.name, format_size(size), us["copy"], us["pack"], us["unpack"], *rates, *shares)
        backend.close()


main()
