from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI

from mpicomm.cluster.agreement import Group, _Outcome
from mpicomm.cluster.process import node_key
from mpicomm.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    HandleError,
    InvalidUsageError,
    KernelCompileError,
    MpicommError,
    PeerError,
)
from mpicomm.mpi.errors import BufferRefusedError, RefusedByMpiError, UnknownTypeError
from mpicomm.waiting import wait_until

CLASSES: list[type[MpicommError]] = [MpicommError, InvalidUsageError, HandleError, PeerError, CollectiveTimeoutError]
CLASSES += [BackendUnavailableError, KernelCompileError, BufferRefusedError, UnknownTypeError]
ERRORS = [*(each("it is full") for each in CLASSES), RefusedByMpiError("it is full", MPI.ERR_OP)]


@pytest.fixture
def group() -> Group:
    return Group(MPI.COMM_SELF, [0], 5.0)


def raising(error: BaseException) -> Callable[[], None]:
    def produce() -> None:
        raise error

    return produce


# ---- exchange, on one rank


@pytest.mark.parametrize("original", ERRORS, ids=lambda error: type(error).__name__)
def test_mpicomms_errors_keep_their_class(group: Group, original: MpicommError) -> None:
    step = "" if isinstance(original, InvalidUsageError) else "open failed on "
    with pytest.raises(MpicommError, match=f"^{step}rank 0: it is full$") as failure:
        group.allgather("open", raising(original))
    assert type(failure.value) is type(original)
    assert failure.value.ranks == (0,)
    assert failure.value.__cause__ is original
    if isinstance(original, MPI.Exception):
        assert isinstance(failure.value, MPI.Exception)
        assert failure.value.Get_error_class() == original.Get_error_class()
    sent = pickle.loads(pickle.dumps(failure.value))  # as `Group` sends it to other ranks
    assert (type(sent), str(sent), sent.ranks) == (type(original), str(failure.value), (0,))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (OSError(2, "No such file or directory"), r"FileNotFoundError: \[Errno 2\] No such file or directory"),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_other_errors_become_handle_errors_that_name_their_class(group: Group, error: Exception, text: str) -> None:
    with pytest.raises(HandleError, match=f"^open failed on rank 0: {text}$") as failure:
        group.agree("open", raising(error))
    assert failure.value.__cause__ is error


def test_an_interrupt_is_passed_on(group: Group) -> None:
    with pytest.raises(KeyboardInterrupt):
        group.allgather("step", raising(KeyboardInterrupt()))


def test_a_broken_group_does_nothing_more(group: Group) -> None:
    done: list[int] = []
    group.broken = CollectiveTimeoutError("open: rank 3 did not arrive within 5 s", ranks=[3])
    for call in (group.allgather, group.agree):
        with pytest.raises(CollectiveTimeoutError, match=r"close: .*unusable.*\(open: rank 3 did not") as failure:
            call("close", lambda: done.append(1))
        assert failure.value.ranks == (3,)
    with pytest.raises(CollectiveTimeoutError, match="create another"):
        group.barrier("close")
    assert done == []


def test_a_timeout_inside_an_exchange_is_raised_as_it_is(group: Group) -> None:
    timeout = CollectiveTimeoutError("inner: rank 3 did not arrive", ranks=[3])

    def produce() -> None:
        group.broken = timeout
        raise timeout

    with pytest.raises(CollectiveTimeoutError) as failure:
        group.allgather("outer", produce)
    assert failure.value is timeout


# ---- _common_error


FULL, GONE = HandleError("full"), HandleError("gone")
JUDGED: dict[str, tuple[list[_Outcome], type[MpicommError], tuple[int, ...]]] = {
    # Of ranks that have failed the lowest one decides the class, and those that failed alike are named together.
    "ranks called different things: rank 0: open; rank 2: close; rank 5: open; rank 7: open": (
        [_Outcome("open"), _Outcome("close"), _Outcome("open"), _Outcome("open", error=GONE)],
        *(PeerError, (0, 2, 5, 7)),
    ),
    "open failed on ranks 0, 5, 7: full; rank 2: gone": (
        [_Outcome("open", error=error) for error in (FULL, GONE, FULL, FULL)],
        *(HandleError, (0, 2, 5, 7)),
    ),
    "open failed on rank 2: late; rank 7: wrong": (
        [
            _Outcome("open", error=error)
            for error in (None, CollectiveTimeoutError("late"), None, InvalidUsageError("wrong"))
        ],
        *(CollectiveTimeoutError, (2, 7)),
    ),
}


@pytest.mark.parametrize("said", JUDGED)
def test_errors_name_the_ranks(said: str) -> None:
    outcomes, kind, ranks = JUDGED[said]
    error = Group(MPI.COMM_SELF, [0, 2, 5, 7], 5.0)._common_error(outcomes)
    assert (type(error), str(error)) == (kind, said)
    assert error is not None and tuple(sorted(error.ranks)) == ranks


# ---- the rest


def test_a_node_has_its_hostid_or_a_boot_and_a_network_or_the_name_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, *_: object) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    def named(name: str) -> str:
        monkeypatch.setenv("MPICOMM_HOSTID", name)
        return node_key()

    assert named("left") == named("left") != named("right") and "left" in named("left")
    monkeypatch.delenv("MPICOMM_HOSTID")
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in node_key()
    assert str(Path("/proc/self/ns/net").readlink()) in node_key()
    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(Path, "readlink", missing)
    assert node_key() == f"{socket.gethostname()}/"


def test_waiting_ends_when_it_is_ready_or_time_is_up() -> None:
    for delay_s in (0.0, 5e-4, 0.02):
        end = time.monotonic() + delay_s
        assert wait_until(lambda: time.monotonic() >= end, 60.0)  # noqa: B023
        assert time.monotonic() >= end
    assert not wait_until(lambda: False, 0.01)


@pytest.mark.parametrize("end", ["MPI.Finalize()", ""], ids=["by the program", "by the end of the interpreter"])
def test_what_is_still_there_is_released_before_mpi_is_finalized(end: str) -> None:
    code = """
from mpi4py import MPI
from mpicomm.cluster.process import release_before_finalize

class Owner:
    def __init__(self, name):
        self.name = name
        release_before_finalize(self)

    def release(self):
        print(self.name, MPI.Is_finalized(), MPI.COMM_WORLD.size)

kept, gone = Owner("kept"), Owner("gone")
del gone
"""
    root = Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", code + end], cwd=root, stdout=subprocess.PIPE, text=True)
    assert (process.returncode, process.stdout) == (0, "kept False 1\n")
