"""The checks of the doctor, pure functions of the facts of all ranks, and the report of their faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mpicomm.doctor.facts import RankFacts
from mpicomm.errors import name_ranks
from mpicomm.sizes import format_size

# MPICH with 3 ranks had 16 MiB in use at once. Open MPI and NCCL take up to 10 MiB for each rank.
SHM_NBYTES_PER_RANK = 16 << 20

Job = Sequence[RankFacts]
"""The facts of all ranks, in order. Before MPI has started, only the facts of this rank."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A fault that may occur between ranks. mpicomm/docs/troubles.md has a row with its symptom and its fix."""

    name: str
    title: str
    """The statement that is true without a fault."""
    fix: str
    """A command or a setting."""
    find: Callable[[Job], list[str] | None]
    """Returns a sentence for each fault, with the ranks and values of this job; None if there is nothing to check."""
    nothing: str = ""
    """Why there may be nothing to check."""
    before_mpi: bool = False
    """Whether the fault may end the process when MPI starts, so that the doctor must find it before."""


def by_machine(job: Job) -> list[list[RankFacts]]:
    """Return the ranks of each machine: one kernel, and one host name, because MPI tells machines by host names."""
    machines: dict[tuple[str, str], list[RankFacts]] = {}
    for one in job:
        machines.setdefault((one.boot_id, one.host), []).append(one)
    return list(machines.values())


def having(job: Job, condition: Callable[[RankFacts], bool]) -> list[int]:
    """Return the ranks that fulfil a condition."""
    return [one.rank for one in job if condition(one)]


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


def driver(job: Job) -> list[str]:
    """There is an NVIDIA driver, but a rank cannot use its GPUs."""
    reasons: dict[str, list[int]] = {}
    for one in job:
        newer = [name for name in one.cupy if one.driver_cuda and _cuda_of(name) > one.driver_cuda]
        if len(one.cupy) > 1:
            reason = f"several CuPys are installed and overwrite each other: {', '.join(one.cupy)}"
        elif newer:
            reason = f"{newer[0]} needs a newer driver than this one, which is for CUDA {one.driver_cuda}"
        elif one.driver and not one.gpus:
            reason = one.no_gpu_reason
        else:
            continue
        reasons.setdefault(reason, []).append(one.rank)
    return [f"{name_ranks(found)}: {reason}" for reason, found in reasons.items()]


def _cuda_of(cupy: str) -> int:
    """Return the CUDA that a distribution of CuPy is for, or 0 for a build from source."""
    return int(cupy.removeprefix("cupy-cuda").removesuffix("x")) if cupy.startswith("cupy-cuda") else 0


def visible(job: Job) -> list[str]:
    """A rank cannot open the memory of a GPU that it does not see.

    CUDA opens the memory of a GPU that CUDA_VISIBLE_DEVICES hides, but not of a GPU that a cgroup keeps from the
    process. So a hidden GPU is a fault only if a Communicator was refused.
    """
    found = []
    for machine in by_machine(job):
        for one in machine:
            seen = {gpu.uuid for gpu in one.gpus}
            hidden = [peer.rank for peer in machine if peer.memory.uuid and peer.memory.uuid not in seen]
            refused = one.memory.error or one.memory.rejected.get("ipc")
            if seen and hidden and refused:
                mask = one.variables.get("CUDA_VISIBLE_DEVICES")
                how = "a cgroup may hide it" if mask is None else f"not only CUDA_VISIBLE_DEVICES={mask} may hide it"
                gpu = f"the GPU of {name_ranks(hidden)}"
                found.append(f"rank {one.rank} does not see {gpu} ({how}), and cannot open its memory: {refused}")
    return found


def shared(job: Job) -> list[str]:
    """Ranks share a GPU without the multi-process service."""
    users: dict[str, list[int]] = {}
    for one in job:
        if one.memory.uuid and not one.shared_service:
            users.setdefault(one.memory.uuid, []).append(one.rank)
    return [
        f"{name_ranks(found)} share a GPU, and NVIDIA's multi-process service does not run, so their kernels take turns"
        for found in users.values()
        if len(found) > 1
    ]


def instances(job: Job) -> list[str]:
    """Ranks are on several MIG instances."""
    found = []
    for machine in by_machine(job):
        users = {
            one.memory.uuid: one.rank
            for one in machine
            if any(gpu.uuid == one.memory.uuid and " MIG " in gpu.name for gpu in one.gpus)
        }
        if len(users) > 1:
            found.append(f"{name_ranks(list(users.values()))} use different MIG instances, which share no memory")
    return found


def windows(job: Job) -> list[str]:
    """WSL2 does not share GPU memory."""
    found = having(job, lambda one: "microsoft" in one.kernel.lower() and bool(one.memory.rejected or one.memory.error))
    return [f"{name_ranks(found)}: the driver of Windows below WSL2 refuses to share GPU memory"] if found else []


