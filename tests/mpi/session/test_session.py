"""When a session opens its device and sets itself up, and how it gives both back, for a while or for good."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, HandleError, InvalidUsageError
from mpicomm.cluster.placement import Placement
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.handle import Exported, Kind, MemoryUse
from mpicomm.devices.host import array_at
from mpicomm.log import logger
from mpicomm.session import Session
from tests.helpers.fakes.fake_cuda import imported_over
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.fakes.virtual_memory import VirtualCuda
from tests.helpers.fakes.window_devices import WindowDevice
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.raising import raises_everywhere, raising
from tests.helpers.rigs import message_rigs
from tests.helpers.rigs.communicators import communicator, patience_s
from tests.helpers.rigs.message_rigs import on_threads, on_window_device

pytestmark = pytest.mark.mpi(min_size=2)

LARGE = 30_000


def exchange(comm: mpicomm.Communicator, device: Any) -> None:
    """Send a message that its receiver copies out of the sender's outbox, to the next rank."""
    sent, received = (DeviceArray(device, np.full(LARGE, comm.rank)) for _ in range(2))
    comm.Sendrecv(sent, (comm.rank + 1) % comm.size, 0, received, (comm.rank - 1) % comm.size, 0)
    assert (received.get() == (comm.rank - 1) % comm.size).all()


