"""The facts of one rank, which the checks of the doctor read.

Ranks collect some facts together: who can read whose memory, and how a Communicator opens it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import resource
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mpi4py

from mpicomm import environment
from mpicomm.cli.arguments import JobLaunch, distribution_version, launch_of
from mpicomm.devices.cuda.driver import call, newest_cuda, visible_devices
from mpicomm.errors import InvalidUsageError, MpicommError


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that a rank sees."""

    uuid: str
    name: str
    unreachable: tuple[str, ...] = ()
    """The UUIDs of visible GPUs with memory that this GPU cannot address, as the driver says."""


@dataclass(frozen=True)
class MemoryFacts:
    """How this rank opens memory of its peers, as a `Communicator` has found."""

    device: str = "cpu"
    uuid: str = ""
    """The UUID of the GPU that the rank uses; "" on the cpu."""
    handle: str = ""
    rejected: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """Why there is no Communicator, or ""."""


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank. Sizes are in bytes."""

    rank: int = 0
    host: str = "host"
    pid: int = 0
    kernel: str = ""
    """The release of Linux."""
    boot_id: str = ""
    namespaces: dict[str, str] = field(default_factory=dict)
    """The namespaces net, ipc, pid and user."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that checks read."""
    shm_device: int = 0
    """The number of the file system /dev/shm."""
    shm_free: int | None = None
    """The free bytes of /dev/shm; None without /dev/shm."""
    locked_limit: int | None = None
    """The memory that this process may lock; None without a limit."""
    infiniband: bool = False
    launch: JobLaunch = field(default_factory=JobLaunch)
    mpiexec: str = ""
    """The path of the first mpiexec on the PATH; "" without one, and for a rank that a launcher has started."""
    mpiexec_family: str = ""
    mpi: str = ""
    """MPI's own description of its library."""
    mpi_error: str = ""
    """Why mpi4py cannot load MPI, or ""."""
    world_size: int | None = None
    """None until MPI has started."""
    threads_multiple: bool = True
    unreadable: tuple[int, ...] = ()
    """Ranks of this machine with memory that process_vm_readv does not read."""
    unreadable_reason: str = ""
    driver: bool = False
    """Whether the kernel has an NVIDIA driver."""
    gpus: tuple[VisibleGpu, ...] = ()
    no_gpu_reason: str = ""
    driver_cuda: int | None = None
    """The major version of CUDA that the driver is for."""
    torch: bool = False
    """Whether PyTorch is installed."""
    cupy: tuple[str, ...] = ()
    """The installed distributions of CuPy."""
    shared_service: bool = False
    """Whether NVIDIA's multi-process service (MPS) runs."""
    memory: MemoryFacts = MemoryFacts()

    @property
    def mpi_name(self) -> str:
        """The loaded library in a few words."""
        return " ".join(self.mpi.partition("\n")[0].partition(",")[0].split())

    @property
    def mpi_family(self) -> str:
        """The family of the loaded library. MPIs of one family start each other's programs."""
        return family_of(self.mpi)


def family_of(text: str) -> str:
    """Return the family of an MPI by its description or by the output of its mpiexec, or "" if it is unknown."""
    if "Open MPI" in text or "prterun" in text or "OpenRTE" in text:
        return "Open MPI"
    if any(name in text for name in ("MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH")):
        return "MPICH"
    return ""


_MPIEXEC_S = 5
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "MPICOMM_HOSTID",
    "MPIR_CVAR_CH4_CMA_ENABLE",
    "OMPI_MCA_smsc",
)
_CAN_LOCK_ALL = 1 << 14  # CAP_IPC_LOCK


