"""The environment variables that mpicomm reads, checked in one place; arguments win over them."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mpicomm.errors import InvalidUsageError
from mpicomm.sizes import nbytes_of

T = TypeVar("T")

PREFIX = "MPICOMM_"
NAMES = (
    *("MPICOMM_DEVICE", "MPICOMM_HANDLE", "MPICOMM_TIMEOUT", "MPICOMM_ORDER", "MPICOMM_REDUCTIONS"),
    *("MPICOMM_HOSTID", "MPICOMM_INTERNODE", "MPICOMM_TUNING", "MPICOMM_MEMORY", "MPICOMM_BIND_CPU"),
    *("MPICOMM_TRACE", "MPICOMM_STATS", "MPICOMM_DEBUG", "MPICOMM_DEBUG_FILE"),
)
"""All variables that mpicomm reads. mpicomm/docs/variables.md has a row for each."""
DEFAULT_TIMEOUT_S = 30.0
LONGEST_TIMEOUT_S = 1e6  # epoll counts milliseconds in 32 bits
_LOCAL_IDS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
"""The variables of Hydra (MPICH, Intel MPI), Open MPI, MVAPICH and Slurm. Slurm's variable comes last, because it may
count the processes of a job step that only launches the ranks."""
HANDLES = ("auto", "ipc", "fd", "fabric", "staged")
"""The values of ``handle=``: "auto", and each ``Kind`` of `mpicomm.devices.handle` except that for host memory."""
INTERNODE = ("mapped", "nccl", "mpi", "pinned")
"""The engines that move device memory between peer domains, the best one first; "mapped" is for a single node."""


def unknown() -> dict[str, str]:
    """Return the variables that begin with `PREFIX` and that mpicomm does not read, each with the nearest name."""
    import difflib

    names = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in NAMES)
    return {name: difflib.get_close_matches(name.upper(), NAMES, 1, cutoff=0)[0] for name in names}


def multi_process_service() -> bool:
    """Return whether NVIDIA's multi-process service (MPS) runs, by which processes share a GPU concurrently.

    Its control daemon listens on a socket of this name, where its clients connect. Every user can make such a file in
    /tmp, so the socket must belong to root or to this user, and somebody must listen.
    """
    path = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")
    try:
        if path.lstat().st_uid not in (0, os.geteuid()):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            # EAGAIN is a full queue, EPROTOTYPE another type of socket: somebody listens.
            return client.connect_ex(str(path)) in (0, errno.EAGAIN, errno.EPROTOTYPE)
    except OSError:
        return False


def _chosen(variable: str, argument: T) -> tuple[str, T | str]:
    """Return the name and the value of an argument, or of its variable if it is set and the argument is "auto"."""
    if argument == "auto" and variable in os.environ:
        return variable, os.environ[variable]
    return variable.removeprefix(PREFIX).lower(), argument


def _one_of(variable: str, values: tuple[str, ...], advice: str, argument: str = "auto") -> str:
    """Return an argument, or its variable if the argument is "auto"; by default the first of ``values``."""
    name, value = _chosen(variable, argument)
    if name != variable and value == "auto":
        return values[0]
    if value not in values:
        raise InvalidUsageError(f"{name}={value!r}{advice}")
    return value


def device(argument: int | str) -> int | str:
    """Return ``device=``, or MPICOMM_DEVICE if the argument is "auto": "auto", "cpu" or an ordinal."""
    name, value = _chosen("MPICOMM_DEVICE", argument)
    if value is not argument and str(value).isdecimal():
        value = int(value)
    if value in ("auto", "cpu") or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise InvalidUsageError(f'{name}={value!r} is no device: use "auto", "cpu" or a device ordinal (0, 1, ...)')


def handle(argument: str) -> str:
    """Return ``handle=``, or MPICOMM_HANDLE if the argument is "auto"."""
    return _one_of("MPICOMM_HANDLE", HANDLES, f" is no handle kind: use one of {', '.join(HANDLES)}", argument)


def reductions(argument: str) -> str:
    """Return ``reductions=``, or MPICOMM_REDUCTIONS if the argument is "auto": "auto" or "ordered"."""
    advice = ": use auto (the fastest way) or ordered (in rank order, never by MPI)"
    return _one_of("MPICOMM_REDUCTIONS", ("auto", "ordered"), advice, argument)


def stream_order(argument: bool | None) -> bool:
    """Return ``stream_order=`` of `mpicomm.install`; if it is None, whether MPICOMM_ORDER is "stream"."""
    if argument is None:
        advice = ": use complete (calls are complete on return) or stream"
        return _one_of("MPICOMM_ORDER", ("complete", "stream"), advice) == "stream"
    if isinstance(argument, bool):
        return argument
    raise InvalidUsageError(f"stream_order={argument!r}: use True, False or None")


def timeout_s(argument: float | None) -> float:
    """Return ``timeout_s=``, or MPICOMM_TIMEOUT, or 30: seconds."""
    source, value = f"timeout_s={argument!r}", argument
    if value is None and "MPICOMM_TIMEOUT" in os.environ:
        text = os.environ["MPICOMM_TIMEOUT"]
        source = f"MPICOMM_TIMEOUT={text!r}"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
    if value is None:
        return DEFAULT_TIMEOUT_S
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= LONGEST_TIMEOUT_S:
        return float(value)
    raise InvalidUsageError(f"{source}: use a positive number of seconds, {LONGEST_TIMEOUT_S:g} at most")


def usable_timeout_s(argument: float | None) -> float:
    """Return `timeout_s`, or 30 if it raises, because the ranks need a deadline to share the error."""
    try:
        return timeout_s(argument)
    except InvalidUsageError:
        return DEFAULT_TIMEOUT_S


def memory_limit_nbytes() -> int | None:
    """Return MPICOMM_MEMORY: the limit of a communicator's GPU memory beyond its arena; None for no limit."""
    text = os.environ.get("MPICOMM_MEMORY")
    if not text:
        return None
    try:
        return nbytes_of(text)
    except ValueError as error:
        raise InvalidUsageError(f"MPICOMM_MEMORY: {error}") from None


