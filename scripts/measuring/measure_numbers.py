"""Write down what reductions return in each library: the page mpicomm/docs/numbers.md.

``python scripts/measuring/measure_numbers.py LIBRARY...`` runs each library on 2 and on 4 ranks: "mpi", "mpicomm" (on
host arrays), "gloo", or on GPUs "mpicomm-gpu", "nccl" and "torch-nccl". It writes scripts/results/numbers/NAME.json, or
with ``--json FILE`` one file of all of them. That ranks end or hang in a question is an answer, too: another job goes
on after it. ``page [FILE]`` writes the page from scripts/results/numbers, after it has put the libraries of FILE there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts/results/numbers"
PAGE = ROOT / "mpicomm/docs/numbers.md"
ORDER = ("mpicomm-gpu", "nccl", "torch-nccl", "mpicomm-host", "mpich", "open-mpi", "gloo")
NAN = float("nan")

# Title, element type, operation, and the elements of rank 0 and of rank 1; for "bits" as integers.
CASES: tuple[tuple[str, str, str, tuple[Any, ...], tuple[Any, ...]], ...] = (
    ("NaN on rank 0, on rank 1", "float32", "MAX", (NAN, 1), (1, NAN)),
    ("NaN on rank 0, on rank 1", "float32", "MIN", (NAN, 1), (1, NAN)),
    ("NaN on rank 0, on rank 1", "float64", "MAX", (NAN, 1), (1, NAN)),
    ("NaN on rank 0, on rank 1", "bfloat16", "MAX", (NAN, 1), (1, NAN)),
    ("payloads 1 and 2 of NaNs", "float32 bits", "SUM", (0x7FC00001,), (0x7FC00002,)),
    ("payloads 1 and 2 of NaNs", "float32 bits", "MAX", (0x7FC00001,), (0x7FC00002,)),
    ("0 and -0, -0 and 0", "float32", "MAX", (0.0, -0.0), (-0.0, 0.0)),
    ("0 and -0, -0 and 0", "float32", "MIN", (0.0, -0.0), (-0.0, 0.0)),
    ("-0 and -0", "float32", "SUM", (-0.0,), (-0.0,)),
    ("two large floats", "float32", "AVG", (3e38,), (3e38,)),
    ("1,000 pairs of a subnormal float", "float32", "AVG", (2e-40,) * 1000, (2e-40,) * 1000),
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
QUESTION_S, LIBRARY_S = 45, 150
"""The limits of one question, or the start of a job, and of all jobs of a library on a number of ranks."""
Reduce = Callable[[Any, str], Any]  # returns the result of an all-reduce of a NumPy array, or raises
Library = tuple[str, str, Reduce]  # the name of its file, the title of its column, and its all-reduce


class LacksError(Exception):
    """The library has no such thing."""


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
        texts = [str(value) for value in result.tolist()]
    else:
        texts = [f"{float(value):.8g}" for value in result.astype(np.float64)]
    if len(texts) > 8:
        return " or ".join(dict.fromkeys(texts))
    return ", ".join(texts) or "nothing"


def of_mpi() -> Library:
    """Return this MPI."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()

    def reduce(array: Any, op: str) -> Any:
        received = np.zeros_like(array)
        if op == "AVG":
            raise LacksError
        MPI.COMM_WORLD.Allreduce(array, received, getattr(MPI, op))
        return received

    return name.lower().replace(" ", "-"), f"{name} {'.'.join(map(str, version))}", reduce


def of_mpicomm() -> Library:
    """Return mpicomm on host arrays."""
    from mpi4py import MPI

    import mpicomm

    comm = mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", reductions="ordered")

    def reduce(array: Any, op: str) -> Any:
        received = np.zeros_like(array)
        comm.Allreduce(array, received, mpicomm.AVG if op == "AVG" else getattr(MPI, op))
        return received

    return "mpicomm-host", 'mpicomm on host arrays, `reductions="ordered"`', reduce


def of_mpicomm_gpu() -> Library:
    """Return mpicomm on arrays of GPUs."""
    from mpi4py import MPI

    import mpicomm

    comm = mpicomm.Communicator(MPI.COMM_WORLD)
    assert comm.device != "cpu", "there is no GPU"
    device = f"cuda:{comm.device}"

    def reduce(array: Any, op: str) -> Any:
        sent = tensor_of(array, device)
        received = sent.clone()
        comm.Allreduce(sent, received, mpicomm.AVG if op == "AVG" else getattr(MPI, op))
        return array_in(received, array.dtype)

    return "mpicomm-gpu", "mpicomm on GPUs", reduce


