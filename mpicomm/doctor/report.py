"""Runs all checks, reports their faults to people and in JSON, and writes mpicomm/docs/troubles.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpicomm.doctor import gpu_checks, mpi_checks
from mpicomm.doctor.check import Check, Job

CHECKS: tuple[Check, ...] = (*mpi_checks.CHECKS, *gpu_checks.CHECKS)

_HEAD = """\
# Troubles

This page is for users whose program does not start, crashes, hangs, or finds no GPUs.

Start the doctor as you start the program:

```
mpirun -np 4 python -m mpicomm.doctor
```

The doctor prints each trouble that it finds, with its ranks and its fix, and exits with 1 if it finds one.

## The program hangs

The checks above do not find the cause of a hang. `--pid` shows which rank the others wait for. Leave the program
running, and start the doctor beside it:

```
python -m mpicomm.doctor --pid PID    # PID of a rank or of mpirun
python -m mpicomm.doctor --job        # all jobs of this user
```

The doctor also shows the call that each rank makes.

If one rank raises, the others may wait for ever. Start the program by `mpirun -np 4 python -m mpicomm PROGRAM`: an
error that a rank does not catch then ends the job. Ranks that wait in MPI for each other raise nothing. If they have
called collectives on GPUs in another order than collectives on the host, each of them logs an error. Pass
`algorithm="one_shot"` to calls on host arrays: ranks that make different calls then raise an error with the call of
each rank.

## Errors of MPI and PyTorch

The doctor does not find these, because they are in the program.

| symptom | fix |
|---|---|
| `Message truncated`, `Abort(...)` by MPI | ranks pass different counts or types; `algorithm="one_shot"` shows both |
| `environment variable RANK expected, but not set` | `import mpicomm.torch` before `init_process_group("mpicomm")` |

## Arrays of stream-ordered pools

`register` takes an array of `cudaMallocAsync` only if its pool was made for export. The default pool was not. Make such
a pool before the arrays:

```python
import cupy
from mpi4py import MPI

import mpicomm

with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
    cuda = cupy.cuda.runtime
    kind = cuda.cudaMemAllocationTypePinned, cuda.cudaMemHandleTypePosixFileDescriptor, cuda.cudaMemLocationTypeDevice
    cuda.deviceSetMemPool(comm.device, cuda.memPoolCreate(cuda.MemPoolProps(*kind, comm.device)))
    cupy.cuda.set_allocator(cupy.cuda.malloc_async)
    x = cupy.full(1000, comm.rank)
    with comm.register(x) as a:
        assert (a.get((comm.rank + 1) % comm.size) == (comm.rank + 1) % comm.size).all()
```

The pool is the current pool of the GPU then. So `cupy.cuda.MemoryAsyncPool()` and PyTorch's `backend:cudaMallocAsync`
allocate in it, too. PyTorch's `backend:native` needs no such pool.

## Other troubles

The doctor finds all of these. Look up the symptom here if the doctor cannot run.
"""


def examine(job: Job, checks: Sequence[Check] = CHECKS) -> list[tuple[Check, list[str]]]:
    """Return each check with the faults that it finds."""
    return [(check, check.find(job)) for check in checks]


def lines(results: Sequence[tuple[Check, list[str]]]) -> list[str]:
    """Return the lines for people."""
    shown = []
    for check, faults in results:
        shown += [f"FAULT {check.name}: {fault}" for fault in faults]
        shown.append(f"      fix: {check.fix}" if faults else f"ok    {check.name}: {check.title}")
    return shown


def record(job: Job, results: Sequence[tuple[Check, list[str]]]) -> dict[str, Any]:
    """Return the JSON object."""
    return {
        "checks": [{"name": check.name, "faults": faults, "fix": check.fix} for check, faults in results],
        "ranks": [dataclasses.asdict(one) for one in job],
    }


def document() -> str:
    """Return the text of mpicomm/docs/troubles.md."""
    rows = [f"| {check.symptom} | {check.fix} |" for check in CHECKS]
    return "\n".join([_HEAD, "| symptom | fix |", "|---|---|", *rows, ""])
