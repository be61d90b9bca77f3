"""Each check of the doctor on invented facts: it finds faults, and is silent about other facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpicomm.cli.arguments import JobLaunch, launch_of
from mpicomm.doctor.checks import CHECKS, examine, lines
from mpicomm.doctor.facts import MemoryFacts, RankFacts, VisibleGpu, family_of

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ofi --with-pm=hydra"
STARTED_BY_OPEN_MPI = JobLaunch("Open MPI", 0, 2, 2)
STARTED_BY_HYDRA = JobLaunch("MPICH", 0, 2, 2)
GPUS = (VisibleGpu("aa", "NVIDIA H200"), VisibleGpu("bb", "NVIDIA H200"))


def healthy(**changed: Any) -> list[RankFacts]:
    """Two ranks of one machine with two GPUs, without any fault except the facts that are ``changed`` on both."""
    base = RankFacts(
        boot_id="boot",
        kernel="6.8.0",
        namespaces={"net": "n", "ipc": "i", "pid": "p", "user": "u"},
        shm_free=1 << 30,
        launch=STARTED_BY_HYDRA,
        mpi=MPICH,
        world_size=2,
        driver=True,
        gpus=GPUS,
        driver_cuda=13,
        cupy=("cupy-cuda13x",),
    )
    return [
        replace(base, rank=rank, memory=MemoryFacts(str(rank), GPUS[rank].uuid, "ipc"), **changed) for rank in range(2)
    ]


def with_last(**changed: Any) -> list[RankFacts]:
    """The healthy ranks, with changes on the last one."""
    first, last = healthy()
    return [first, replace(last, **changed)]


def using(*memories: MemoryFacts, **changed: Any) -> list[RankFacts]:
    """The healthy ranks with other memory, and changes on both."""
    return [replace(one, memory=memory) for one, memory in zip(healthy(**changed), memories, strict=True)]


def other_namespace(*names: str) -> dict[str, str]:
    """The namespaces of a healthy rank, except the namespaces of these names."""
    return {**healthy()[0].namespaces, **dict.fromkeys(names, "other")}


def found(job: list[RankFacts]) -> dict[str, list[str]]:
    return {check.name: faults for check, faults in examine(job) if faults}


HIDDEN = [replace(one, gpus=(GPUS[one.rank],), variables={"CUDA_VISIBLE_DEVICES": "0"}) for one in healthy()]
MIG = tuple(VisibleGpu(uuid, "NVIDIA H100 80GB HBM3 MIG 1g.10gb") for uuid in ("aa", "bb"))
CONSUMER = (VisibleGpu("aa", "NVIDIA GeForce RTX 4090", ("bb",)), VisibleGpu("bb", "NVIDIA GeForce RTX 4090", ("aa",)))
STAGED = [MemoryFacts(str(at), uuid, "staged", {"ipc": "no peer access"}) for at, uuid in enumerate(("aa", "bb"))]
REFUSED = [
    MemoryFacts(str(at), uuid, "fd", {"ipc": said})
    for at, (uuid, said) in enumerate((("aa", "cuIpcOpenMemHandle failed"), ("bb", "...")))
]
BROKEN = [MemoryFacts(error="no handle kind works")] * 2
NOT_PINNED = MemoryFacts(error="none", rejected={"staged": "refused"})
WSL = "5.15.153.1-microsoft-standard-WSL2"
ALONE = RankFacts(mpi=OPEN_MPI, world_size=1)
OTHER_MPIEXEC = RankFacts(mpiexec="/usr/bin/mpiexec", mpiexec_family="Open MPI", mpi=MPICH)
OTHER_PIDS = with_last(namespaces=other_namespace("pid"), unreadable=(0,), unreadable_reason="No such process")
NOT_PERMITTED = with_last(unreadable=(0,), unreadable_reason="Operation not permitted")
HIDDEN_AND_REFUSED = [replace(one, memory=REFUSED[one.rank]) for one in HIDDEN]
HIDDEN_BY_A_CGROUP = [
    replace(one, variables={}, memory=MemoryFacts("0", one.memory.uuid, error="no handle")) for one in HIDDEN
]
OTHER_IPC = [replace(one, namespaces=other_namespace(*["ipc"] * one.rank)) for one in using(*REFUSED)]
ASYNC = with_last(variables={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, backend: cudaMallocAsync"})
NO_ACCESS = "rank 0, NVIDIA GeForce RTX 4090, has no peer access to the GPU of rank 1"
OTHER_LAUNCHER = "Slurm has started 4 ranks, but mpi4py uses Open MPI v5.0.11: "
UNSEEN = "rank {} does not see the GPU of rank {} ({} may hide it), and cannot open its memory: {}"


@pytest.mark.parametrize(
    ("job", "name", "said"),
    [
        ([RankFacts(mpi_error="libmpi.so.40: cannot open")], "library", "libmpi.so.40"),
        ([RankFacts(launch=STARTED_BY_OPEN_MPI, mpi=MPICH)], "launcher", "MPICH Version: 5.0.2: it cannot start"),
        ([replace(ALONE, launch=STARTED_BY_HYDRA)], "launcher", "alone in MPI.COMM_WORLD"),
        (
            [replace(ALONE, launch=JobLaunch("Slurm", 0, 4))],
            "launcher",
            OTHER_LAUNCHER,
        ),
        ([OTHER_MPIEXEC], "mpiexec", "/usr/bin/mpiexec belongs to Open MPI"),
        (with_last(threads_multiple=False), "threads", "MPI on rank 1 has"),
        (healthy(shm_free=16 << 20), "shm", "has 16M free; 2 ranks may need 32 MiB"),
        (healthy(shm_free=None), "shm", "is missing"),
        ([RankFacts(launch=STARTED_BY_HYDRA, shm_free=64 << 10)], "shm", "2 ranks"),
        (with_last(namespaces=other_namespace("net")), "network", "rank 0 and rank 1 in different network"),
        (OTHER_PIDS, "process-memory", "rank 1 cannot read memory of rank 0 (No such process), as MPI does for long"),
        (OTHER_PIDS, "process-memory", "as MPI does for long messages: their pid"),
        (NOT_PERMITTED, "process-memory", "seccomp or Yama"),
        (healthy(locked_limit=8 << 20, infiniband=True), "locked", "rank 1 may lock 8M of memory, and InfiniBand"),
        (using(NOT_PINNED, NOT_PINNED, locked_limit=64 << 10), "locked", "pinned memory was refused"),
        (with_last(gpus=(), no_gpu_reason="no GPU is visible"), "driver", "rank 1: no GPU is visible"),
        (healthy(cupy=("cupy-cuda12x", "cupy-cuda13x")), "driver", "overwrite each other: cupy-cuda12x, cupy-cuda13x"),
        (healthy(driver_cuda=12), "driver", "cupy-cuda13x needs a newer driver than this one, which is for CUDA 12"),
        (
            HIDDEN_AND_REFUSED,
            "visible",
            UNSEEN.format(0, 1, "not only CUDA_VISIBLE_DEVICES=0", "cuIpcOpenMemHandle failed"),
        ),
        (HIDDEN_BY_A_CGROUP, "visible", UNSEEN.format(1, 0, "a cgroup", "no handle")),
        (using(*(MemoryFacts("0", "aa", "ipc"),) * 2), "shared", "ranks 0, 1 share a GPU"),
        (healthy(gpus=MIG), "mig", "ranks 0, 1 use different MIG instances"),
        (using(*STAGED, kernel=WSL), "wsl", "ranks 0, 1"),
        (using(*BROKEN, kernel=WSL), "wsl", "ranks 0, 1"),
        (using(*STAGED, gpus=CONSUMER), "access", NO_ACCESS),
        (using(*REFUSED), "memory", "rank 0: CUDA IPC is refused: cuIpcOpenMemHandle failed"),
        (OTHER_IPC, "memory", "refused (the ranks are in different ipc namespaces)"),
        (using(*BROKEN), "memory", "ranks 0, 1: no handle kind works"),
        (ASYNC, "pytorch", "PYTORCH_CUDA_ALLOC_CONF on rank 1 has backend:cudaMallocAsync"),
        (
            healthy(variables={"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
            "pytorch",
            "PYTORCH_ALLOC_CONF on ranks 0, 1",
        ),
    ],
)
def test_a_fault_is_found(job: list[RankFacts], name: str, said: str) -> None:
    faults = found(job)
    assert any(said in fault for fault in faults[name]), faults[name]


@pytest.mark.parametrize(
    "job",
    [
        healthy(),
        healthy(driver=False, gpus=(), driver_cuda=None, cupy=()),  # a machine without GPUs
        healthy(cupy=("cupy-cuda12x",)),  # an older CUDA than the driver's
        healthy(cupy=("cupy",)),
        healthy(kernel=WSL),  # although memory opens
        healthy(locked_limit=8 << 20),  # without anything that needs locked memory
        healthy(launch=JobLaunch("Slurm", 0, 1)),  # mpiexec in a job step of Slurm that has one task
        healthy(variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        [replace(one, memory=MemoryFacts("0", "aa", "ipc")) for one in healthy(shared_service=True)],
        # MPI does not try to read the memory of others
        healthy(unreadable=(0,), variables={"MPIR_CVAR_CH4_CMA_ENABLE": "0"}),
        healthy(unreadable=(0,), mpi=OPEN_MPI, variables={"OMPI_MCA_smsc": "^cma"}),
        HIDDEN,  # a mask, beyond which CUDA opens memory
        [replace(one, variables={}) for one in HIDDEN],
        # two nodes: neither their GPUs nor their networks are common
        [replace(one, boot_id=f"boot{one.rank}", host=f"host{one.rank}") for one in HIDDEN],
        [replace(one, namespaces={"net": f"net{one.rank}"}, boot_id=f"boot{one.rank}") for one in healthy()],
        [replace(one, namespaces={"net": f"net{one.rank}"}, variables={"MPICOMM_HOSTID": "a"}) for one in healthy()],
        [RankFacts(launch=STARTED_BY_OPEN_MPI, mpi=f"{MPICH} --with-pmix", shm_free=1 << 30)],  # before MPI starts
        [RankFacts(mpiexec="/usr/bin/mpiexec", mpiexec_family="MPICH", mpi="Intel(R) MPI Library 2021.13", shm_free=0)],
    ],
)
def test_what_is_no_fault_is_not_found(job: list[RankFacts]) -> None:
    assert found(job) == {}


@pytest.mark.parametrize("job", [using(*STAGED, gpus=CONSUMER), HIDDEN_AND_REFUSED])
def test_refused_memory_is_no_second_fault_if_a_fault_explains_it(job: list[RankFacts]) -> None:
    assert "memory" not in found(job)


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, JobLaunch()),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2"}, JobLaunch("MPICH", 3, 4, 2)),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            JobLaunch("Open MPI", 1, 2, 2),
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            JobLaunch("Slurm", 9, 16, 8),
        ),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, JobLaunch()),  # a batch script
    ],
)
def test_what_launchers_say(variables: dict[str, str], launch: JobLaunch) -> None:
    assert launch_of(variables) == launch


@pytest.mark.parametrize(
    ("said", "family"),
    [
        (OPEN_MPI, "Open MPI"),
        ("mpiexec (Open MPI) 5.0.11", "Open MPI"),
        ("prterun (PRRTE) 3.0", "Open MPI"),
        (MPICH, "MPICH"),
        ("HYDRA build details:", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "MPICH"),
        ("something else", ""),
    ],
)
def test_families(said: str, family: str) -> None:
    assert family_of(said) == family


def test_a_report_has_the_cause_and_the_fix() -> None:
    report = lines(examine(healthy(shm_free=0)))
    at = next(index for index, line in enumerate(report) if line.startswith("FAULT shm: /dev/shm on host has 0"))
    assert "--shm-size" in report[at + 1]
    assert "ok    library: mpi4py finds the library of its MPI" in report
    assert len(report) == len(CHECKS) + 1