def of_nccl() -> Library:
    """Return NCCL, called by its C functions."""
    import cupy
    from mpi4py import MPI

    from mpicomm.bench.libraries import OPS, TYPES
    from mpicomm.devices.cuda import nccl

    world = MPI.COMM_WORLD
    cupy.cuda.Device(own_gpu(world, cupy.cuda.runtime.getDeviceCount())).use()
    comm = nccl.NcclCommunicator(world.size, world.bcast(nccl.unique_id() if world.rank == 0 else None), world.rank)

    def reduce(array: Any, op: str) -> Any:
        if array.dtype.name not in TYPES or op.lower() not in OPS:
            raise LacksError
        memory, stream = cupy.asarray(array.view(np.uint8)), cupy.cuda.Stream.null
        numbers = TYPES.index(array.dtype.name), OPS[op.lower()]
        nccl.call("ncclAllReduce", memory.data.ptr, memory.data.ptr, array.size, *numbers, comm.handle, stream.ptr)
        stream.synchronize()
        return memory.get().view(array.dtype)

    return "nccl", f"NCCL {nccl.version()}", reduce


def of_gloo() -> Library:
    """Return gloo."""
    import torch

    return "gloo", f"gloo of PyTorch {torch.__version__}", reduce_of_torch("gloo", "cpu")


def of_torch_nccl() -> Library:
    """Return NCCL as PyTorch calls it."""
    import torch
    from mpi4py import MPI

    version = ".".join(map(str, torch.cuda.nccl.version()))
    device = own_gpu(MPI.COMM_WORLD, torch.cuda.device_count())
    torch.cuda.set_device(device)
    return "torch-nccl", f"NCCL {version} of PyTorch {torch.__version__}", reduce_of_torch("nccl", f"cuda:{device}")


def reduce_of_torch(backend: str, device: str) -> Reduce:
    """Return the all-reduce of a backend of PyTorch. Collective."""
    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    file = world.bcast(tempfile.mktemp() if world.rank == 0 else None)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=world.rank, world_size=world.size)

    def reduce(array: Any, op: str) -> Any:
        tensor = tensor_of(array, device)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, {"PROD": "PRODUCT"}.get(op, op)))
        return array_in(tensor, array.dtype)

    return reduce


def own_gpu(world: Any, gpus: int) -> int:
    """Return the GPU of this rank. NCCL takes no two ranks of one GPU."""
    if gpus < world.size:
        raise LacksError(f"it needs {world.size} GPUs")
    return int(world.rank)


def tensor_of(array: Any, device: str) -> Any:
    """Return a tensor with the elements of an array. Types of ml_dtypes, which PyTorch does not take, go as bits."""
    import torch

    name, foreign = array.dtype.name, array.dtype.isbuiltin == 2
    tensor = torch.from_numpy((array.view(f"u{array.itemsize}") if foreign else array).copy())
    return (tensor.view(getattr(torch, name)) if foreign else tensor).to(device)


def array_in(tensor: Any, dtype: Any) -> Any:
    """Return the elements of a tensor as an array of this type."""
    import torch

    if dtype.isbuiltin == 2:
        return tensor.view(getattr(torch, f"uint{8 * dtype.itemsize}")).cpu().numpy().view(dtype)
    return tensor.cpu().numpy()


LIBRARIES: dict[str, Callable[[], Library]] = {
    "mpi": of_mpi,
    "mpicomm": of_mpicomm,
    "gloo": of_gloo,
    "mpicomm-gpu": of_mpicomm_gpu,
    "nccl": of_nccl,
    "torch-nccl": of_torch_nccl,
}


