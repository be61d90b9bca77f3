"""Jobs that do not free their communicators end at once, with the right exit code, and without noise."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.helpers.faults.leaks import NOT_MADE_HERE
from tests.helpers.jobs.mpiexec import environment, mpiexec_command, run_job, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S, stretched

PRELUDE = """
import gc, os, sys, time
import numpy as np
from mpi4py import MPI
import mpicomm
def made():
    comm = mpicomm.Communicator(MPI.COMM_WORLD, device="cpu")
    child = comm.Split(0, -comm.rank)
    array, event, of_child = comm.zeros(1000), comm.shared_event(), child.zeros(1000)
    array.peer((comm.rank + 1) % comm.size)[comm.rank] = 1
    return comm, child, array, event, of_child, array.peer(0)
def reduce():
    comm.Allreduce(MPI.IN_PLACE, np.ones(1000), algorithm="one_shot")
comm, child, array, event, of_child, view = made()
comm.Barrier()
"""


def files() -> set[str]:
    """The files in /dev/shm, without the files of MPI and of other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(NOT_MADE_HERE)}


def require_end(code: str, status: int = 0, *options: str, said: str = "") -> None:
    before = files()
    result = run_job(2, *options, "-c", PRELUDE + code)
    assert result.returncode == status, result.stderr
    if said:
        assert said in result.stderr
    else:
        assert result.stderr == ""
    assert files() <= before


def test_ends_are_clean_and_keep_the_exit_code_whatever_is_left() -> None:
    code = """
import threading
freed, collected, left, arrays = made(), [*made()], made(), [*made()]
freed[0].Free()  # without its child
# Communicators first, then their arrays.
array_of, event_of, of_its_child, view_of = collected[2:]
del collected
gc.collect()
array_of.local[:] = 2
assert of_its_child.peer(1)[0] == 0
del array_of, event_of, of_its_child
gc.collect()
assert view_of[0] in (0, 1, 2)
# Arrays alone.
del arrays[2:]
gc.collect()
arrays[0].zeros(3)
# Cycles, which the collector ends, and which modules keep that end later than mpicomm.
cycle = made()
for each in cycle[:5]:
    each.itself = [each, *cycle]
del cycle, each
gc.collect()
MPI.kept, sys.kept = left[0].Dup(), left[0].Split()
left[2].itself, left[0].itself = [left[2], left[0]], [left[0], left[3]]
sys.itself = left[0]
# An error caught, and one Free less.
other = mpicomm.Communicator(MPI.COMM_SELF, device="cpu")
other.zeros(3)
if comm.rank == 0:
    other.Free()
try:
    with arrays[0]:
        raise ValueError
except ValueError:
    pass
reduce()
waiting = comm.Dup()
waiting.zeros(1)
for wait in (lambda: array.wait_signal(0), lambda: comm.rank or reduce(), lambda: comm.rank or waiting.zeros(2)):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.1)
sys.exit(3)
"""
    require_end(code, 3)


def test_the_end_of_mpi_is_clean_whatever_is_left() -> None:
    code = """
of_block, collected = made(), [*made()]
reduce()
with of_block[0], of_block[1], of_block[2]:
    MPI.Finalize()
repr(comm)
array.close()
event.close()
child.Free()
comm.Free()
del collected
gc.collect()
"""
    require_end(code)


@pytest.mark.parametrize(
    ("rank", "block", "runner"),
    [
        (0, "comm", ()),
        (1, "child, comm.zeros(4)", ("-m", "mpi4py")),
        (0, "contextlib.nullcontext()", ("-m", "mpi4py")),
    ],
)
def test_exception_of_one_rank_ends_the_job(rank: int, block: str, runner: tuple[str, ...]) -> None:
    code = f"""
import contextlib
comm._session.shorten_deadline(0.5)
child._session.shorten_deadline(0.5)
with {block}:
    if comm.rank == {rank}:
        raise ValueError("the cause")
    comm.Allreduce(np.ones(8), np.empty(8))
"""
    require_end(code, 1, *runner, said="ValueError: the cause")


