"""This process among others of its job: its forks, its MPI, what ends it, and what it releases before MPI_Finalize."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from mpi4py import MPI

from mpicomm import environment
from mpicomm.activity.layout import ranks_as_text
from mpicomm.activity.page import page
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.log import logger


def node_key() -> str:
    """Return a text that is the same on ranks that can presumably map each other's memory.

    It is MPICOMM_HOSTID, or the boot id of the kernel with the network namespace. The namespace counts because
    descriptors travel over abstract sockets, which belong to a namespace. Host names do not tell: the containers of a
    host have different names, and cloned machines have the same name.
    """
    host_id = environment.host_id()
    if host_id is not None:
        return f"MPICOMM_HOSTID={host_id}"
    return f"{boot_id()}/{namespace('net')}"


def boot_id() -> str:
    """Return the boot id of the running kernel, or the host name without /proc/sys."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def namespace(name: str) -> str:
    """Return the identity of a namespace of this process, such as "net"; "" if the system does not show it."""
    try:
        return str(Path(f"/proc/self/ns/{name}").readlink())
    except OSError:
        return ""


def ranks_in_world(comm: MPI.Intracomm, ranks: Sequence[int]) -> str:
    """Return which ranks of MPI.COMM_WORLD these ranks of ``comm`` are, as `ranks_as_text` does. Local."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = group.Translate_ranks(ranks, world)
    group.Free()
    world.Free()
    return ranks_as_text(found)  # MPI.UNDEFINED, which stands for a process of another job, is negative


def process_number() -> int:
    """Return a number of this process that is unique in its job: its rank in MPI.COMM_WORLD.

    A spawned process has another MPI.COMM_WORLD than its parents, with the same ranks. So its number is its process id.
    """
    return MPI.COMM_WORLD.rank if MPI.Comm.Get_parent() == MPI.COMM_NULL else os.getpid()


def group_by_node(keys: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node; the nodes are in the order of their first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    return list(nodes.values())


is_forked = False
"""Whether this process is a forked child of an MPI process. All its communicators belong to the parent."""


def require_own_process(what: object) -> None:
    """Raise `InvalidUsageError` in a forked child of an MPI process; local and cheap.

    The child shares memory, sockets and its rank with its parent. So peers would take the messages of the child for
    messages of the parent.
    """
    if is_forked:
        raise InvalidUsageError(
            f"{what}: this process was forked from an MPI process, to which the communicator belongs: use it there, or "
            'start processes another way (in multiprocessing, the method "spawn")'
        )


_is_initialized = MPI.Is_initialized  # `install` replaces it for programs that start MPI themselves


def _after_fork() -> None:
    global is_forked
    is_forked = _is_initialized()
    _at_finalize.clear()  # the parent releases its memory


os.register_at_fork(after_in_child=_after_fork)

_at_finalize: weakref.WeakSet[Any] = weakref.WeakSet()
_finalize_keyval = MPI.KEYVAL_INVALID


def release_before_finalize(owner: Any) -> None:
    """Call ``owner.release()`` before MPI_Finalize, unless ``owner`` is gone by then. Local.

    If the program calls MPI_Finalize, an attribute of MPI_COMM_SELF makes the call, because MPI_Finalize deletes these
    attributes before all else (MPI 4.1, section 11.2.4). Otherwise mpi4py calls MPI_Finalize after the interpreter has
    ended. No callback can run then, so atexit makes the call.
    """
    global _finalize_keyval
    if _finalize_keyval == MPI.KEYVAL_INVALID:
        _finalize_keyval = MPI.Comm.Create_keyval(delete_fn=_release_all)
        MPI.COMM_SELF.Set_attr(_finalize_keyval, None)
        atexit.register(_release_all)
    _at_finalize.add(owner)


def _release_all(*_: object) -> None:
    page().enter_final_step("MPI_Finalize")
    while _at_finalize:
        _at_finalize.pop().release()


_LOG_AFTER_S = 2.0  # ranks that all fail leave a block at about the same time, and none of them waits so long
_FORWARD_S = 0.2  # an MPI launcher that has to abort drops output that it has not forwarded yet


@cache  # once per process
def end_job_if_uncaught() -> None:
    """Let an exception that this rank does not catch end the job, as ``python -m mpi4py`` does. Local.

    Otherwise this rank would wait in MPI_Finalize for ranks that wait for it, for ever.
    """
    earlier_hook = sys.excepthook

    def hook(error_type: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        earlier_hook(error_type, error, frames)
        is_alone = MPI.Is_finalized() or not MPI.Is_initialized() or MPI.COMM_WORLD.size == 1
        if not is_alone and not hasattr(sys, "ps1"):  # the interactive prompt goes on
            from mpi4py import run

            sys.stderr.flush()
            time.sleep(_FORWARD_S)
            run.set_abort_status(error)

    sys.excepthook = hook


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Call ``close``, which waits for other ranks, at the end of a ``with`` block, which ``error`` may have left.

    The other ranks may never come. So the traceback is logged if the wait is long, and ``error`` stays the error of the
    block if ``close`` fails, too.
    """
    if not isinstance(error, Exception):
        close()
        return

    def log_traceback() -> None:
        text = "".join(traceback.format_exception(error))
        logger.error("this rank waits for the others at the end of a with block that an exception has left:\n%s", text)

    timer = threading.Timer(_LOG_AFTER_S, log_traceback)
    timer.daemon = True
    timer.start()
    try:
        close()
    except MpicommError as second:
        logger.warning("%s", second)
    finally:
        timer.cancel()


_ALLOC_KINDS = "mpi_memory_alloc_kinds"
_MPICH_GPU_SUPPORT_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
_LIBRARY_NAME = re.compile(r"libmpi(ch)?(_\w+)?\.so[.\d]*")


class CudaAwareness(NamedTuple):
    """Whether calls of MPI accept device pointers, ``None`` if the library does not tell, and how this is known."""

    aware: bool | None
    how: str


def query_cuda_aware() -> CudaAwareness:
    """Query MPI for `CudaAwareness`; local."""
    kinds = MPI.COMM_WORLD.Get_info().Get(_ALLOC_KINDS)
    if kinds is not None and any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return CudaAwareness(True, f"{_ALLOC_KINDS}={kinds}")
    # Kinds without cuda decide nothing, because MPI may list only the kinds that the user asked mpiexec for.
    for library in _loaded_libraries():
        if hasattr(library, "MPIX_Query_cuda_support"):
            return CudaAwareness(bool(library.MPIX_Query_cuda_support()), f"MPIX_Query_cuda_support of {library._name}")
        if hasattr(library, "MPIX_GPU_query_support"):
            supported = ctypes.c_int()
            if library.MPIX_GPU_query_support(_MPICH_GPU_SUPPORT_CUDA, ctypes.byref(supported)) == MPI.SUCCESS:
                return CudaAwareness(bool(supported.value), f"MPIX_GPU_query_support of {library._name}")
    if kinds is not None:
        return CudaAwareness(False, f"{_ALLOC_KINDS}={kinds}")
    return CudaAwareness(None, f"this MPI has neither {_ALLOC_KINDS} nor a query function")


def _loaded_libraries() -> list[ctypes.CDLL]:
    """Return the MPI libraries that this process has loaded. It loads none, because mpi4py would not use it."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = []
    for path in sorted(path for path in paths if _LIBRARY_NAME.fullmatch(Path(path).name)):
        with contextlib.suppress(OSError):  # another file has replaced the library since this process loaded it
            libraries.append(ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_NOLOAD))
    return libraries