def order_of(reduce: Reduce, world: Any, count: int) -> str:
    """Return what is the same in sums of ``count`` float32 elements. Sums of these values depend on their order."""
    orders = np.array(
        [(1, 2**24, -(2**24), 1), (2**24, 1, 1, 1), (-(2**24), 2**24, 1, 0.5), (3, 2**24, 1, 1)], np.float32
    )
    array = np.resize(orders[:, world.rank], count)
    found = [reduce(array.copy(), "SUM") for _ in range(20)]
    ranks = world.allgather(found[0].tobytes())
    in_order = np.resize(((orders[:, 0] + orders[:, 1]) + orders[:, 2]) + orders[:, 3], count)
    said = {
        "all ranks": len(set(ranks)) == 1,
        "20 calls": all(result.tobytes() == found[0].tobytes() for result in found),
        "equal elements": all(np.array_equal(each, np.resize(each[:4], count)) for each in found),
        "rank order": found[0].tobytes() == in_order.tobytes(),
    }
    everywhere = [world.allreduce(int(same)) == world.size for same in said.values()]
    return ", ".join(name if same else f"not {name}" for name, same in zip(said, everywhere, strict=True))


def _attributes(comm: Any, mpi: Any) -> str:
    log: list[str] = []

    def saying(what: str) -> Callable[..., Any]:
        return lambda comm, key, value: log.extend([what]) or value  # type: ignore[func-returns-value]

    keys = [mpi.Comm.Create_keyval(saying(f"copies {name}"), saying(f"deletes {name}")) for name in "abc"]
    first = comm.Dup()
    for key in keys:
        first.Set_attr(key, 1)
    first.Dup().Free()
    first.Free()
    return ", ".join(log)


def _merged(comm: Any, mpi: Any) -> list[int]:
    half = comm.Split(comm.rank, 0)
    between = half.Create_intercomm(0, comm, 1 - comm.rank, 7)
    merged = between.Merge(False)
    ranks: list[int] = comm.allgather(merged.rank)
    for each in (merged, between, half):
        each.Free()
    return ranks


def _shared(comm: Any, mpi: Any) -> str:
    window = mpi.Win.Allocate_shared(0 if comm.rank == 0 else 8, 8, comm=comm)
    memory, unit = window.Shared_query(0)
    null = memory.address == 0
    window.Free()
    return f"{'null' if null else 'an address'}, unit {unit}"


def _resized_member(comm: Any, mpi: Any) -> str:
    member = mpi.INT.Create_resized(0, 16)
    return f"{mpi.Datatype.Create_struct([1, 1], [0, 100], [member, mpi.DOUBLE]).Get_extent()[1]} bytes"


def _empty_member(comm: Any, mpi: Any) -> str:
    member = mpi.INT.Create_contiguous(0)
    return f"{mpi.Datatype.Create_struct([1, 1], [64, 0], [member, mpi.CHAR]).Get_true_extent()[1]} bytes"


def _count_of_empty(comm: Any, mpi: Any) -> str:
    status, memory = mpi.Status(), np.zeros(5, "b")
    comm.Sendrecv(memory, 1 - comm.rank, 7, memory.copy(), 1 - comm.rank, 7, status)
    count = status.Get_count(mpi.INT.Create_contiguous(0).Commit())
    return "UNDEFINED" if count == mpi.UNDEFINED else str(count)


def _scan(comm: Any, mpi: Any) -> str:
    values = np.array([2**24, 1, 1, 1], np.float32)
    received = np.zeros(1, np.float32)
    comm.Scan(values[comm.rank : comm.rank + 1].copy(), received)
    in_order = values[0]
    for value in values[1 : comm.rank + 1]:
        in_order += value
    equal = comm.allgather(bool(received[0] == in_order))
    return ", ".join("in order" if each else "not in order" for each in equal)


def _psets(comm: Any, mpi: Any) -> str:
    session = mpi.Session.Init()
    names = [session.Get_nth_pset(number) for number in range(session.Get_num_psets())]
    session.Finalize()
    return ", ".join(names)


