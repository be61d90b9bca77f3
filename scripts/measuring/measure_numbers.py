"""Write down what reductions return in each library: the page mpicomm/docs/numbers.md.

``mpiexec -n 2 python scripts/measuring/measure_numbers.py LIBRARY`` calls a library, "mpi", "mpicomm" (on host arrays)
or "gloo", and writes scripts/results/numbers/NAME.json. Then the same with ``-n 4`` adds the order of its sums.
``python scripts/measuring/measure_numbers.py page`` writes the page from all files there. A file of a library that
nobody has measured with this program says in "source" where it is from.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts/results/numbers"
PAGE = ROOT / "mpicomm/docs/numbers.md"
ORDER = ("mpicomm-host", "mpich", "open-mpi", "gloo", "mpicomm-gpu", "nccl", "torch-nccl")
NAN = float("nan")

# Title, element type, operation, and the elements of rank 0 and of rank 1; for "bits" as integers.
CASES: tuple[tuple[str, str, str, tuple[Any, ...], tuple[Any, ...]], ...] = (
    ("NaN on rank 0, on rank 1", "float32", "MAX", (NAN, 1), (1, NAN)),
    ("NaN on rank 0, on rank 1", "float32", "MIN", (NAN, 1), (1, NAN)),
    ("NaN on rank 0, on rank 1", "float64", "MAX", (NAN, 1), (1, NAN)),
    ("payloads 1 and 2 of NaNs", "float32 bits", "SUM", (0x7FC00001,), (0x7FC00002,)),
    ("payloads 1 and 2 of NaNs", "float32 bits", "MAX", (0x7FC00001,), (0x7FC00002,)),
    ("0 and -0, -0 and 0", "float32", "MAX", (0.0, -0.0), (-0.0, 0.0)),
    ("0 and -0, -0 and 0", "float32", "MIN", (0.0, -0.0), (-0.0, 0.0)),
    ("-0 and -0", "float32", "SUM", (-0.0,), (-0.0,)),
    ("two large floats", "float32", "AVG", (3e38,), (3e38,)),
    ("two subnormal floats", "float32", "AVG", (2e-40,), (2e-40,)),
    ("3 and 4, -3 and -4", "int32", "AVG", (3, -3), (4, -4)),
    ("200 and 100", "uint8", "AVG", (200,), (100,)),
    ("200 and 100", "uint8", "SUM", (200,), (100,)),
    ("2^63 and 1", "uint64", "MAX", (2**63,), (1,)),
    ("448 and 448", "float8_e4m3fn", "SUM", (448,), (448,)),
    ("57344 and 57344", "float8_e5m2", "SUM", (57344,), (57344,)),
    ("256 and 1, 258 and 1 (ties)", "bfloat16", "SUM", (256, 258), (1, 1)),
    ("2048 and 1, 2050 and 1 (ties)", "float16", "SUM", (2048, 2050), (1, 1)),
    ("two subnormal floats", "float16", "SUM", (2.0**-24,), (2.0**-24,)),
    ("True and True", "bool", "SUM", (True,), (True,)),
    ("True and False", "bool", "AVG", (True,), (False,)),
    ("(1 + 2j) and (3 - 1j)", "complex64", "PROD", (1 + 2j,), (3 - 1j,)),
    ("(1 + 2j) and (3 - 1j)", "complex64", "MAX", (1 + 2j,), (3 - 1j,)),
    ("6 and 3", "int32", "BAND", (6,), (3,)),
    ("6.0 and 3.0", "float32", "BAND", (6,), (3,)),
    ("no elements", "float32", "SUM", (), ()),
)
COUNTS = (1, 1000, 100_000, 1_000_000)
Reduce = Callable[[Any, str], Any]
"""Returns the result of an all-reduce of a NumPy array, or raises."""


def array_of(dtype: str, values: tuple[Any, ...]) -> Any:
    """Return the elements as an array."""
    name, _, bits = dtype.partition(" ")
    if bits:
        return np.array(values, np.uint32).view(np.float32)
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.array(values, np.float32).astype(getattr(ml_dtypes, name))
    return np.array(values, name)


def shown(result: Any, dtype: str) -> str:
    """Return a result as the page shows it."""
    if dtype.endswith("bits"):
        return ", ".join(f"0x{bits:08X}" for bits in result.view(np.uint32).tolist())
    if result.dtype.kind in "biuc":
        return ", ".join(map(str, result.tolist())) or "nothing"
    return ", ".join(f"{float(value):.8g}" for value in result.astype(np.float64)) or "nothing"


def of_mpi() -> tuple[str, str, Reduce]:
    """Return the name of the file of this MPI, the title of its column, and its all-reduce."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()

    def reduce(array: Any, op: str) -> Any:
        received = np.zeros_like(array)
        MPI.COMM_WORLD.Allreduce(array, received, getattr(MPI, op))
        return received

    return name.lower().replace(" ", "-"), f"{name} {'.'.join(map(str, version))}", reduce


def of_mpicomm() -> tuple[str, str, Reduce]:
    """As `of_mpi`, for mpicomm on host arrays."""
    from mpi4py import MPI

    import mpicomm

    comm = mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", reductions="ordered")

    def reduce(array: Any, op: str) -> Any:
        received = np.zeros_like(array)
        comm.Allreduce(array, received, mpicomm.AVG if op == "AVG" else getattr(MPI, op))
        return received

    return "mpicomm-host", 'mpicomm on host arrays, `reductions="ordered"`', reduce