def test_messages_open_the_device_and_set_nothing_up(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu") as parent, nothing_leaks():
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm.check()
        assert not comm._session._groups
        comm.Free()
        assert device.closed


def test_free_without_a_set_up_waits_for_those_who_read_this_ranks_memory(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu") as parent:
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm_world.Barrier()
        start = time.monotonic()
        if comm.rank == 0:
            time.sleep(0.5)
        comm.Free()
        assert time.monotonic() - start > 0.45


def test_free_without_a_set_up_gives_all_back_although_a_rank_does_not_come(comm_world: MPI.Intracomm) -> None:
    limit_s = patience_s("cpu")
    with nothing_leaks(), communicator("cpu", timeout_s=limit_s) as parent:
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm_world.Barrier()
        if comm.rank > 0:
            with pytest.raises(CollectiveTimeoutError, match=f"Free: rank 0 did not arrive within {limit_s:g} s"):
                comm.Free()
            assert device.closed
            start = time.monotonic()
            comm.Free()
            assert time.monotonic() - start < limit_s * 0.8
        comm_world.Barrier()
        if comm.rank == 0 and comm.size > 1:
            with pytest.raises(CollectiveTimeoutError, match=f"Free: rank 0 did not arrive within {limit_s:g} s"):
                comm._session.close()


def test_a_set_up_that_fails_keeps_open_memory_open(comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    with communicator("cpu") as parent:
        comm, device = on_threads(parent)
        # All ranks make a session, because the pages of all ranks number the sessions alike.
        opened = None if comm.rank == 1 else cast(GpuBackend, device)  # on rank 1 the device opens with the set-up
        comm._begin(Session(MPI.Intracomm(comm), comm._session.placement, opened))
        if comm.rank == 1:
            monkeypatch.setattr(Placement, "create_backend", raising(OSError))
        with raises_everywhere(comm_world, HandleError, match="bind device failed on rank 1: .*injected"):
            comm._session.set_up("set up")
        assert not comm._session._groups
        assert not device.closed
        monkeypatch.setattr(Placement, "create_backend", lambda placement: device)
        exchange(comm, device)
        comm.Free()
        assert device.closed


@pytest.mark.parametrize("checked", [False, True])
def test_free_logs_an_error_that_no_call_has_raised(monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *values: said.append(text % values))
    with communicator("cpu") as parent:
        comm, device = on_threads(parent)
        exchange(comm, device)
        comm.check()
        fails = comm.rank == 0
        if fails:
            device.missed = ("rank 1 did not come", 1)
            if checked:
                with pytest.raises(CollectiveTimeoutError):
                    comm.check()
        comm.Free()
    told = fails and not checked
    assert said == ["Free: earlier calls on GPUs have failed, and their results are wrong: rank 1 did not come"] * told


BLOCK = 2 << 20
_WORD = np.dtype(np.uint64)
_UUID = bytes(15) + b"\1"


class VirtualDevice(WindowDevice):
    """A `WindowDevice` with memory of ``cuda``. Create it inside of ``imported_over(cuda)``."""

    kinds: tuple[Kind, ...] = ("fd",)

    def __init__(self, cuda: VirtualCuda, rank: int, timeout_s: float) -> None:
        super().__init__(rank, timeout_s)
        self.cuda = cuda
        self._virtual: Any = importlib.import_module("mpicomm.devices.cuda.virtual_memory").VirtualSegment
        context: Any = importlib.import_module("mpicomm.devices.cuda.memory").PrimaryContext
        self._context = context(SimpleNamespace(ordinal=0, uuid=_UUID))

    def owns(self, pointer: int) -> bool:
        mapped = any(at <= pointer < at + size for at, (size, _) in self.cuda.mapped.items())
        return mapped or super().owns(pointer)

    def allocate(self, kind: Kind, nbytes: int) -> Any:
        return super().allocate(kind, nbytes) if kind == "ipc" else self._virtual.allocate(self._context, kind, nbytes)

    def export(self, segment: Any) -> Exported:
        exported: Exported = segment.export() if isinstance(segment, self._virtual) else super().export(segment)
        return exported

    def open(self, parts: Exported) -> Any:
        return self._virtual.open(self._context, parts) if parts[0][0].kind == "fd" else super().open(parts)

    def view(self, segment: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        count = int(np.prod(shape, dtype=object))
        return array_at(segment.pointer, count, dtype).reshape(shape)

    def signal(self, sent: int, inbox: int, stream: int) -> None:
        def step() -> None:
            count = array_at(sent, 1, _WORD)
            count += np.uint64(1)
            array_at(inbox, 1, _WORD)[:] = count

        self.enqueue(stream, step)

    def wait_signal(self, expected: int, inbox: int, peer: int, stream: int) -> None:
        def step() -> None:
            count = array_at(expected, 1, _WORD)
            count += np.uint64(1)
            until = time.monotonic() + self.timeout_s
            while array_at(inbox, 1, _WORD)[0] < count[0]:
                assert time.monotonic() < until, "no signal"
                time.sleep(1e-4)

        self.enqueue(stream, step)

    def suspend(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def memory_use(self) -> tuple[MemoryUse, ...]:
        return ()


class Rig(message_rigs.Rig):
    """A communicator whose memory is virtual."""

    device: VirtualDevice

    def settle(self) -> None:
        self.device.synchronize()
        MPI.Intracomm.Barrier(self.comm)

    def require_array_works(self, array: mpicomm.SymmetricArray, value: int) -> None:
        """Let each rank write into the next one's part, by its mapping, and signal."""
        self.settle()  # a peer may still look at its part
        array.put(DeviceArray(self.device, np.full(array.size, value + self.rank)), self.right)
        array.signal(self.right)
        array.wait_signal(self.left)
        self.settle()
        assert array.local.tolist() == [value + self.left] * array.size
        assert array.peer(self.right).tolist() == [value + self.rank] * array.size
        self.settle()


@contextlib.contextmanager
def rig_of(handle: str = "fd") -> Iterator[Rig]:
    with imported_over(cuda := VirtualCuda()), nothing_leaks():
        with on_window_device(made_by=partial(VirtualDevice, cuda), handle=handle) as (comm, device):
            yield Rig(comm, device)
        assert not cuda.mapped
        assert not cuda.reserved


def test_memory_goes_and_comes_back_at_its_addresses_with_its_contents() -> None:
    with rig_of() as rig:
        array = rig.comm.empty(BLOCK // 8, "i8")
        win = mpicomm.Win.Allocate(80, 8, MPI.INFO_NULL, rig.comm)
        rig.require_array_works(array, 10)
        part, own, peer = win.tomemory(), array.local, array.peer(rig.right)
        part[:] = rig.rank
        pointers, mapped = array.pointers, {at: size for at, (size, _) in rig.device.cuda.mapped.items()}
        for turn, keep in enumerate((True, True, False)):
            array.signal(rig.right)  # a signal before is for a wait afterwards
            rig.comm.suspend(keep=keep)
            assert not rig.device.cuda.mapped
            assert rig.comm.describe().suspended
            (saved,) = (use for use in rig.comm.describe().memory if use.purpose == "suspended contents")
            assert (saved.host_nbytes < BLOCK) == (not keep)
            rig.comm.resume()
            assert {at: size for at, (size, _) in rig.device.cuda.mapped.items()} == mapped
            assert not rig.comm.describe().suspended
            assert array.pointers is pointers
            assert (own == 10 * (turn + 1) + rig.left).all() == keep
            assert (peer == 10 * (turn + 1) + rig.rank).all() == keep
            assert (part == rig.rank).all() == keep
            array.wait_signal(rig.left)
            rig.require_array_works(array, 10 * (turn + 2))
        win.Fence()
        win.Put(DeviceArray(rig.device, np.full(10, 7 + rig.rank)), rig.right)
        win.Fence()
        rig.settle()
        assert part.view("i8").tolist() == [7 + rig.left] * 10
        win.Free()


def test_calls_in_between_raise_on_all_ranks_and_host_calls_go_on() -> None:
    with rig_of() as rig:
        comm, device = rig.comm, rig.device
        array, event = comm.zeros(3, "i8"), comm.shared_event
        win = mpicomm.Win.Allocate(80, 8, MPI.INFO_NULL, comm)
        win.Fence()
        x = DeviceArray(device, np.zeros(3))
        comm.suspend()
        calls: list[Callable[[], object]] = [
            lambda: comm.empty(3),
            lambda: comm.register(x),
            event,
            lambda: array.local,
            lambda: array.put(x, rig.right),
            lambda: array.signal(rig.right),
            lambda: comm.Allreduce(x, x),
            lambda: comm.Allreduce(MPI.IN_PLACE, x, algorithm="mpi"),
            lambda: comm.Iallreduce(x, x),
            lambda: comm.Send(x, rig.right),
            lambda: comm.Irecv(x, rig.left),
            lambda: comm.Send(x, rig.right, algorithm="stream"),
            lambda: win.Put(x, rig.right),
            win.Fence,
            lambda: mpicomm.Win.Allocate(8, 1, MPI.INFO_NULL, comm),
            lambda: mpicomm.Win.Create_dynamic(MPI.INFO_NULL, comm),
        ]
        for call in calls:
            with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=r"is suspended: call resume\(\)"):
                call()
        assert comm.allreduce(1) == comm.size
        total = np.empty(1)
        comm.Allreduce(np.ones(1), total)
        assert total[0] == comm.size
        comm.check()
        comm.resume()
        rig.require_array_works(array, 1)
        win.Fence()
        win.Free()


def test_a_second_suspend_and_a_resume_without_it_do_nothing_and_arrays_are_closed_meanwhile() -> None:
    with rig_of() as rig:
        rig.comm.resume()
        array, other = rig.comm.zeros(3, "i8"), rig.comm.zeros(4, "i8")
        rig.comm.resume()
        rig.require_array_works(array, 3)
        rig.comm.suspend()
        rig.comm.suspend(keep=False)
        other.close()
        rig.comm.resume()
        rig.comm.resume()
        assert array.local.tolist() == [3 + rig.left] * 3
        rig.require_array_works(array, 4)
        rig.comm.suspend()  # the communicator is freed so


def leave_free(nbytes: int, cuda: VirtualCuda, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda, "free_nbytes", nbytes)


def import_nothing(cuda: VirtualCuda, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[Any, int]:
        return cuda.CUresult.CUDA_ERROR_INVALID_VALUE, 0

    patch.setattr(cuda, "cuMemImportFromShareableHandle", refuse)


FAILS: dict[str, tuple[int, Callable[[VirtualCuda, pytest.MonkeyPatch], None], str]] = {
    "no memory is free": (-1, partial(leave_free, 0), "OUT_OF_MEMORY"),
    "a block is free, for the signals only": (-1, partial(leave_free, BLOCK), "OUT_OF_MEMORY"),
    "new memory cannot be opened": (0, import_nothing, "memory of rank"),
}
"""The rank on which a resume fails, how, and the error of all ranks."""


def test_a_rank_that_cannot_resume_leaves_all_ranks_suspended() -> None:
    with rig_of() as rig:
        array, cuda = rig.comm.zeros(3, "i8"), rig.device.cuda
        rig.require_array_works(array, 3)
        rig.comm.suspend()
        for culprit, fail, said in FAILS.values():
            with pytest.MonkeyPatch.context() as patch, raises_everywhere(MPI.COMM_WORLD, HandleError, match=said):
                if rig.rank == culprit % rig.size:
                    fail(cuda, patch)
                rig.comm.resume()
            assert not cuda.mapped
            assert rig.comm.describe().suspended
        rig.comm.resume()
        assert array.local.tolist() == [3 + rig.left] * 3
        rig.require_array_works(array, 4)


def test_memory_that_cannot_come_back_at_its_addresses_is_kept() -> None:
    with rig_of("ipc") as rig:
        with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match='handle="fd".*MPICOMM_HANDLE=fd'):
            rig.comm.suspend()
        assert not rig.comm.describe().suspended


def test_ranks_that_differ_in_keep_are_refused() -> None:
    with rig_of() as rig:
        array = rig.comm.zeros(3, "i8")
        with raises_everywhere(
            MPI.COMM_WORLD, InvalidUsageError, match="suspend: keep differs between ranks: False on rank 0"
        ):
            rig.comm.suspend(keep=rig.rank > 0)
        rig.require_array_works(array, 4)


def test_memory_of_the_host_stays(host_comm: mpicomm.Communicator) -> None:
    with host_comm.zeros(3) as array:
        view = array.local
        host_comm.suspend()
        assert host_comm.describe().suspended
        with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=r"call resume\(\)"):
            _ = array.local
        host_comm.resume()
        assert array.local is view
