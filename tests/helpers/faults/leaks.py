"""Resources that a test must give back: file descriptors, mapped shared memory, threads, files in /dev/shm."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Threads end, and other ranks free their part, a little after a call has returned.
PATIENCE_S = 1.0
_PAUSE_S = 1e-3  # most take less, and hundreds of tests wait here
# Files in /dev/shm that other MPI jobs create at any time, and that the CUDA driver creates once per process.
OF_OTHERS = ("mpich", "ucx_", "ompi", "vader", "sm_segment.", "sem.", "cuda.shm.")
# Files of Python's SharedMemory: tests that run beside this one create them, mpicomm only opens them.
NOT_MADE_HERE = (*OF_OTHERS, "psm_")


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fail if the block leaves resources, and name them."""
    from mpicomm.activity.page import page  # not above, because it starts MPI, before which some programs fork

    page()  # the first communicator of a process makes the page, and the page stays until the process ends
    gc.collect()
    before = _resources()
    yield
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while leaked := _resources() - before:
        if time.monotonic() > deadline:
            raise AssertionError("leaked: " + ", ".join(sorted(leaked)))
        time.sleep(_PAUSE_S)


def collect_only_new_objects() -> None:
    """Exempt the present objects from the garbage collections of `nothing_leaks`, because these take long with them."""
    gc.collect()
    gc.freeze()


def _resources() -> set[str]:
    return _descriptors() | _mappings() | _threads() | shared_files()


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        # The descriptor that listed the directory is closed by now.
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not os.path.basename(target).startswith(OF_OTHERS):
                found.add(f"fd {fd} -> {target}")
    return found


def _mappings() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {f"mapping {line}" for line in lines if "/memfd:mpicomm" in line}


def _threads() -> set[str]:
    return {f"thread {tid}" for tid in os.listdir("/proc/self/task")}


def shared_files() -> set[str]:
    """Return the files in /dev/shm, without those that other programs make there."""
    found = set()
    with os.scandir("/dev/shm") as files:
        for file in files:
            # Other processes, above all other MPI jobs, create and remove files here meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not file.name.startswith(NOT_MADE_HERE) and file.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(file.path)
    return found