def local_id() -> int:
    """Return this process's number among the processes of its job on its machine; 0 if the launcher sets none."""
    for name in _LOCAL_IDS:
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return 0


def host_id() -> str | None:
    """Return MPICOMM_HOSTID: ranks with the same text count as one node. With ``None`` mpicomm detects the nodes."""
    return os.environ.get("MPICOMM_HOSTID") or None


def bind_cpu() -> bool:
    """Return whether MPICOMM_BIND_CPU binds each rank to the cores of its GPU's NUMA node."""
    return _one_of("MPICOMM_BIND_CPU", ("0", "1"), ": use 1 to bind, 0 not to") == "1"


def internode() -> str:
    """Return MPICOMM_INTERNODE: the engine that moves device memory between peer domains, or "auto"."""
    value = _one_of("MPICOMM_INTERNODE", ("auto", *INTERNODE, "staged"), f": use {', '.join(INTERNODE)} or auto")
    return "pinned" if value == "staged" else value  # an alias, because the handle kind "staged" is something else


def debug() -> str:
    """Return MPICOMM_DEBUG: the least severe level that the log shows."""
    value = os.environ.get("MPICOMM_DEBUG", "WARN")
    if value.upper() not in ("WARN", "INFO", "TRACE"):
        raise InvalidUsageError(f"MPICOMM_DEBUG={value!r}: use WARN, INFO or TRACE")
    return value.upper()


def debug_file() -> str | None:
    """Return MPICOMM_DEBUG_FILE: the name of the log file, in which %h, %p and %r stand for host, pid and rank."""
    return os.environ.get("MPICOMM_DEBUG_FILE") or None


@dataclass(frozen=True)
class Recording:
    """The records of calls that the environment enables."""

    trace: str | None
    """MPICOMM_TRACE: the name of the trace file, in which %h, %p and %r stand for host, pid and rank, or "nvtx" for
    NVTX ranges alone."""
    stats: bool
    """MPICOMM_STATS: whether to print a table of the calls at the end of the program."""


def recording() -> Recording | None:
    """Return the records that MPICOMM_TRACE and MPICOMM_STATS enable; None without any."""
    stats = _one_of("MPICOMM_STATS", ("0", "1"), ": use 1 for a table of the calls at the end, 0 for none")
    trace = os.environ.get("MPICOMM_TRACE") or None
    if trace is not None and trace.endswith("/"):
        raise InvalidUsageError(f'MPICOMM_TRACE={trace!r} names a folder: name a file, as in "{trace}trace-%r.json"')
    return Recording(trace, stats == "1") if trace is not None or stats == "1" else None


def tuning() -> str | None:
    """Return MPICOMM_TUNING: a file with a table of algorithms, or "off" for the built-in table."""
    return os.environ.get("MPICOMM_TUNING") or None


def cache_directory() -> Path | None:
    """Return the directory for compiled kernels and measured tables, which it makes. Local.

    It is None if this user cannot write one, or others can, because the kernels there are run.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    directory: Path | None = None
    # The XDG specification ignores an unset, an empty and a relative path alike. A user may have no home.
    with contextlib.suppress(OSError, RuntimeError):
        directory = (base if base.is_absolute() else Path.home() / ".cache") / "mpicomm"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        if directory is not None and directory.stat().st_uid == os.geteuid():
            with contextlib.suppress(OSError):
                directory.chmod(0o700)
            if not directory.stat().st_mode & 0o022:
                return directory
    return None
