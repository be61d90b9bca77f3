"""Facts: the doctor's knowledge of one rank. Checks read nothing else, so tests can make facts by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpicomm.cli.launch import JobLaunch


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
    cupy: tuple[str, ...] = ()
    """The installed distributions of CuPy."""
    torch: bool = False
    """Whether PyTorch is installed."""
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
