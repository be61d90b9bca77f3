"""The checks of the doctor, pure functions of the facts of all ranks, and the report of their faults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mpicomm.doctor.facts import RankFacts
from mpicomm.errors import name_ranks
from mpicomm.sizes import format_size

# MPICH with 3 ranks had 16 MiB in use at once. Open MPI and NCCL take up to 10 MiB for each rank.
SHM_NBYTES_PER_RANK = 16 << 20

Job = Sequence[RankFacts]
"""The facts of all ranks, in order. Before MPI has started, only the facts of this rank."""
Find = Callable[[Job], Iterable[str]]


@dataclasses.dataclass
class Check:
    """A fault that may occur between ranks. mpicomm/docs/troubles.md has a row with its symptom and its fix.

    It decorates the function that finds the fault.
    """

    name: str
    title: str
    """The statement that is true without a fault."""
    fix: str
    """A command or a setting."""
    before_mpi: bool = False
    """Whether the fault may end the process when MPI starts, so that the doctor must find it before."""
    skips: Callable[[Job], str] = lambda job: ""
    """Returns why there is nothing to check, or ""."""
    find: Find = dataclasses.field(init=False)
    """Yields a sentence for each fault, with the ranks and values of this job."""

    def __call__(self, find: Find) -> Find:
        self.find = find
        CHECKS.append(self)
        return find


CHECKS: list[Check] = []


def _by_machine(job: Job) -> list[list[RankFacts]]:
    """Return the ranks of each machine: one kernel, and one host name, because MPI tells machines by host names."""
    machines: dict[tuple[str, str], list[RankFacts]] = {}
    for one in job:
        machines.setdefault((one.boot_id, one.host), []).append(one)
    return list(machines.values())


def _by_reason(job: Job, reason_of: Callable[[RankFacts], str]) -> Iterator[str]:
    """Yield each reason that is not "", with its ranks."""
    ranks: dict[str, list[int]] = {}
    for one in job:
        if reason := reason_of(one):
            ranks.setdefault(reason, []).append(one.rank)
    for reason, found in ranks.items():
        yield f"{name_ranks(found)}: {reason}"


@Check(
    "library",
    "mpi4py finds the library of its MPI",
    '`pip install "mpi4py>=4.1" mpich`, or unset `MPI4PY_MPIABI` and `MPI4PY_LIBMPI`',
    before_mpi=True,
)
def _library(job: Job) -> Iterator[str]:
    for one in job:
        if one.mpi_error:
            yield f"mpi4py finds no library of an MPI that it is built for: {one.mpi_error}"


@Check(
    "launcher",
    "the launcher starts ranks of the MPI of mpi4py",
    "`$(dirname $(which python))/mpiexec -n N ...` for an MPI of pip, else the mpiexec of that MPI; "
    "`srun --mpi=list` shows what Slurm can start",
    before_mpi=True,
)
def _launcher(job: Job) -> Iterator[str]:
    one = job[0]
    became = ""
    if one.world_size is None:
        # Open MPI's mpiexec can start MPICH with PMIx. It ends the process of any other MPICH.
        if one.launch.family == "Open MPI" and one.mpi_family == "MPICH" and "pmix" not in one.mpi.lower():
            became = "it cannot start"
    elif one.world_size == 1 < one.launch.size:
        became = "each rank is alone in MPI.COMM_WORLD"
    if became:
        yield f"{one.launch.family} has started {one.launch.size} ranks, but mpi4py uses {one.mpi_name}: {became}"


@Check(
    "mpiexec",
    "the first mpiexec on the PATH belongs to this MPI",
    "`export PATH=$(dirname $(which python)):$PATH` for an MPI of pip, else the folder of that MPI's mpiexec",
)
def _mpiexec(job: Job) -> Iterator[str]:
    for one in job:
        if one.mpiexec_family and one.mpi_family and one.mpiexec_family != one.mpi_family:
            yield f"{one.mpiexec} belongs to {one.mpiexec_family}, but mpi4py uses {one.mpi_name}"


@Check("threads", "MPI lets several threads call it at once", "unset `MPI4PY_RC_THREAD_LEVEL`")
def _threads(job: Job) -> Iterator[str]:
    if found := [one.rank for one in job if not one.threads_multiple]:
        yield f"MPI on {name_ranks(found)} has started with less than MPI.THREAD_MULTIPLE"


@Check(
    "shm",
    "/dev/shm is large enough for the ranks",
    "`docker run --shm-size=1g ...`; in Kubernetes an emptyDir with `medium: Memory` at /dev/shm",
    before_mpi=True,
)
def _shm(job: Job) -> Iterator[str]:
    for machine in _by_machine(job):
        for device in sorted({one.shm_device for one in machine}):
            here = [one for one in machine if one.shm_device == device]
            first = here[0]
            count = max(len(here), first.launch.local_size if first.world_size is None else 1)
            free = min(one.shm_free or 0 for one in here)
            if count > 1 and free < count * SHM_NBYTES_PER_RANK:
                has = "is missing" if first.shm_free is None else f"has {format_size(free)} free"
                needs = f"{count} ranks may need {count * SHM_NBYTES_PER_RANK >> 20} MiB"
                yield f"/dev/shm on {first.host} {has}; {needs}"


@Check(
    "network",
    "the ranks of a machine share its network",
    "`docker run --network=host --ipc=host --pid=host ...`; in Kubernetes one pod per machine",
)
def _networks(job: Job) -> Iterator[str]:
    kernels: dict[str, dict[str, list[int]]] = {}
    for one in job:
        if "MPICOMM_HOSTID" not in one.variables:
            kernels.setdefault(one.boot_id, {}).setdefault(one.namespaces.get("net", ""), []).append(one.rank)
    for groups in kernels.values():
        if len(groups) > 1:
            names = " and ".join(map(name_ranks, groups.values()))
            yield (
                f"one machine holds {names} in different network namespaces, so they count as ranks of several nodes "
                "and open no memory of each other"
            )


@Check(
    "process-memory",
    "MPI may read the memory of other processes",
    "`docker run --pid=host --cap-add=SYS_PTRACE ...`, or `MPIR_CVAR_CH4_CMA_ENABLE=0` for MPICH, "
    "`OMPI_MCA_smsc=^cma` for Open MPI",
)
def _process_memory(job: Job) -> Iterator[str]:
    for one in job:
        switched_off = (
            one.variables.get("MPIR_CVAR_CH4_CMA_ENABLE") == "0"
            if one.mpi_family == "MPICH"
            else "^cma" in one.variables.get("OMPI_MCA_smsc", "")
        )
        if one.unreadable and not switched_off:
            names = [name for name in ("pid", "user") if len({o.namespaces.get(name) for o in job}) > 1]
            why = f"their {' and '.join(names)} namespaces differ" if names else "seccomp or Yama forbids it"
            yield (
                f"rank {one.rank} cannot read memory of {name_ranks(one.unreadable)} ({one.unreadable_reason}), "
                f"as MPI does for long messages: {why}"
            )


@Check(
    "locked",
    "ranks may lock the memory that they need",
    "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1 ...`",
)
def _locked(job: Job) -> Iterator[str]:
    for one in job:
        if one.locked_limit is not None and (one.infiniband or "staged" in one.memory.rejected):
            who = "InfiniBand registers memory" if one.infiniband else "pinned memory was refused"
            yield f"rank {one.rank} may lock {format_size(one.locked_limit)} of memory, and {who}"


@Check(
    "driver",
    "no GPU is unused because a driver or package is missing",
    '`pip uninstall cupy-cuda12x cupy-cuda13x`, then `pip install -e ".[cuda13]"` (or cuda12, as `nvidia-smi` '
    "shows); `docker run --gpus all ...`",
)
def _driver(job: Job) -> Iterable[str]:
    def reason_of(one: RankFacts) -> str:
        if len(one.cupy) > 1:
            return f"several CuPys are installed and overwrite each other: {', '.join(one.cupy)}"
        for name in one.cupy:
            built = re.fullmatch(r"cupy-cuda(\d+)x", name)  # a build from source has no such name
            if built and one.driver_cuda and int(built[1]) > one.driver_cuda:
                return f"{name} needs a newer driver than this one, which is for CUDA {one.driver_cuda}"
        return one.no_gpu_reason if one.driver and not one.gpus else ""

    return _by_reason(job, reason_of)


@Check(
    "visible",
    "no cgroup keeps ranks from the GPUs of their peers",
    "in Slurm `--gpus-per-node` in place of `--gpus-per-task` and `--gpu-bind`; `docker run --gpus all ...`",
)
def _visible(job: Job) -> Iterator[str]:
    """A rank cannot open the memory of a GPU that it does not see.

    CUDA opens the memory of a GPU that CUDA_VISIBLE_DEVICES hides, but not of a GPU that a cgroup keeps from the
    process. So a hidden GPU is a fault only if a Communicator was refused.
    """
    for machine in _by_machine(job):
        for one in machine:
            seen = {gpu.uuid for gpu in one.gpus}
            hidden = [peer.rank for peer in machine if peer.memory.uuid and peer.memory.uuid not in seen]
            refused = one.memory.error or one.memory.rejected.get("ipc")
            if seen and hidden and refused:
                mask = one.variables.get("CUDA_VISIBLE_DEVICES")
                how = "a cgroup may hide it" if mask is None else f"not only CUDA_VISIBLE_DEVICES={mask} may hide it"
                gpu = f"the GPU of {name_ranks(hidden)}"
                yield f"rank {one.rank} does not see {gpu} ({how}), and cannot open its memory: {refused}"


@Check("shared", "no ranks take turns on a GPU", "`mpirun -np` with one rank per GPU, or `nvidia-cuda-mps-control -d`")
def _shared(job: Job) -> Iterator[str]:
    users: dict[str, list[int]] = {}
    for one in job:
        if one.memory.uuid and not one.shared_service:
            users.setdefault(one.memory.uuid, []).append(one.rank)
    waits = "and NVIDIA's multi-process service does not run, so their kernels take turns"
    for found in users.values():
        if len(found) > 1:
            yield f"{name_ranks(found)} share a GPU, {waits}"


@Check(
    "mig", "no ranks are on different MIG instances", "`sudo nvidia-smi -i GPU -mig 0`, or all ranks on one instance"
)
def _instances(job: Job) -> Iterator[str]:
    for machine in _by_machine(job):
        users = {
            one.memory.uuid: one.rank
            for one in machine
            if any(gpu.uuid == one.memory.uuid and " MIG " in gpu.name for gpu in one.gpus)
        }
        if len(users) > 1:
            yield f"{name_ranks(list(users.values()))} use different MIG instances, which share no memory"


@Check("wsl", "no driver of Windows keeps GPU memory from ranks", "Linux itself, or `MPICOMM_HANDLE=staged`")
def _windows(job: Job) -> Iterable[str]:
    refused = "the driver of Windows below WSL2 refuses to share GPU memory"
    on_windows = [one for one in job if "microsoft" in one.kernel.lower()]
    return _by_reason(on_windows, lambda one: refused if one.memory.rejected or one.memory.error else "")


@Check(
    "access",
    "each GPU has access to the GPUs of its peers",
    "`nvidia-smi topo -p2p r` shows the reason; switch ACS and the IOMMU off in the BIOS (`iommu=off`), or use "
    "`MPICOMM_HANDLE=staged`",
)
def _access(job: Job) -> Iterator[str]:
    for machine in _by_machine(job):
        for one in machine:
            for own in one.gpus:
                peers = [peer.rank for peer in machine if peer.memory.uuid in own.unreachable]
                if own.uuid == one.memory.uuid and peers:
                    gpu = f"the GPU of rank {one.rank}, {own.name},"
                    yield f"{gpu} has no peer access to the GPU of {name_ranks(peers)}"


@Check(
    "memory",
    "ranks open each other's memory in the best way",
    "`docker run --ipc=host --pid=host ...`, or `MPICOMM_HANDLE=fd`; `python -m mpicomm.info` shows all reasons",
)
def _memory(job: Job) -> Iterable[str]:
    explained = any(any(check(job)) for check in (_visible, _instances, _windows, _access))
    differ = [name for name in ("ipc", "pid") if len({one.namespaces.get(name) for one in job}) > 1]
    why = f" (the ranks are in different {' and '.join(differ)} namespaces)" if differ else ""

    def reason_of(one: RankFacts) -> str:
        refused = "" if explained else one.memory.rejected.get("ipc", "")
        return one.memory.error or (f"CUDA IPC is refused{why}: {refused}" if refused else "")

    return _by_reason(job, reason_of)


@Check(
    "pytorch",
    "PyTorch allocates memory that peers can open",
    "`export PYTORCH_CUDA_ALLOC_CONF=backend:native`",
    skips=lambda job: "" if any(one.torch for one in job) else "no rank has PyTorch",
)
def _pytorch(job: Job) -> Iterator[str]:
    setting = "backend:cudaMallocAsync"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if ranks := [one.rank for one in job if setting in one.variables.get(name, "").replace(" ", "")]:
            yield f"{name} on {name_ranks(ranks)} has {setting}: no peer can open such memory"


Results = Sequence[tuple[Check, list[str], str]]
"""Each check with the faults that it has found, and with why it was skipped, or ""."""


def examine(job: Job, checks: Sequence[Check] = CHECKS) -> Results:
    """Make checks of a job."""
    return [(check, [*check.find(job)], check.skips(job)) for check in checks]


def lines(results: Results) -> list[str]:
    """Return the lines for people."""
    shown = []
    for check, faults, skipped in results:
        if faults:
            shown += [*(f"FAULT {check.name}: {fault}" for fault in faults), f"      fix: {check.fix}"]
        else:
            shown.append(f"skip  {check.name}: {skipped}" if skipped else f"ok    {check.name}: {check.title}")
    return shown


def record(job: Job, results: Results) -> dict[str, Any]:
    """Return the JSON object."""
    checks = [
        {"name": check.name, "faults": faults, "skipped": skipped, "fix": check.fix}
        for check, faults, skipped in results
    ]
    return {"checks": checks, "ranks": [dataclasses.asdict(one) for one in job]}
