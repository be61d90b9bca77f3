"""Existing memory that ranks open to their peers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError, InvalidUsageError
from mpicomm.cluster.agreement import Group
from mpicomm.devices.handle import Descriptor, Exported, MemoryHandle
from mpicomm.devices.host import HostBackend
from mpicomm.devices.host_memory import HostSegment, map_shared
from mpicomm.sharing import fd_exchange
from mpicomm.sharing.segments import share
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.rigs.communicators import communicator, require_memory_works, settle, to_host


def require_registered_works(comm: mpicomm.Communicator, xp: Any, arrays: list[Any]) -> None:
    """Open ``arrays`` to the peers, write into them from there, and close."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    registered = [comm.register(array) for array in arrays]
    for number, (array, own) in enumerate(zip(arrays, registered, strict=True)):
        assert (own.shape, own.dtype) == (array.shape, array.dtype)
        array[...] = 10 * number + comm.rank
    settle(comm)
    for number, own in enumerate(registered):
        assert to_host(own.local).tolist() == np.full(own.shape, 10 * number + comm.rank).tolist()
        assert to_host(own.get(right)).tolist() == np.full(own.shape, 10 * number + right).tolist()
    settle(comm)
    for number, own in enumerate(registered):
        own.peer(right)[...] = 50 + number + comm.rank
        own.signal(right)
        own.wait_signal(left)
    settle(comm)
    for own in registered:
        own.close()
    for number, array in enumerate(arrays):
        assert to_host(array).tolist() == np.full(array.shape, 50 + number + left).tolist()


@pytest.fixture
def mapped(tmp_path: Path) -> npt.NDArray[np.float64]:
    """Memory that can be registered."""
    return np.memmap(tmp_path / "content", np.float64, "w+", shape=10)


def test_mapped_file_is_registered(host_comm: mpicomm.Communicator, tmp_path: Path) -> None:
    content = np.memmap(tmp_path / "content", np.float64, "w+", offset=4096 + 8, shape=(10, 100))
    require_registered_works(host_comm, np, [content[:3], content[3:5]])


def test_memory_of_a_symmetric_array_is_registered_again(comm_world: MPI.Intracomm, no_leaks: None) -> None:
    with communicator("cpu") as comm, communicator("cpu") as other:
        whole = comm.zeros(1000)
        for each in (comm, other):
            require_registered_works(each, np, [whole.local[:300], whole.local[300:310].reshape(2, 5)])
        with other.register(whole.local[5:]) as part:
            part.local[:] = comm.rank
            whole.close()
            assert part.get((comm.rank + 1) % comm.size).tolist() == [(comm.rank + 1) % comm.size] * 995
            settle(comm)


@pytest.mark.mpi(min_size=2)
def test_memory_of_a_communicator_without_all_ranks_is_refused_by_all(
    host_comm: mpicomm.Communicator, comm_world: MPI.Intracomm
) -> None:
    with communicator("cpu", MPI.COMM_SELF) as alone:
        own = alone.zeros(10)
        text = "memory of rank .*: it is memory of mpicomm that this rank has not mapped.*: allocate it by empty()"
        with raises_everywhere(comm_world, HandleError, match=text):
            host_comm.register(own.local)
    require_memory_works(host_comm)


def test_memory_no_peer_can_open_is_refused_by_all(
    host_comm: mpicomm.Communicator, comm_world: MPI.Intracomm, mapped: npt.NDArray[np.float64]
) -> None:
    cases: list[tuple[Any, str]] = [
        (np.zeros(3), "array lies in private memory of this process"),
        ([1.0, 2.0], "array is a list"),
        (np.array([None] * 3), "dtype=object holds no plain bytes"),
    ]
    for culprit in range(host_comm.size):
        for bad, text in cases:
            with raises_everywhere(comm_world, InvalidUsageError, match=f"^rank {culprit}: {text}"):
                host_comm.register(bad if host_comm.rank == culprit else mapped[:3])
    require_memory_works(host_comm)


@pytest.mark.mpi(min_size=2)
def test_registered_shapes_that_differ_are_refused_by_all(
    host_comm: mpicomm.Communicator, comm_world: MPI.Intracomm, mapped: npt.NDArray[np.float64]
) -> None:
    with raises_everywhere(comm_world, InvalidUsageError, match="register differs between ranks"):
        host_comm.register(mapped[: 3 + (host_comm.rank == 1)])
    require_memory_works(host_comm)


@pytest.mark.gpu_alone
def test_arrays_of_one_pool_block_are_registered(comm: mpicomm.Communicator, xp: Any) -> None:
    pool = xp.zeros(100_000, np.int32)
    for _ in range(2):  # it is registered again after the close
        require_registered_works(comm, xp, [pool[:300], pool[300:1300].reshape(10, 100), pool[90_001:]])
    assert not to_host(pool[1300:90_001]).any()
    small = [xp.zeros(50, np.int64) for _ in range(4)]
    require_registered_works(comm, xp, small)


