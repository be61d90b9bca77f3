"""How windows are made and freed, memory that ranks attach, and accumulates of pairs, by users and by all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError, InvalidUsageError
from tests.helpers.fakes.window_devices import FakeCupy
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import communicator, settle, to_host
from tests.helpers.rigs.message_rigs import on_window_device
from tests.mpi.windows.conftest import MakeWindow


@pytest.mark.parametrize("make", ["Allocate", "Allocate_shared"])
def test_every_rank_sees_the_parts_of_all(comm: mpicomm.Communicator, make: str) -> None:
    count = comm.rank + 1  # a separate size and unit on each rank
    win = getattr(mpicomm.Win, make)(count * 4, comm.rank + 1, MPI.INFO_NULL, comm, place="device")
    win.tomemory().view(np.int32)[...] = comm.rank
    comm.check()
    comm.Barrier()
    for rank in range(comm.size):
        part, disp_unit = win.Shared_query(rank)
        assert to_host(part.view(np.int32)).tolist() == [rank] * (rank + 1)
        assert disp_unit == rank + 1
    comm.Barrier()
    assert isinstance(win, mpicomm.Win)
    assert win.attrs[1:] == (count * 4, comm.rank + 1)
    assert win.Get_attr(MPI.WIN_SIZE) == count * 4
    assert win.flavor == (MPI.WIN_FLAVOR_ALLOCATE if make == "Allocate" else MPI.WIN_FLAVOR_SHARED)
    group = win.Get_group()
    assert (win.group_size, win.group_rank, group.size, group.rank) == (comm.size, comm.rank, comm.size, comm.rank)
    assert win.group.size == comm.size
    group.Free()
    win.name = "mine"
    assert win.name == "mine"
    win.Free()
    assert win == MPI.WIN_NULL


def test_ranks_without_memory_take_part(comm: mpicomm.Communicator, xp: Any) -> None:
    win = mpicomm.Win.Allocate(8 if comm.rank == 0 else 0, 8, MPI.INFO_NULL, comm, place="device")
    win.Fence()
    if comm.rank == comm.size - 1:
        win.Put(xp.array([5]), 0)
    win.Fence()
    part, _ = win.Shared_query(MPI.PROC_NULL)
    assert to_host(part.view(np.int64)).tolist() == [5]
    assert win.tomemory().size == (8 if comm.rank == 0 else 0)
    comm.Barrier()
    win.Free()


def test_memory_of_the_caller_becomes_a_window(comm: mpicomm.Communicator, xp: Any) -> None:
    array = xp.full(8, comm.rank)
    win = mpicomm.Win.Create(array, 8, MPI.INFO_NULL, comm, place="device")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    win.Fence()
    win.Put(xp.array([100 + comm.rank]), right, 3)
    win.Fence()
    assert to_host(array).tolist() == [comm.rank] * 3 + [100 + left] + [comm.rank] * 4
    win.Free()


def test_windows_of_the_host_are_mpis(comm: mpicomm.Communicator, host_comm: mpicomm.Communicator) -> None:
    memory, right, left = np.zeros(4), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for win in (
        mpicomm.Win.Create(memory, 8, MPI.INFO_NULL, comm),
        mpicomm.Win.Create(memory, 8, MPI.INFO_NULL, comm, place="mpi"),
        mpicomm.Win.Allocate(32, 8, MPI.INFO_NULL, comm, place="mpi"),
        mpicomm.Win.Allocate_shared(32, 8, MPI.INFO_NULL, comm, place="mpi"),
        mpicomm.Win.Create(memory, 8, comm=host_comm, place="device"),
        mpicomm.Win.Allocate(32, 8, comm=host_comm, place="device"),
    ):
        assert type(win) is mpicomm.Win and repr(win) == "<mpicomm.Win place='mpi'>"
        win.tomemory()[:] = 0
        win.Fence()
        win.Put(np.full(1, 3.0 + comm.rank), right, 1)
        win.Accumulate(np.full(1, 2.0), right, 2)
        win.Fence()
        assert win.tomemory().view("d").tolist() == [0, 3 + left, 2, 0]
        if win.flavor != MPI.WIN_FLAVOR_CREATE:
            part, disp_unit = win.Shared_query(right)
            assert (part.view("d").tolist(), disp_unit) == ([0, 3 + comm.rank, 2, 0], 8)
        with pytest.raises(InvalidUsageError, match="stream"):
            win.Fence(stream=1)
        win.Free()
    mpicomm.Win.Create(memory, 8).Free()
    mpicomm.Win.Create(None, comm=comm).Free()
    for called, place in ((comm, "mpi"), (host_comm, "device")):
        win = mpicomm.Win.Create_dynamic(comm=called, place=place)
        assert type(win) is mpicomm.Win
        memory[:] = 0
        win.Attach(memory)
        win.Lock(comm.rank)
        win.Put(np.full(1, 3.0), comm.rank, MPI.Get_address(memory) + 8)
        win.Unlock(comm.rank)
        assert memory.tolist() == [0, 3, 0, 0]
        win.Detach(memory)
        win.Free()


@pytest.mark.parametrize("on_host", [False, True])
def test_bad_arguments_of_one_rank_raise_on_all(
    comm: mpicomm.Communicator, host_comm: mpicomm.Communicator, on_host: bool
) -> None:
    comm = host_comm if on_host else comm
    wrongs: list[tuple[str, dict[str, Any], str]] = [
        ("Allocate", {"size": -1}, "size=-1"),
        ("Allocate", {"size": 8.5}, "size=8.5"),
        ("Allocate_shared", {"disp_unit": 0}, "disp_unit=0"),
        ("Allocate", {"place": "gpu"}, "place='gpu': use one of auto, device, mpi"),
        ("Create", {"place": "gpu"}, "place='gpu'"),
        ("Create", {"disp_unit": -1}, "disp_unit=-1"),
        ("Create_dynamic", {"place": "gpu"}, "place='gpu'"),
    ]
    for make, wrong, words in wrongs:
        good: dict[str, Any] = {"Create": {"memory": None}, "Create_dynamic": {}}.get(make, {"size": 8})
        given = {**good, **(wrong if comm.rank == comm.size - 1 else {})}
        with pytest.raises(InvalidUsageError, match=f"rank {comm.size - 1}: .*{words}"):
            getattr(mpicomm.Win, make)(**given, comm=comm)
    with pytest.raises(InvalidUsageError, match=r"is no mpicomm.Communicator"):
        mpicomm.Win.Allocate(8, comm=MPI.COMM_SELF, place="device")
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", ["Allocate", "Create_dynamic"])
def test_a_rank_without_mpis_part_of_a_window_is_named_on_all(monkeypatch: pytest.MonkeyPatch, make: str) -> None:
    given: Any = {} if make == "Create_dynamic" else {"size": 8}
    fails: list[BaseException] = [MPI.Exception(MPI.ERR_NO_MEM), KeyboardInterrupt()]

    def create(*arguments: Any) -> Any:
        raise fails[0]

    with on_window_device(timeout_s=stretched(1.0)) as (comm, _):
        last = comm.size - 1
        if comm.rank == last:
            monkeypatch.setattr("mpicomm.api.window._create", create)
        with pytest.raises(mpicomm.MpicommError, match=f"rank {last}: "):
            getattr(mpicomm.Win, make)(**given, comm=comm, place="device")
        MPI.COMM_WORLD.Barrier()
        del fails[0]
        with pytest.raises(KeyboardInterrupt if comm.rank == last else mpicomm.CollectiveTimeoutError) as info:
            getattr(mpicomm.Win, make)(**given, comm=comm, place="device")
        MPI.COMM_WORLD.Barrier()
        if comm.rank == last:
            with pytest.raises(mpicomm.CollectiveTimeoutError, match="which came later"):
                comm.Free()
        else:
            error: Any = info.value
            assert error.ranks == (last,)
            comm.Free()


def test_open_epoch_of_one_rank_keeps_the_window_of_all(comm: mpicomm.Communicator, window: MakeWindow) -> None:
    win = window(1)
    if comm.rank == comm.size - 1:
        win.Lock(0)
    with pytest.raises(InvalidUsageError, match=f"rank {comm.size - 1}: Win.Free: the epoch of Lock of rank 0 is open"):
        win.Free()
    if comm.rank == comm.size - 1:
        win.Unlock(0)
    win.Free()


def test_communicator_frees_its_windows() -> None:
    with on_window_device() as (comm, _):
        win = mpicomm.Win.Allocate(64, comm=comm, place="device")
    with pytest.raises(MPI.Exception, match=r"Win\.Fence: the window was freed"):
        win.Fence()
    win.Free()
    assert win == MPI.WIN_NULL


def test_attached_memory_is_accessed_by_its_address(comm: mpicomm.Communicator, xp: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    win = mpicomm.Win.Create_dynamic(comm=comm, place="device")
    assert win.flavor == MPI.WIN_FLAVOR_DYNAMIC
    first, second = xp.full(6, -1), xp.full(3, -1)
    for turn, array in enumerate((first, second, first)):
        win.Attach(array)
        settle(comm)
        there = comm.allgather(MPI.Get_address(array))[right]
        win.Lock(right)
        win.Put(xp.array([turn, comm.rank]), right, there + 8)
        win.Accumulate(xp.array([5]), right, there)
        win.Unlock(right)
        settle(comm)
        assert to_host(array)[:3].tolist() == [4 if turn < 2 else 9, turn, left]
        seen = xp.zeros(3, np.int64)
        win.Lock_all()
        win.Get(seen, right, (there, 3, MPI.INT64_T))
        win.Unlock_all()
        assert to_host(seen).tolist() == [4 if turn < 2 else 9, turn, comm.rank]
        settle(comm)
        win.Detach(array)
        comm.Barrier()
        win.Lock(right)
        with pytest.raises(MPI.Exception, match=f"rank {right} has attached no memory that holds") as caught:
            win.Put(xp.array([7]), right, there)
        assert caught.value.Get_error_class() == MPI.ERR_RMA_RANGE
        win.Unlock(right)
        comm.Barrier()
    win.Free()


def test_wrong_memory_is_refused(comm: mpicomm.Communicator, xp: Any) -> None:
    win = mpicomm.Win.Create_dynamic(comm=comm, place="device")
    array = xp.full(6, -1)
    win.Attach(array)
    with pytest.raises(InvalidUsageError, match=r"Win\.Attach: memory overlaps 48 bytes"):
        win.Attach(array[2:4])
    with pytest.raises(InvalidUsageError, match=r"Win\.Detach: no memory is attached at address"):
        win.Detach(array[1:])
    win.Lock(comm.rank)
    end = MPI.Get_address(array) + 40
    with pytest.raises(MPI.Exception, match="has attached no memory that holds"):
        win.Put(xp.ones(2, np.int64), comm.rank, end)
    win.Put(xp.ones(1, np.int64), comm.rank, end)
    win.Unlock(comm.rank)
    comm.check()
    assert to_host(array).tolist() == [-1] * 5 + [1]
    with pytest.raises(MPI.Exception, match=r"Win\.Shared_query: ranks attach the memory"):
        win.Shared_query(0)
    comm.Barrier()
    win.Free()
    with pytest.raises((InvalidUsageError, HandleError)):
        win.Attach(np.zeros(3))
    win = mpicomm.Win.Allocate(8, comm=comm, place="device")
    for call in (win.Attach, win.Detach):
        with pytest.raises(MPI.Exception, match="make it by Create_dynamic"):
            call(xp.ones(1))
    win.Free()


@pytest.mark.gpu_alone  # virtual memory is memory of GPUs
def test_virtual_memory_of_a_gpu_is_refused(device: str) -> None:
    with communicator(device, handle="fd") as comm:
        win = mpicomm.Win.Create_dynamic(comm=comm)
        with comm.empty(8, np.int64) as array:  # its memory is virtual, as the memory of expandable segments
            with pytest.raises(InvalidUsageError, match=r"lies in virtual memory or .*, which ranks can open only"):
                win.Attach(array.local)
            with pytest.raises(InvalidUsageError, match="no memory is attached"):
                win.Detach(array.local)
        win.Free()


def test_nothing_goes_to_proc_null(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win = window(2, fill=3)
    win.Fence()
    win.Put(xp.ones(100), MPI.PROC_NULL, 77)
    win.Get(xp.ones(100), MPI.PROC_NULL)
    win.Accumulate(xp.ones(100), MPI.PROC_NULL)
    win.Fence(MPI.MODE_NOSUCCEED)
    win.Lock_all()
    requests = [win.Rput(xp.ones(1), MPI.PROC_NULL), win.Raccumulate(xp.ones(1), MPI.PROC_NULL)]
    assert MPI.Request.Waitall(requests)
    while not win.Rput(xp.zeros(0, np.int64), comm.rank).Test():
        pass
    win.Unlock_all()
    assert to_host(win.tomemory().view(np.int64)).tolist() == [3, 3]


PAIRS = {"FLOAT_INT": "f4", "DOUBLE_INT": "f8", "LONG_INT": "i8", "TWOINT": "i4", "SHORT_INT": "i2"}


def pair(name: str) -> tuple[MPI.Datatype, np.dtype[Any]]:
    return getattr(MPI, name), np.dtype([("value", PAIRS[name]), ("index", "i4")], align=True)


@pytest.mark.parametrize("op", ["MINLOC", "MAXLOC"])
def test_pairs_of_a_value_and_an_index_are_compared(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, op: str
) -> None:
    for datatype, dtype in map(pair, PAIRS):
        extent = dtype.itemsize
        parts = np.zeros((comm.size, 6), dtype)
        parts["value"] = np.random.default_rng(1).integers(0, 4, parts.shape)
        parts["index"] = 10 * np.arange(comm.size)[:, None] + np.arange(6)
        of_all = [xp.asarray(part.view(np.uint8)) for part in parts]
        win, before = window(6 * extent, np.uint8, disp_unit=extent), xp.zeros(6 * extent, np.uint8)
        win.Fence()
        win.Accumulate([of_all[0], 6, datatype], 0, (0, 6, datatype), MPI.REPLACE)
        win.Fence()
        win.Get_accumulate([of_all[comm.rank], 6, datatype], [before, 6, datatype], 0, 0, getattr(MPI, op))
        win.Fence()
        win.Fetch_and_op(None, [before, 1, datatype], 0, 5, MPI.NO_OP)
        win.Get([before[extent:], 5, datatype], 0, 0)
        win.Fence()
        expected = []
        for column in parts.T:
            best = column["value"].min() if op == "MINLOC" else column["value"].max()
            expected.append((best, column["index"][column["value"] == best].min()))
        found = to_host(before).view(dtype)
        assert [(each["value"], each["index"]) for each in found] == [expected[5], *expected[:5]], dtype


@pytest.mark.parametrize("op", ["REPLACE", "MAXLOC"])
def test_derived_datatypes_of_pairs_are_updated(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, op: str
) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for datatype, dtype in map(pair, PAIRS):
        extent = dtype.itemsize
        row, column = datatype.Create_contiguous(2).Commit(), datatype.Create_vector(2, 1, 2).Commit()
        mine = np.zeros(4, dtype)
        mine["value"], mine["index"] = [1, 2, 3, 4], comm.rank
        win, origin = window(4 * extent, np.uint8, disp_unit=extent), xp.asarray(mine.view(np.uint8))
        for made, first, places, sent in ((row, 1, [1, 2], [1, 2]), (column, 0, [0, 2], [1, 3])):
            win.Fence()
            win.Accumulate([origin, 1, made], right, (first, 1, made), getattr(MPI, op))
            win.Fence()
            comm.check()
            found = to_host(win.tomemory()).view(dtype)[places]
            assert [(each["value"], each["index"]) for each in found] == [(each, left) for each in sent], dtype
            made.Free()


def test_an_operation_of_the_user_accumulates(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    if type(xp) is FakeCupy:
        pytest.skip("doubles of GPUs have no operations of users")
    win = window(3, np.float64)
    win.Fence()
    win.Accumulate(xp.array([1.0, 2.0, -7.0]) * (1 + comm.rank), 0, op=mpicomm.Op("max(a, abs(b))"))
    win.Fence()
    if comm.rank == 0:
        assert to_host(win.tomemory().view(np.float64)).tolist() == [comm.size, 2 * comm.size, 7 * comm.size]


@pytest.mark.parametrize("of_host", [False, True])
def test_each_number_is_drawn_once(comm: mpicomm.Communicator, xp: Any, window: MakeWindow, of_host: bool) -> None:
    module, win, rounds = np if of_host else xp, window(2), 20
    one, drawn = module.ones(1, np.int64), [module.zeros(1, np.int64) for _ in range(rounds)]
    win.Lock_all()
    for number in drawn:
        win.Fetch_and_op(one, number, comm.size - 1, 1)
    win.Unlock_all()
    comm.check()
    mine = [int(to_host(number)[0]) for number in drawn]
    assert sorted(number for each in comm.allgather(mine) for number in each) == list(range(rounds * comm.size))
    assert mine == sorted(mine)


def test_one_rank_wins_a_swap(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    for dtype in (np.int8, np.uint16, np.int32, np.int64):
        win = window(3, dtype)
        before = xp.full(1, 77, dtype)
        win.Fence()
        win.Compare_and_swap(xp.array([1 + comm.rank], dtype), xp.zeros(1, dtype), before, 0, 1)
        win.Fence()
        seen = comm.allgather(int(to_host(before)[0]))
        assert seen.count(0) == 1
        winner = 1 + seen.index(0)
        assert {*seen} <= {0, winner}
        if comm.rank == 0:
            assert to_host(win.tomemory().view(dtype)).tolist() == [0, winner, 0]
