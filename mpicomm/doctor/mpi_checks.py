"""Checks of MPI: its library, its launcher, and how ranks of one machine reach each other through it."""

from __future__ import annotations

from mpicomm.doctor.check import Check, Job, by_machine, having
from mpicomm.errors import name_ranks
from mpicomm.sizes import format_size

# MPICH with 3 ranks had 16 MiB in use at once. Open MPI and NCCL take up to 10 MiB for each rank.
SHM_NBYTES_PER_RANK = 16 << 20


def library(job: Job) -> list[str]:
    """MPI's library does not load."""
    return [f"mpi4py finds no library of an MPI that it is built for: {one.mpi_error}" for one in job if one.mpi_error]


def launcher(job: Job) -> list[str]:
    """The program that started the ranks belongs to another MPI than the library."""
    one = job[0]
    if one.world_size is None:
        # Open MPI's mpiexec can start MPICH with PMIx. It ends the process of any other MPICH.
        ends = one.launch.family == "Open MPI" and one.mpi_family == "MPICH" and "pmix" not in one.mpi.lower()
        if not ends:
            return []
        became = "it cannot start"
    elif one.world_size == 1 < one.launch.size:
        became = "each rank is alone in MPI.COMM_WORLD"
    else:
        return []
    return [f"{one.launch.family} has started {one.launch.size} ranks, but mpi4py uses {one.mpi_name}: {became}"]


def mpiexec(job: Job) -> list[str]:
    """The mpiexec that a shell finds belongs to another MPI. A rank that a launcher has started has no such fact."""
    return [
        f"{one.mpiexec} belongs to {one.mpiexec_family}, but mpi4py uses {one.mpi_name}"
        for one in job
        if one.mpiexec_family and one.mpi_family and one.mpiexec_family != one.mpi_family
    ]


def threads(job: Job) -> list[str]:
    """MPI allows only one thread."""
    found = having(job, lambda one: not one.threads_multiple)
    return [f"MPI on {name_ranks(found)} has started with less than MPI.THREAD_MULTIPLE"] if found else []


def shm(job: Job) -> list[str]:
    """/dev/shm is too small for the ranks of a machine."""
    found = []
    for machine in by_machine(job):
        for device in sorted({one.shm_device for one in machine}):
            here = [one for one in machine if one.shm_device == device]
            first = here[0]
            count = max(len(here), first.launch.local_size if first.world_size is None else 1)
            free = min(one.shm_free or 0 for one in here)
            if count > 1 and free < count * SHM_NBYTES_PER_RANK:
                has = "is missing" if first.shm_free is None else f"has {format_size(free)} free"
                found.append(
                    f"/dev/shm on {first.host} {has}; {count} ranks may need {count * SHM_NBYTES_PER_RANK >> 20} MiB"
                )
    return found


def networks(job: Job) -> list[str]:
    """Ranks of one kernel are in several network namespaces."""
    kernels: dict[str, dict[str, list[int]]] = {}
    for one in job:
        if "MPICOMM_HOSTID" not in one.variables:
            kernels.setdefault(one.boot_id, {}).setdefault(one.namespaces.get("net", ""), []).append(one.rank)
    return [
        f"one machine holds {' and '.join(map(name_ranks, groups.values()))} in different network namespaces, so they "
        "count as ranks of several nodes and open no memory of each other"
        for groups in kernels.values()
        if len(groups) > 1
    ]


def process_memory(job: Job) -> list[str]:
    """MPI cannot copy from the memory of another process."""
    found = []
    for one in job:
        switched_off = (
            one.variables.get("MPIR_CVAR_CH4_CMA_ENABLE") == "0"
            if one.mpi_family == "MPICH"
            else "^cma" in one.variables.get("OMPI_MCA_smsc", "")
        )
        if one.unreadable and not switched_off:
            names = [name for name in ("pid", "user") if len({o.namespaces.get(name) for o in job}) > 1]
            why = f"their {' and '.join(names)} namespaces differ" if names else "seccomp or Yama forbids it"
            found.append(
                f"rank {one.rank} cannot read memory of {name_ranks(one.unreadable)} ({one.unreadable_reason}), "
                f"as MPI does for long messages: {why}"
            )
    return found


def locked(job: Job) -> list[str]:
    """The limit of locked memory is too low for network cards or pinned memory."""
    found = []
    for one in job:
        limit = one.locked_limit
        if limit is not None and (one.infiniband or "staged" in one.memory.rejected):
            who = "InfiniBand registers memory" if one.infiniband else "pinned memory was refused"
            found.append(f"rank {one.rank} may lock {format_size(limit)} of memory, and {who}")
    return found


CHECKS = (
    Check(
        "library",
        "mpi4py finds the library of its MPI",
        '`pip install "mpi4py>=4.1" mpich`, or unset `MPI4PY_MPIABI` and `MPI4PY_LIBMPI`',
        library,
        before_mpi=True,
    ),
    Check(
        "launcher",
        "the launcher starts ranks of the MPI of mpi4py",
        "`$(dirname $(which python))/mpiexec -n N ...` for an MPI of pip, else the mpiexec of that MPI; "
        "`srun --mpi=list` shows what Slurm can start",
        launcher,
        before_mpi=True,
    ),
    Check(
        "mpiexec",
        "the first mpiexec on the PATH belongs to this MPI",
        "`export PATH=$(dirname $(which python)):$PATH` for an MPI of pip, else the folder of that MPI's mpiexec",
        mpiexec,
    ),
    Check(
        "threads",
        "MPI lets several threads call it at once",
        "unset `MPI4PY_RC_THREAD_LEVEL`",
        threads,
    ),
    Check(
        "shm",
        "/dev/shm is large enough for the ranks",
        "`docker run --shm-size=1g ...`; in Kubernetes an emptyDir with `medium: Memory` at /dev/shm",
        shm,
        before_mpi=True,
    ),
    Check(
        "network",
        "the ranks of a machine share its network",
        "`docker run --network=host --ipc=host --pid=host ...`; in Kubernetes one pod per machine",
        networks,
    ),
    Check(
        "process-memory",
        "MPI may read the memory of other processes",
        "`docker run --pid=host --cap-add=SYS_PTRACE ...`, or `MPIR_CVAR_CH4_CMA_ENABLE=0` for MPICH, "
        "`OMPI_MCA_smsc=^cma` for Open MPI",
        process_memory,
    ),
    Check(
        "locked",
        "ranks may lock the memory that they need",
        "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1 ...`",
        locked,
    ),
)
