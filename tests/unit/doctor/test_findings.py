"""Each check of the doctor on invented facts finds faults, and is silent about other facts; invented waits of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mpicomm.activity.reading import Activity, BlockedMessage, RankCalls, Step
from mpicomm.cli.arguments import JobLaunch, launch_of
from mpicomm.doctor.checks import CHECKS, examine, lines
from mpicomm.doctor.facts import MemoryFacts, RankFacts, VisibleGpu, family_of
from mpicomm.doctor.running import Process, RunningJob, RunningRank
from mpicomm.doctor.waits import WaitReport

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
    return {check.name: faults for check, faults, _ in examine(job) if faults}


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
        ([replace(ALONE, launch=JobLaunch("Slurm", 0, 4))], "launcher", OTHER_LAUNCHER),
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
    ("family", "said"),
    [
        ("Open MPI", (OPEN_MPI, "mpiexec (Open MPI) 5.0.11", "prterun (PRRTE) 3.0")),
        ("MPICH", (MPICH, "HYDRA build details:", "Intel(R) MPI Library for Linux* OS, Version 2021.13")),
        ("", ("something else",)),
    ],
)
def test_families(family: str, said: tuple[str, ...]) -> None:
    assert {*map(family_of, said)} == {family}


def test_a_report_has_the_cause_and_the_fix() -> None:
    report = lines(examine(healthy(shm_free=0)))
    at = next(index for index, line in enumerate(report) if line.startswith("FAULT shm: /dev/shm on host has 0"))
    assert "--shm-size" in report[at + 1]
    assert "ok    library: mpi4py finds the library of its MPI" in report
    assert len(report) == len(CHECKS) + 1


def test_a_check_of_what_no_rank_has_is_skipped() -> None:
    skipped, asked = "skip  pytorch: no rank has PyTorch", "ok    pytorch: PyTorch allocates memory that peers can open"
    assert [line for line in lines(examine(healthy())) if " pytorch:" in line] == [skipped]
    assert [line for line in lines(examine(with_last(torch=True))) if " pytorch:" in line] == [asked]


NOW_NS = 100_000_000_000
SUM = "Allreduce(float64, count=4, op=sum)"


def calls(rank: int, made: int, last: str = SUM, *, ago_s: float | None = 10.0, size: int = 3) -> RankCalls:
    since_ns = None if ago_s is None else NOW_NS - int(ago_s * 1e9)
    return RankCalls(7, "world", rank, size, 0, made, last, since_ns, False)


def rank(number: int, *communicators: RankCalls, step: Step | None = None, **process: object) -> RunningRank:
    facts = replace(Process(1000 + number, 1, "python"), **process)  # type: ignore[arg-type]
    return RunningRank(facts, Activity(1000 + number, number, step, communicators), 1, NOW_NS)


def earlier(one: RunningRank, seconds: float = 3.0) -> RunningRank:
    return replace(one, time_ns=one.time_ns - int(seconds * 1e9))


def report(ranks: Sequence[RunningRank], before: Sequence[RunningRank] = (), **unseen: Any) -> WaitReport:
    was = before or [earlier(each) for each in ranks]
    job = RunningJob(tuple(ranks), unseen.get("uninitialized", {}))
    return WaitReport(job, {each.process.pid: each for each in was})


def texts(*ranks: RunningRank) -> list[str]:
    return [wait.text for wait in report(ranks).waits()]


def test_the_rank_with_the_fewest_calls_is_late() -> None:
    ranks = [rank(0, calls(0, 5)), rank(1, calls(1, 5, ago_s=12.0)), rank(2, calls(2, 4, "Bcast(int8)", ago_s=15.0))]
    (wait,) = report(ranks).waits()
    assert wait.text == (
        f"rank 2 is behind: it has made 4 calls of world, the others 5 ({SUM}). Rank 2 (process 1002) sleeps, and has "
        "begun no collective call since Bcast(int8) 15.0 s ago"
    )
    assert (wait.seconds, wait.exact, wait.pids) == (12.0, True, (1002,))


def test_ranks_that_go_on_are_not_late_and_several_may_be() -> None:
    (said,) = texts(rank(0, calls(0, 5)), rank(1, calls(1, 4)), rank(2, calls(2, 1)))
    assert said.startswith(f"ranks 1, 2 are behind: they have made 1 to 4 calls of world, the others 5 ({SUM}). Rank 1")
    ranks = [rank(0, calls(0, 5)), rank(1, calls(1, 4))]
    assert report(ranks, [ranks[0], rank(1, calls(1, 3))]).waits() == []
    # A call is the same in MPI and in mapped memory.
    assert texts(rank(0, calls(0, 5, "Allreduce", ago_s=None)), rank(1, calls(1, 5)), rank(2, calls(2, 5))) == []


def test_a_wait_in_mpi_is_as_old_as_the_samples() -> None:
    ranks = [rank(0, calls(0, 5, "Allreduce", ago_s=None)), rank(1, calls(1, 4))]
    (wait,) = report(ranks).waits()
    assert (wait.seconds, wait.exact) == (3.0, False)


def test_ranks_that_have_called_different_things() -> None:
    (said,) = texts(rank(0, calls(0, 5)), rank(1, calls(1, 5, "Bcast")), rank(2, calls(2, 5)))
    assert said == f"ranks called different things as number 5 of world: rank 0: {SUM}; rank 1: Bcast; rank 2: {SUM}"


def by_mpi(rank: int, calls_by_mpi: int, others: int, last: str) -> RankCalls:
    """The calls of a rank, of which the last one is by MPI."""
    made = calls(rank, others, last, ago_s=None, size=2)
    return replace(made, by_mpi=calls_by_mpi, last_post="Bcast(float32, count=3, root=0)" if others else "")


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((4, 1, "Barrier"), (4, 0, "Allreduce")),  # rank 0 has left the root's Bcast early
        ((5, 1, "Allreduce"), (4, 2, "Allreduce")),
    ],
)
def test_ranks_that_wait_in_mpi_after_calls_in_different_orders(
    mine: tuple[int, int, str], theirs: tuple[int, int, str]
) -> None:
    for first, second in ((mine, theirs), (theirs, mine)):
        ranks = [rank(0, by_mpi(0, *first)), rank(1, by_mpi(1, *second))]
        (wait,) = report(ranks).waits()
        assert wait.text.startswith(
            f"ranks called different things of world: rank 0: {first[2]} by MPI, its call {first[0]} by MPI, after "
            f"{first[1]} other call"
        )
        assert f"rank 1: {second[2]} by MPI, its call {second[0]} by MPI, after {second[1]} other call" in wait.text
        assert "(the last is Bcast(float32, count=3, root=0))" in wait.text and "end the job, and make" in wait.text
        assert wait.pids == (1000, 1001)
        assert [line.waits_for for line in report(ranks).rows()] == ["rank 1", "rank 0"]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((4, 1, "Barrier"), (4, 1, "Barrier")),
        ((5, 1, "Barrier"), (4, 1, "Barrier")),
        ((5, 2, "Barrier"), (4, 1, "Barrier")),  # rank 1 is late in both kinds of calls
    ],
)
def test_ranks_with_calls_in_one_order(mine: tuple[int, int, str], theirs: tuple[int, int, str]) -> None:
    for first, second in ((mine, theirs), (theirs, mine)):
        said = texts(rank(0, by_mpi(0, *first)), rank(1, by_mpi(1, *second)))
        assert all("behind" in each for each in said) and len(said) == (mine != theirs)
    going_on = [rank(0, by_mpi(0, 4, 1, "Barrier")), rank(1, by_mpi(1, 4, 0, "Allreduce"))]
    before = [earlier(going_on[0]), earlier(rank(1, by_mpi(1, 3, 0, "Barrier")))]
    assert report(going_on, before).waits() == []


def test_ranks_that_send_to_each_other() -> None:
    ranks = [
        rank(each, replace(calls(each, 5), messages=(BlockedMessage("send", 1 - each, 3, 9),))) for each in range(2)
    ]
    assert texts(*ranks) == [
        f"rank {each} waits in a send to rank {1 - each} (tag 3) of world. Rank {1 - each} (process {1001 - each}) "
        f"sends to rank {each} (tag 3) of world, and has begun no collective call since {SUM} 10.0 s ago"
        for each in range(2)
    ]


def test_a_receive_from_any_rank_and_messages_one_after_the_other() -> None:
    def receiving(number: int, source: int = 1) -> list[RunningRank]:
        message = BlockedMessage("receive", source, -1 if source < 0 else 0, number)
        return [rank(0, replace(calls(0, 5), messages=(message,))), rank(1, calls(1, 5))]

    assert texts(*receiving(1, -2)) == ["rank 0 waits in a receive from any rank of world"]
    assert report(receiving(8), [earlier(each) for each in receiving(7)]).waits() == []


def test_a_chain_of_waits_begins_with_the_rank_that_does_not_wait() -> None:
    step = Step("Free", NOW_NS - int(60e9), (0, 1, 2))
    receiving = replace(calls(1, 5), messages=(BlockedMessage("receive", 2, 3, 9),))
    ranks = [rank(0, step=step), rank(1, receiving), rank(2, calls(2, 5))]
    first, second = report(ranks).waits()
    assert first.text.startswith("rank 1 waits in a receive from rank 2 (tag 3) of world. Rank 2 (process 1002) sleeps")
    assert second.text == (
        "ranks 1, 2 of MPI.COMM_WORLD have not come: rank 0 waits in 'Free'. Rank 1 (process 1001) receives from rank "
        "2 (tag 3) of world. Rank 2 (process 1002) sleeps"
    )
    assert (first.pids, second.pids, second.seconds) == ((1002,), (1002,), 60.0)


def test_a_rank_that_has_not_come_to_a_step_has_no_communicator_or_no_process() -> None:
    step = Step("Communicator", NOW_NS - int(5e9), (0, 1, 2))
    (wait,) = report([rank(0, step=step)], uninitialized={(1, 2): Process(77, 1, "python")}).waits()
    assert wait.text == (
        "ranks 1, 2 of MPI.COMM_WORLD have not come: rank 0 waits in 'Communicator'. Rank 1 has no process on this "
        "machine: it has ended, or runs on another node. Rank 2, process 77, has not begun to make a Communicator"
    )
    assert wait.pids == (77,)


def test_what_a_process_does() -> None:
    ahead = rank(0, calls(0, 5))

    def said_of(late: RunningRank, cpu_s: float = 0.0) -> str:
        was = replace(earlier(late), process=replace(late.process, cpu_s=late.process.cpu_s - cpu_s))
        (wait,) = report([ahead, late], [earlier(ahead), was]).waits()
        return wait.text.partition("(process 1001) ")[2].partition(", and has")[0]

    assert said_of(rank(1, calls(1, 4), state="T")) == "is stopped, by a signal or a debugger"
    assert said_of(rank(1, calls(1, 4), sleeps_in="futex_wait_queue")) == "sleeps (futex_wait_queue)"
    assert said_of(rank(1, calls(1, 4), state="R")) == "computes or polls"
    assert said_of(rank(1, calls(1, 4)), cpu_s=2.9) == "computes or polls"


def test_lines_begin_with_the_communicator_in_which_ranks_wait() -> None:
    idle = [replace(calls(each, 3), key=1, name="a part") for each in range(2)]
    unused = [replace(calls(each, 0, ""), key=2, name="unused", since_ns=None) for each in range(2)]
    ranks = [rank(each, idle[each], unused[each], calls(each, 5 - each)) for each in range(2)]
    assert [(line.communicator, line.rank, line.number, line.waits_for) for line in report(ranks).rows()] == [
        ("world", 0, 5, "rank 1"),
        ("world", 1, 4, ""),
        ("a part", 0, 3, ""),
        ("a part", 1, 3, ""),
    ]


def test_a_call_on_a_gpu_may_be_only_enqueued() -> None:
    ranks = [rank(0, replace(calls(0, 5), on_gpu=True))]
    assert [line.process_state for line in report(ranks).rows()] == ["has enqueued it, and sleeps"]