def access(job: Job) -> list[str]:
    """GPUs of ranks cannot address each other's memory."""
    found = []
    for machine in by_machine(job):
        for one in machine:
            for own in one.gpus:
                peers = [peer.rank for peer in machine if peer.memory.uuid in own.unreachable]
                if own.uuid == one.memory.uuid and peers:
                    found.append(
                        f"the GPU of rank {one.rank}, {own.name}, has no peer access to the GPU of {name_ranks(peers)}"
                    )
    return found


def memory(job: Job) -> list[str]:
    """Ranks cannot open each other's memory, or not in the best way."""
    explained = any(check(job) for check in (visible, instances, windows, access))
    reasons: dict[str, list[int]] = {}
    for one in job:
        if one.memory.error:
            reasons.setdefault(one.memory.error, []).append(one.rank)
        elif "ipc" in one.memory.rejected and not explained:
            differ = [name for name in ("ipc", "pid") if len({peer.namespaces.get(name) for peer in job}) > 1]
            why = f" (the ranks are in different {' and '.join(differ)} namespaces)" if differ else ""
            reasons.setdefault(f"CUDA IPC is refused{why}: {one.memory.rejected['ipc']}", []).append(one.rank)
    return [f"{name_ranks(found)}: {reason}" for reason, found in reasons.items()]


def pytorch(job: Job) -> list[str] | None:
    """PyTorch allocates memory that no peer can open."""
    found, setting, names = [], "backend:cudaMallocAsync", ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if not any(one.torch or any(name in one.variables for name in names) for one in job):
        return None
    for name in names:
        having_it = having(job, lambda one, n=name: setting in one.variables.get(n, "").replace(" ", ""))  # type: ignore[misc]
        if having_it:
            found.append(f"{name} on {name_ranks(having_it)} has {setting}: no peer can open such memory")
    return found


CHECKS: tuple[Check, ...] = (
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
    Check(
        "driver",
        "no GPU is unused because a driver or package is missing",
        '`pip uninstall cupy-cuda12x cupy-cuda13x`, then `pip install -e ".[cuda13]"` (or cuda12, as `nvidia-smi` '
        "shows); `docker run --gpus all ...`",
        driver,
    ),
    Check(
        "visible",
        "no cgroup keeps ranks from the GPUs of their peers",
        "in Slurm `--gpus-per-node` in place of `--gpus-per-task` and `--gpu-bind`; `docker run --gpus all ...`",
        visible,
    ),
    Check(
        "shared",
        "no ranks take turns on a GPU",
        "`mpirun -np` with one rank per GPU, or `nvidia-cuda-mps-control -d`",
        shared,
    ),
    Check(
        "mig",
        "no ranks are on different MIG instances",
        "`sudo nvidia-smi -i GPU -mig 0`, or all ranks on one instance",
        instances,
    ),
    Check(
        "wsl",
        "no driver of Windows keeps GPU memory from ranks",
        "Linux itself, or `MPICOMM_HANDLE=staged`",
        windows,
    ),
    Check(
        "access",
        "each GPU has access to the GPUs of its peers",
        "`nvidia-smi topo -p2p r` shows the reason; switch ACS and the IOMMU off in the BIOS (`iommu=off`), or use "
        "`MPICOMM_HANDLE=staged`",
        access,
    ),
    Check(
        "memory",
        "ranks open each other's memory in the best way",
        "`docker run --ipc=host --pid=host ...`, or `MPICOMM_HANDLE=fd`; `python -m mpicomm.info` shows all reasons",
        memory,
    ),
    Check(
        "pytorch",
        "PyTorch allocates memory that peers can open",
        "`export PYTORCH_CUDA_ALLOC_CONF=backend:native`",
        pytorch,
        nothing="no rank has PyTorch, or a setting for it",
    ),
)

Results = Sequence[tuple[Check, list[str] | None]]
"""Each check with the faults that it has found; None if there was nothing to check."""


def examine(job: Job, checks: Sequence[Check] = CHECKS) -> Results:
    """Make checks of a job."""
    return [(check, check.find(job)) for check in checks]


def lines(results: Results) -> list[str]:
    """Return the lines for people."""
    shown = []
    for check, faults in results:
        if faults:
            shown += [*(f"FAULT {check.name}: {fault}" for fault in faults), f"      fix: {check.fix}"]
        elif faults is None:
            shown.append(f"skip  {check.name}: {check.nothing}")
        else:
            shown.append(f"ok    {check.name}: {check.title}")
    return shown


def record(job: Job, results: Results) -> dict[str, Any]:
    """Return the JSON object."""
    return {
        "checks": [
            {"name": check.name, "faults": faults or [], "fix": check.fix, "skipped": faults is None}
            for check, faults in results
        ],
        "ranks": [dataclasses.asdict(one) for one in job],
    }