def of_gloo() -> tuple[str, str, Reduce]:
    """As `of_mpi`, for gloo."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    file = world.bcast(tempfile.mktemp() if world.rank == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=world.rank, world_size=world.size)
    names = {"PROD": "PRODUCT"}

    def reduce(array: Any, op: str) -> Any:
        name = array.dtype.name
        if array.dtype.isbuiltin == 2:  # of ml_dtypes: the same bits for torch
            bits = array.view(f"u{array.itemsize}")
            tensor = torch.from_numpy(bits.copy()).view(getattr(torch, name))
        else:
            tensor = torch.from_numpy(array.copy())
        dist.all_reduce(tensor, getattr(dist.ReduceOp, names.get(op, op)))
        if array.dtype.isbuiltin == 2:
            return tensor.view(getattr(torch, f"uint{8 * array.itemsize}")).numpy().view(array.dtype)
        return tensor.numpy()

    return "gloo", f"gloo of PyTorch {torch.__version__}", reduce


def order_of(reduce: Reduce, world: Any, count: int) -> str:
    """Return what is the same in sums of ``count`` float32 elements. Sums of these values depend on their order."""
    orders = np.array(
        [(1, 2**24, -(2**24), 1), (2**24, 1, 1, 1), (-(2**24), 2**24, 1, 0.5), (3, 2**24, 1, 1)], np.float32
    )
    array = np.resize(orders[:, world.rank], count)
    found = [reduce(array.copy(), "SUM") for _ in range(20)]
    ranks = world.allgather(found[0].tobytes())
    kinds = [
        [np.array_equal(result[first::4], np.full_like(result[first::4], result[first])) for first in range(4)]
        for result in found
        if count >= 4
    ]
    in_order = np.resize(((orders[:, 0] + orders[:, 1]) + orders[:, 2]) + orders[:, 3], count)
    said = {
        "all ranks": len(set(ranks)) == 1,
        "20 calls": all(result.tobytes() == found[0].tobytes() for result in found),
        "equal elements": all(map(all, kinds)),
        "rank order": found[0].tobytes() == in_order.tobytes(),
    }
    everywhere = [world.allreduce(int(same)) == world.size for same in said.values()]
    return ", ".join(name if same else f"not {name}" for name, same in zip(said, everywhere, strict=True))


def measure(library: str) -> None:
    """Call a library in all cases, and write its file."""
    from mpi4py import MPI

    from mpicomm.cli.machine import processor, versions

    world = MPI.COMM_WORLD
    file, title, reduce = {"mpi": of_mpi, "mpicomm": of_mpicomm, "gloo": of_gloo}[library]()
    target = RESULTS / f"{file}.json"
    if world.size == 4:
        orders = {f"{count}": order_of(reduce, world, count) for count in COUNTS}
        if world.rank == 0:
            found = {**json.loads(target.read_text()), "orders": orders}
            target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        return
    if world.size != 2:
        sys.exit("run it on 2 ranks, and then on 4")
    results = {}
    for case, dtype, op, *of_ranks in CASES:
        array = array_of(dtype, of_ranks[world.rank])
        try:
            with np.errstate(all="ignore"):
                mine = shown(reduce(array, op), dtype)
        except Exception as error:  # a library may raise any class
            mine = f"refuses ({type(error).__name__})"
        both = world.allgather(mine)
        results[f"{op} {dtype}: {case}"] = both[0] if both[0] == both[1] else f"rank 0: {both[0]}; rank 1: {both[1]}"
    if world.rank == 0:
        found = {
            "title": title,
            "hardware": f"host, {processor()}",
            "versions": {name: text.partition(",")[0].rstrip("\0") for name, text in versions().items() if text},
            "source": "measured by scripts/measuring/measure_numbers.py",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "results": results,
        }
        target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def page() -> str:
    """Return the text of the page."""
    found = [
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ORDER if (RESULTS / f"{name}.json").exists()
    ]
    lines = [
        "# Numbers",
        "",
        "This page is for people who move a program from one library to another, and whose numbers change.",
        "`scripts/measuring/measure_numbers.py` writes it from the files of `scripts/results/numbers`.",
        "",
        "## What an all-reduce of two ranks returns",
        "",
        "One result stands for both ranks. Two numbers are the results of two elements. NaN results have any payload,",
        "unless their bits are shown. An empty cell is not measured.",
        "",
    ]
    lines.append("| op and type | rank 0 and rank 1 | " + " | ".join(each["title"] for each in found) + " |")
    lines.append("|---|---|" + "---|" * len(found))
    for case, dtype, op, *_ in CASES:
        cells = [each["results"].get(f"{op} {dtype}: {case}", "") for each in found]
        lines.append(f"| {op} {dtype.split()[0]} | {case} | {' | '.join(cells)} |")
    lines += ["", *(RESULTS / "reasons.md").read_text().splitlines(), ""]
    ordered = [each for each in found if "orders" in each]
    lines.append("| float32 elements | " + " | ".join(each["title"] for each in ordered) + " |")
    lines.append("|---|" + "---|" * len(ordered))
    lines += [f"| {count} | {' | '.join(each['orders'][f'{count}'] for each in ordered)} |" for count in COUNTS]
    lines += ["", "## Where the columns are from", ""]
    for each in found:
        said = ", ".join(f"{name} {version}" for name, version in each["versions"].items() if name != "MPI")
        lines.append(f"* {each['title']}: {each['hardware']}; {said}; {each['source']}, {each['date']}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1] == "page":
        PAGE.write_text(page())
    else:
        measure(sys.argv[1])