DIFFERENCES: dict[str, Callable[[Any, Any], Any]] = {
    "version of MPI's standard": lambda comm, mpi: ".".join(map(str, mpi.Get_version())),
    "`Compute_dims(180, 2)`": lambda comm, mpi: mpi.Compute_dims(180, 2),
    "attributes a, b and c: `Dup`, and `Free` of both": _attributes,
    "ranks after `Intercomm.Merge(False)` on both sides": _merged,
    "`Shared_query` of a rank with 0 bytes": _shared,
    "keys of `INFO_ENV`": lambda comm, mpi: ", ".join(sorted(mpi.INFO_ENV.keys())) or "none",
    "process sets of a session": _psets,
    "`Attach_buffer(BUFFER_AUTOMATIC)`": lambda comm, mpi: (
        mpi.Attach_buffer(mpi.BUFFER_AUTOMATIC),
        mpi.Detach_buffer(),
        "works",
    )[2],
    "name of the type of float16": lambda comm, mpi: mpi.Datatype.fromcode("e").Get_name(),
    "extent of a struct: an INT that is resized to 16 bytes at 0, a DOUBLE at 100": _resized_member,
    "true extent of a struct: no elements at 64, a CHAR at 0": _empty_member,
    "`Get_count(empty type)` after 5 bytes": _count_of_empty,
    "largest tag": lambda comm, mpi: comm.Get_attr(mpi.TAG_UB),
}


DIFFERENCES_OF_4: dict[str, Callable[[Any, Any], Any]] = {"`Scan` of float32: the sums of ranks 0 to 3": _scan}


def questions(library: str, reduce: Reduce, world: Any) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Return the part of the file, the question in it, and its answer by this rank, in the order of the page."""
    if world.size == 4:
        for count in COUNTS:
            yield "orders", f"{count}", partial(order_of, reduce, world, count)
    else:
        for case, dtype, op, *of_ranks in CASES:
            array = array_of(dtype, of_ranks[world.rank])
            yield "results", f"{op} {dtype}: {case}", partial(_result_of, reduce, array, op, dtype)
    if library == "mpi":
        from mpi4py import MPI

        import mpicomm

        comm = mpicomm.Communicator(world, device="cpu")
        for case, answer in (DIFFERENCES_OF_4 if world.size == 4 else DIFFERENCES).items():
            yield "differences", case, partial(_of_both, answer, comm, world, MPI)


def _result_of(reduce: Reduce, array: Any, op: str, dtype: str) -> str:
    return shown(reduce(array, op), dtype)


def _of_both(answer: Callable[[Any, Any], Any], comm: Any, world: Any, mpi: Any) -> str:
    plain, ours = (_answer(partial(answer, each, mpi)) for each in (world, comm))
    assert plain == ours, "a Communicator differs from its MPI: the page must say so"
    return plain


def _answer(ask: Callable[[], Any]) -> str:
    try:
        with np.errstate(all="ignore"):
            return str(ask())
    except LacksError:
        return "has none"
    except AssertionError:
        raise
    except Exception as error:  # a library may raise any class
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return f"refuses ({type(error).__name__})"


def run(library: str, log: Path, first: int) -> None:
    """Answer the questions from the first one on, as the ranks of a job. Rank 0 writes them and the answers into a log.

    It writes a question before all ranks try it, so that `measure` sees which one they did not survive.
    """
    from mpi4py import MPI

    from mpicomm.cli.arguments import processor, versions

    world = MPI.COMM_WORLD
    with log.open("a", buffering=1) as file:

        def write(**entry: Any) -> None:
            if world.rank == 0:
                file.write(json.dumps(entry) + "\n")

        try:
            name, title, reduce = LIBRARIES[library]()
        except LacksError as error:
            write(lacks=str(error))
            return
        machine = "host"
        if library.endswith(("gpu", "nccl")):
            import cupy

            gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
            machine = f"{min(world.size, cupy.cuda.runtime.getDeviceCount())} x {gpu}"
        write(
            name=name,
            about={
                "title": title,
                "hardware": f"{machine}, {processor()}",
                "versions": {kind: text.partition(",")[0].rstrip("\0") for kind, text in versions().items() if text},
                "source": "measured by scripts/measuring/measure_numbers.py",
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            },
        )
        for part, question, ask in list(questions(library, reduce, world))[first:]:
            write(part=part, question=question)
            of_ranks = world.allgather(_answer(ask))
            said = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(of_ranks))
            write(answer=of_ranks[0] if len(set(of_ranks)) == 1 else said)
    if library.endswith("nccl"):
        MPI.Finalize()
        os._exit(0)  # NCCL's teardown is no question


def measure(library: str) -> dict[str, dict[str, Any]]:
    """Return the file of a library by its name. Ranks that end or hang have answered a question, too."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.jobs.mpiexec import environment, mpiexec_command, sharing_of_cores

    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    found: dict[str, dict[str, Any]] = {}
    for ranks in (2, 4):
        answered, begun = 0, time.monotonic()
        while time.monotonic() - begun < LIBRARY_S:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log"
                log.touch()
                command = mpiexec_command(ranks, __file__, "--job", library, f"{log}", f"{answered}")
                variables = {**sharing_of_cores(ranks), **environment(PYTHONPATH=path)}
                job = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
                end = _watch(job, log)
                entries = [json.loads(line) for line in log.read_text().splitlines()]
            if not entries or "lacks" in entries[0]:
                sys.stdout.write(f"{library} on {ranks} ranks: {entries[0]['lacks'] if entries else end}\n")
                break
            about = found.setdefault(entries[0]["name"], entries[0]["about"])
            for asked, answer in zip(entries[1::2], [*entries[2::2], {"answer": end}], strict=False):
                about.setdefault(asked["part"], {})[asked["question"]] = answer["answer"]
                answered += 1
            if not end:
                break
        sys.stdout.write(f"{library} on {ranks} ranks: {answered} answers\n")
        sys.stdout.flush()
    return found