def test_the_traceback_comes_before_a_long_wait() -> None:
    code = """
with comm:
    if comm.rank == 1:
        raise ValueError("the cause")
    time.sleep(60)
"""
    command = mpiexec_command(2, "-c", PRELUDE + code)
    variables = {**sharing_of_cores(2), **environment()}
    with subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        said = [next(job.stderr) for _ in range(5)]
        job.kill()
    assert "waits for the others at the end of a with block" in said[0] and "the cause" in "".join(said), said


def test_error_of_all_ranks_ends_the_job() -> None:
    code = "comm.empty(-1 if comm.rank == 1 else 1)"
    require_end(code, 1, "-m", "mpi4py", said="rank 1: shape=(-1,) has a negative size")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_did_not_come_keeps_no_rank_from_ending(rank: int) -> None:
    require_end(f"""
impatient = mpicomm.Communicator(device="cpu", timeout_s={stretched(0.5)})
impatient.zeros(3)
if comm.rank != {rank}:
    try:
        impatient.zeros(4)
    except mpicomm.CollectiveTimeoutError:
        impatient.Free()
comm.Barrier()
""")


@pytest.mark.parametrize("where", ["array.wait_signal(0)", "reduce()", "comm.zeros(5)"])
def test_interrupt_ends_the_job(where: str) -> None:
    code = f"""
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have it ignored
reduce()
comm.Barrier()
if comm.rank == 1:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    {where}
else:
    time.sleep({HANG_S})
"""
    require_end(code, 130, "-m", "mpi4py", said="KeyboardInterrupt")


def test_forked_process_is_refused_and_its_parent_goes_on() -> None:
    code = """
import atexit
reduce()
unused = comm.Dup()
child_process = os.fork()
if child_process == 0:
    try:
        calls = (
            lambda: comm.zeros(1), lambda: comm.shared_event(), comm.check, reduce, array.close, event.close,
            lambda: array.put(array.local, 0), lambda: array.get(0), lambda: array.signal(0),
            lambda: array.wait_signal(0), lambda: array.peer(1), lambda: unused.zeros(1), lambda: child.zeros(1),
            lambda: mpicomm.Communicator(MPI.COMM_WORLD),
        )
        for number, call in enumerate(calls):
            try:
                call()
            except mpicomm.InvalidUsageError as error:
                assert "forked" in str(error), (number, error)
            else:
                raise AssertionError(number)
        with comm, child, unused:
            pass
        atexit._run_exitfuncs()
        del comm, child, unused, array, event, of_child, view, calls, call
        gc.collect()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child_process, 0)
assert status == 0
reduce()
array.put(np.full(1000, 7.0), (comm.rank + 1) % comm.size)
array.signal((comm.rank + 1) % comm.size)
array.wait_signal((comm.rank - 1) % comm.size)
assert (array.local == 7).all()
unused.zeros(1)
for each in (unused, child, comm):
    each.Free()
"""
    # MPI has a thread, and Python 3.12 warns of every fork beside a thread.
    require_end(code, 0, "-W", "ignore:This process:DeprecationWarning")


def test_no_module_calls_mpi_before_the_program_starts_it() -> None:
    code = """
import importlib, pkgutil
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import mpicomm
for found in pkgutil.walk_packages(mpicomm.__path__, "mpicomm."):
    try:
        importlib.import_module(found.name)
    except ImportError as error:  # CuPy and the like need not be here
        assert not error.name.startswith("mpicomm"), error
assert not MPI.Is_initialized()
def refused(text):
    try:
        mpicomm.Communicator()
    except mpicomm.InvalidUsageError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
refused("call MPI.Init()")
MPI.Init()
with mpicomm.Communicator(device="cpu") as comm:
    assert comm.allreduce(1) == 1
MPI.Finalize()
refused("MPI has ended")
"""
    result = run_job(1, "-c", code)
    assert result.returncode == 0, result.stderr