def facts_before_mpi() -> RankFacts:
    """Return the facts of this process that need no MPI, because MPI may end the process when it starts. Local.

    It loads MPI's library, but does not start MPI.
    """
    launch = launch_of(os.environ)
    mpiexec, family = ("", "") if launch.size else _find_mpiexec()
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI

        mpi, error = MPI.Get_library_version(), ""
    except (ImportError, RuntimeError) as fault:
        mpi, error = "", " ".join(str(fault).split())
    shm_device, shm_free, locked_limit = 0, None, None
    with suppress(OSError):
        size = os.statvfs("/dev/shm")
        shm_device, shm_free = os.stat("/dev/shm").st_dev, size.f_bavail * size.f_frsize  # noqa: PTH116
    capabilities = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and not capabilities & _CAN_LOCK_ALL:
        locked_limit = limit
    cupy = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
    cuda = newest_cuda()
    return RankFacts(
        host=socket.gethostname(),
        pid=os.getpid(),
        kernel=platform.release(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        namespaces={name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("net", "ipc", "pid", "user")},
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        shm_device=shm_device,
        shm_free=shm_free,
        locked_limit=locked_limit,
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        launch=launch,
        mpiexec=mpiexec,
        mpiexec_family=family,
        mpi=mpi,
        mpi_error=error,
        driver=any(Path(name).exists() for name in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")),
        driver_cuda=cuda[0] if cuda else None,
        torch=distribution_version("torch") is not None,
        cupy=tuple(name for name in cupy if distribution_version(name)),
        shared_service=environment.multi_process_service(),
    )


def _find_mpiexec() -> tuple[str, str]:
    """Return the mpiexec that a shell would start, and its family."""
    path = shutil.which("mpiexec") or shutil.which("mpirun")
    if path is None:
        return "", ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MPIEXEC_S
        )
        return path, family_of(done.stdout)
    return path, ""


_PROBED = 0x6D706963  # the word that the other ranks read


def gather(facts: RankFacts, timeout_s: float, device: str, handle: str) -> list[RankFacts]:
    """Return the facts of all ranks on all ranks. Collective.

    If a rank does not come within ``timeout_s``, the other ranks raise `CollectiveTimeoutError` with its number.
    """
    from mpi4py import MPI

    from mpicomm.cluster.agreement import Group
    from mpicomm.cluster.monitored_barrier import private_copy

    group = Group(private_copy(MPI.COMM_WORLD, "doctor: begin", timeout_s), range(MPI.COMM_WORLD.size), timeout_s)
    word = ctypes.c_uint32(_PROBED)

    def own_facts() -> tuple[RankFacts, int]:
        gpus, reason = _find_gpus()
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        own = replace(facts, rank=group.rank, world_size=group.size, threads_multiple=threads)
        return replace(own, gpus=gpus, no_gpu_reason=reason), ctypes.addressof(word)

    found = group.allgather("doctor: own facts", own_facts)
    unreadable: dict[int, str] = {}
    for peer, address in found:
        # MPI takes ranks with the same host name for ranks of one machine.
        if (peer.boot_id, peer.host) == (facts.boot_id, facts.host) and (error := _probe(peer.pid, address)):
            unreadable[peer.rank] = error
    memory, reason = _open_memory(device, handle), next(iter(unreadable.values()), "")
    own = replace(found[group.rank][0], unreadable=tuple(unreadable), unreadable_reason=reason, memory=memory)
    return group.allgather("doctor: memory", lambda: own)  # until then the others may read the word


def _probe(pid: int, address: int) -> str:
    """Read the word of another process as MPI does for long messages. Return the error, or ""."""
    word, one = ctypes.c_uint32(), ctypes.c_ulong(1)
    iovec, nbytes = ctypes.c_size_t * 2, ctypes.sizeof(word)
    parts = iovec(ctypes.addressof(word), nbytes), one, iovec(address, nbytes), one
    if ctypes.CDLL(None, use_errno=True).process_vm_readv(pid, *parts, ctypes.c_ulong(0)) < 0:
        return os.strerror(ctypes.get_errno())
    return "" if word.value == _PROBED else "it reads another process"


def _open_memory(device: str, handle: str) -> MemoryFacts:
    from mpicomm.api.communicator import Communicator

    try:
        comm = Communicator(device=device, handle=handle)
    except InvalidUsageError:
        raise
    except MpicommError as error:
        return MemoryFacts(error=str(error))
    with comm:
        info = comm.describe()
        uuid = info.device_uuid.hex() if any(info.device_uuid) else ""
        return MemoryFacts(str(info.device), uuid, info.handle, dict(info.rejected))


def _find_gpus() -> tuple[tuple[VisibleGpu, ...], str]:
    """Return the GPUs of this process, and the reason if there are none. Local; starts the driver without a context."""
    try:
        devices = visible_devices()
        driver: Any = importlib.import_module("cuda.bindings.driver")
        return tuple(
            VisibleGpu(
                device.uuid.hex(),
                device.name,
                tuple(
                    peer.uuid.hex()
                    for peer in devices
                    if peer != device and not call(driver.cuDeviceCanAccessPeer, device.ordinal, peer.ordinal)
                ),
            )
            for device in devices
        ), ""
    except MpicommError as error:
        return (), str(error)