@pytest.mark.gpu_alone
def test_host_memory_is_refused_on_a_gpu(comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    with raises_everywhere(comm_world, InvalidUsageError, match="not on a GPU"):
        comm.register(np.zeros(3))
    require_memory_works(comm)


@pytest.fixture
def default_pool(device: str, comm: mpicomm.Communicator, xp: Any) -> Iterator[int]:
    """The default pool of the GPU, in which `allocated` then allocates."""
    if device == "cpu":
        pytest.skip("pools are a GPU's")
    before = xp.cuda.runtime.deviceGetMemPool(comm.device)
    xp.cuda.runtime.deviceSetMemPool(comm.device, xp.cuda.runtime.deviceGetDefaultMemPool(comm.device))
    yield xp.cuda.runtime.deviceGetDefaultMemPool(comm.device)
    xp.cuda.runtime.deviceSetMemPool(comm.device, before)


@pytest.fixture
def pool(default_pool: int, comm: mpicomm.Communicator, xp: Any) -> Iterator[int]:
    """A pool for export, in which `allocated` then allocates."""
    cuda = xp.cuda.runtime
    kinds = cuda.cudaMemAllocationTypePinned, cuda.cudaMemHandleTypePosixFileDescriptor, cuda.cudaMemLocationTypeDevice
    made = cuda.memPoolCreate(cuda.MemPoolProps(*kinds, comm.device))
    cuda.deviceSetMemPool(comm.device, made)
    yield made
    xp.cuda.Device().synchronize()
    cuda.memPoolDestroy(made)


def allocated(xp: Any, count: int) -> Any:
    with xp.cuda.using_allocator(xp.cuda.malloc_async):
        return xp.zeros(count, np.int64)


def test_arrays_of_a_pool_for_export_are_registered(pool: int, comm: mpicomm.Communicator, xp: Any) -> None:
    for count in (1, 5000, 1 << 20):
        first, second = allocated(xp, count), allocated(xp, count)
        require_registered_works(comm, xp, [first, second])
        require_registered_works(comm, xp, [first])
        require_registered_works(comm, xp, [second[count // 2 :], first[: count // 2 + 1]])
        del first, second


def test_one_array_is_registered_twice_and_closed_in_any_order(pool: int, comm: mpicomm.Communicator, xp: Any) -> None:
    array, right = allocated(xp, 1000), (comm.rank + 1) % comm.size
    one, two = comm.register(array), comm.register(array[500:])
    array[...] = comm.rank
    settle(comm)
    one.close()
    assert (two.get(right) == right).all()
    one = comm.register(array)
    two.close()
    assert (one.get(right) == right).all()
    settle(comm)
    one.close()


def test_collectives_and_windows_use_it(pool: int, comm: mpicomm.Communicator, xp: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (100, 1 << 20):
        output = allocated(xp, count * comm.size)
        with comm.register(output):
            comm.Allgather(xp.full(count, comm.rank, np.int64), output)
            comm.check()
            assert (to_host(output).reshape(comm.size, count) == np.arange(comm.size)[:, None]).all()
            comm.Barrier()
    part = allocated(xp, 100)
    win = mpicomm.Win.Create(part, 8, MPI.INFO_NULL, comm)
    win.Fence()
    win.Put(xp.full(100, comm.rank), right)
    win.Fence()
    comm.check()
    assert (to_host(part) == left).all()
    win.Free()


def test_a_pool_that_was_not_made_for_export_is_refused(
    default_pool: int, comm: mpicomm.Communicator, comm_world: MPI.Intracomm, xp: Any
) -> None:
    array = allocated(xp, 100)
    with raises_everywhere(comm_world, InvalidUsageError, match="not made for export.*cudaMemPoolCreate"):
        comm.register(array)
    with raises_everywhere(comm_world, InvalidUsageError, match="not made for export.*cudaMemPoolCreate"):
        mpicomm.Win.Create(array, 8, MPI.INFO_NULL, comm)


PART = 4096

# The first communicator of a process makes memory that stays, which is no leak of these tests.
pytestmark = pytest.mark.usefixtures("host_comm")


class InParts(HostBackend):
    """Shows one shared mapping as ``parts`` parts of a page each; as a handle without a descriptor if it is 0."""

    def __init__(self, parts: int) -> None:
        super().__init__(5.0)
        self._parts = parts

    def export(self, segment: Any) -> Exported:
        ((_, fd),) = super().export(segment)
        assert fd is not None
        try:
            if self._parts == 0:
                return ((MemoryHandle("ipc", bytes(16), bytes(64), PART, 0, PART), None),)
            handles = [MemoryHandle("memfd", bytes(16), b"", PART, 0, PART) for _ in range(self._parts)]
            return tuple((handle, Descriptor.of(os.dup, fd)) for handle in handles)
        finally:
            fd.close()

    def open(self, parts: Exported) -> HostSegment:
        if parts[0][0].kind == "ipc":
            return self.allocate("memfd", PART)
        views = []
        for _, fd in parts:
            assert fd is not None
            views.append(map_shared(fd, 0, PART))
        return HostSegment(np.concatenate(views))


@pytest.fixture
def group(comm_world: MPI.Intracomm) -> Iterator[Group]:
    private = comm_world.Dup()
    yield Group(private, range(comm_world.size), 5.0)
    private.Free()


@pytest.mark.parametrize("parts_of", [lambda rank: 3, lambda rank: rank, lambda rank: 1 + 4 * rank])
def test_each_peer_opens_as_many_parts_as_a_rank_has(
    no_leaks: None, group: Group, parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_exchange, "MOST_FDS", 3)  # of a message
    backend = InParts(parts_of(group.rank))

    def produce() -> HostSegment:
        segment = backend.allocate("memfd", PART)
        backend.view(segment, (1,), np.dtype(np.int64))[0] = group.rank
        return segment

    segments = share(group, backend, "parts", produce, lambda: "", sealed=False)
    for rank in range(group.size):
        number = parts_of(rank)
        if rank != group.rank and number:
            assert segments[rank].nbytes == number * PART
            content = backend.view(segments[rank], (number * PART // 8,), np.dtype(np.int64))
            assert content[:: PART // 8].tolist() == [rank] * number
    segments.close("parts: close")
    backend.close()