def _watch(job: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for a job, and return how it ended: "" if it was well. A job whose log does not grow is ended."""
    size, since = 0, time.monotonic()
    while job.poll() is None and time.monotonic() - since < QUESTION_S:
        time.sleep(0.2)
        if log.stat().st_size > size:
            size, since = log.stat().st_size, time.monotonic()
    if job.poll() is not None:
        return f"ends the ranks ({job.returncode})" if job.returncode else ""
    job.terminate()  # mpiexec ends its ranks
    with suppress(subprocess.TimeoutExpired):
        job.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    return "hangs"


def page() -> str:
    """Return the text of the page."""
    found = [
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ORDER if (RESULTS / f"{name}.json").exists()
    ]
    lines = (RESULTS / "beginning.md").read_text().splitlines()
    lines.append("| op and type | rank 0 and rank 1 | " + " | ".join(each["title"] for each in found) + " |")
    lines.append("|---|---|" + "---|" * len(found))
    for case, dtype, op, *_ in CASES:
        cells = [each["results"].get(f"{op} {dtype}: {case}", "") for each in found]
        lines.append(f"| {op} {dtype.split()[0]} | {case} | {' | '.join(cells)} |")
    lines += ["", *(RESULTS / "reasons.md").read_text().splitlines(), ""]
    ordered = [each for each in found if "orders" in each]
    lines.append("| float32 elements | " + " | ".join(each["title"] for each in ordered) + " |")
    lines.append("|---|" + "---|" * len(ordered))
    for count in COUNTS:
        cells = [", ".join(re.findall(r"not [\w ]+", each["orders"][f"{count}"])) or "all hold" for each in ordered]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    mpis = [each for each in found if "differences" in each]
    lines += [
        "",
        "## Where MPIs differ",
        "",
        "One mpi4py program on two ranks, and for `Scan` on four. A Communicator does what its MPI does. Counts of",
        "2^31 elements and the classes of common errors do not differ.",
        "",
    ]
    lines += [f"| | {' | '.join(each['title'] for each in mpis)} |", "|---|" + "---|" * len(mpis)]
    lines += [
        f"| {case} | {' | '.join(each['differences'].get(case, '') for each in mpis)} |"
        for case in DIFFERENCES | DIFFERENCES_OF_4
    ]
    lines += ["", "## Where the columns are from", ""]
    for each in found:
        said = ", ".join(f"{name} {version}" for name, version in each["versions"].items() if name != "MPI")
        lines.append(f"* {each['title']}: {each['hardware']}; {said}; {each['source']}, {each['date']}.")
    return "\n".join(lines) + "\n"


def _write(target: Path, found: dict[str, Any]) -> None:
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Measure libraries, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help=f"of {', '.join(LIBRARIES)}, or page [FILE]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if options.what[0] == "page":
        for file in options.what[1:]:
            found |= json.loads(Path(file).read_text())
    else:
        for library in options.what:
            found |= measure(library)
            if options.json:
                _write(options.json, found)
    if not options.json:
        for name, each in found.items():
            _write(RESULTS / f"{name}.json", each)
        PAGE.write_text(page())


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        run(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
