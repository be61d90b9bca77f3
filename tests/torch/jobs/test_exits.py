"""A program ends well although a thread of the backend is about to drop its works."""

from __future__ import annotations

from tests.helpers.jobs.mpiexec import run_job

PROGRAM = """
import atexit, threading, time
import torch, torch.distributed as dist
import mpicomm.torch
from mpicomm.torch.works import MessageWork

over, main, has_ended = MessageWork.is_completed, threading.current_thread(), threading.Event()

def held(work):  # until the program ends, when the thread drops all works at once
    done = over(work)
    if done and threading.current_thread() is not main:
        has_ended.wait()
    return done

MessageWork.is_completed = MessageWork.advance = held
dist.init_process_group("mpicomm")
peer = 1 - dist.get_rank()
works = [call(torch.ones(3), peer) for _ in range(1000) for call in (dist.isend, dist.irecv)]
for work in works:
    work.wait()
del works, work
dist.destroy_process_group()

def end():
    has_ended.set()
    time.sleep(1e-4)

atexit.register(end)
"""


def test_works_that_a_thread_drops_while_python_ends_abort_nothing() -> None:
    result = run_job(2, "-c", PROGRAM, MPICOMM_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr
