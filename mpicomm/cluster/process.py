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
    """Return a text that is the same on ranks that presumably reach each other's memory.

    It is MPICOMM_HOSTID, or the boot id of the kernel with the network namespace. The namespace counts because
    descriptors travel over abstract sockets, which belong to a namespace. Host names say nothing: the containers of a
    host have different names, and cloned machines have the same name.
    """
    given = environment.host_id()
    if given is not None:
        return f"MPICOMM_HOSTID={given}"
    return f"{boot_id()}/{namespace('net')}"


def boot_id() -> str:
    """Return a text that tells a running kernel from all others: its boot id, or the host name without /proc/sys."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def namespace(name: str) -> str:
    """Return a text that tells a namespace of this process from others; "" if the system does not show it."""
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
    """Return the number that tells this process from all others of its job: its rank in MPI.COMM_WORLD.

    A process that MPI has spawned has its private MPI.COMM_WORLD, and its parents have the same ranks in theirs. So
    the number of a spawned process is its process id.
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

    The child shares memory and its place in every queue with its parent. So peers would take the messages of the child
    for messages of the parent.
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


_SILENT_S = 2.0  # ranks that fail alike leave a block at about the same time, and none of them waits
_FORWARD_S = 0.2  # an MPI launcher that has to abort drops output that it has not forwarded yet


@cache  # once per process
def end_job_if_uncaught() -> None:
    """Let an exception that this rank does not catch end the job, as ``python -m mpi4py`` does. Local.

    Otherwise this rank would wait in MPI_Finalize for ranks that wait for it, for ever.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        before(kind, error, place)
        is_alone = MPI.Is_finalized() or not MPI.Is_initialized() or MPI.COMM_WORLD.size == 1
        if not is_alone and not hasattr(sys, "ps1"):  # the interactive prompt goes on
            from mpi4py import run

            sys.stderr.flush()
            time.sleep(_FORWARD_S)
            run.set_abort_status(error)

    sys.excepthook = hook


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Call ``close``, which waits for other ranks, at the end of a ``with`` block that ``error`` has left, if any.

    The other ranks may never come. So the traceback is logged before a long wait, and ``error`` stays the error that
    the caller sees if ``close`` fails.
    """
    if not isinstance(error, Exception):
        close()
        return

    def say() -> None:
        text = "".join(traceback.format_exception(error))
        logger.error("this rank waits for the others at the end of a with block that an exception has left:\n%s", text)

    timer = threading.Timer(_SILENT_S, say)
    timer.daemon = True
    timer.start()
    try:
        close()
    except MpicommError as late:
        logger.warning("%s", late)
    finally:
        timer.cancel()


_ALLOC_KINDS = "mpi_memory_alloc_kinds"
_MPICH_GPU_SUPPORT_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
_LIBRARY_NAME = re.compile(r"libmpi(ch)?(_\w+)?\.so[.\d]*")


class CudaAwareness(NamedTuple):
    """The answer, or ``None`` if the library does not say, and the source of the answer."""

    aware: bool | None
    how: str


def query_cuda_aware() -> CudaAwareness:
    """Ask MPI whether its calls accept device pointers; local."""
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
    """Return the MPI libraries in this process. It loads none, because mpi4py would not use that library."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = []
    for path in sorted(path for path in paths if _LIBRARY_NAME.fullmatch(Path(path).name)):
        with contextlib.suppress(OSError):  # another file has replaced the library since this process loaded it
            libraries.append(ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_NOLOAD))
    return libraries
