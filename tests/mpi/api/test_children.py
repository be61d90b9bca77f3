"""What the calls of a Communicator make of its ranks, and the examples in the docstrings of its methods."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import Communicator
from mpicomm.api.communicator import CartCommunicator
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.rigs.communicators import awaited, communicator, require_memory_works
from tests.helpers.rigs.message_rigs import take_for_gpu

Make = Callable[[mpicomm.Communicator], MPI.Comm]


def create(comm: mpicomm.Communicator, members: list[int], *, group: bool = False) -> MPI.Comm:
    if group and comm.rank not in members:
        return MPI.COMM_NULL
    whole = comm.Get_group()
    part = whole.Incl(members)
    try:
        return comm.Create_group(part, tag=7) if group else comm.Create(part)
    finally:
        part.Free()
        whole.Free()


def split(comm: mpicomm.Communicator, members: list[int]) -> MPI.Intracomm:
    if comm.rank not in members:
        return comm.Split(MPI.UNDEFINED)
    return comm.Split(3, members.index(comm.rank))


DUPLICATES: dict[str, Make] = {
    "Dup": lambda comm: comm.Dup(),
    "Dup of info": lambda comm: comm.Dup(MPI.INFO_NULL),
    "Dup_with_info": lambda comm: comm.Dup_with_info(MPI.INFO_NULL),
    "Clone": lambda comm: comm.Clone(),
    "Idup": lambda comm: awaited(comm.Idup()),
    "Idup_with_info": lambda comm: awaited(comm.Idup_with_info(MPI.INFO_NULL)),
    "Split": lambda comm: comm.Split(),
    "Split_type": lambda comm: comm.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda comm: create(comm, list(range(comm.size))),
    "Create_group": lambda comm: create(comm, list(range(comm.size)), group=True),
    "Dup of Dup": lambda comm: comm.Dup().Dup(),
}


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
def test_what_is_made_of_all_ranks_is_a_communicator_too(comm: mpicomm.Communicator, duplicate: Make) -> None:
    child = duplicate(comm)
    assert type(child) is mpicomm.Communicator
    assert (child.rank, child.size, child.device, child.handle) == (comm.rank, comm.size, comm.device, comm.handle)
    assert (child.local_rank, child.local_size, child.num_nodes) == (comm.rank, comm.size, 1)
    with comm.zeros(2, np.int64) as parents, child:
        require_memory_works(child)
        with child.zeros(2, np.int64) as own:
            require_memory_works(comm)
            require_memory_works(child)
            own.local[0], parents.local[0] = 1, 2
            child.check()
            comm.check()
            assert (int(own.local[0]), int(parents.local[0])) == (1, 2)
    require_memory_works(comm)


MEMBERS = [[0], [2, 1], [3, 0, 2], [1, 3, 2, 0]]  # those of them that are there
PARTS = {"Split": split, "Create": create, "Create_group": partial(create, group=True)}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("members", MEMBERS, ids=str)
def test_what_is_made_of_some_ranks_is_a_communicator_of_those(
    comm: mpicomm.Communicator, members: list[int], part: Callable[[mpicomm.Communicator, list[int]], MPI.Comm]
) -> None:
    members = [rank for rank in members if rank < comm.size]
    if not members:
        pytest.skip("none of these ranks is there")
    child = part(comm, members)
    if comm.rank not in members:
        assert child == MPI.COMM_NULL
    else:
        assert type(child) is mpicomm.Communicator
        assert child.allgather(comm.rank) == members
        assert (child.device, child.handle) == (comm.device, comm.handle)
        assert (child.local_rank, child.local_size) == (child.rank, len(members))
        assert [link.path == "self" for link in child.describe().links] == [rank == comm.rank for rank in members]
        with child:
            require_memory_works(child)
    require_memory_works(comm)


@pytest.mark.mpi(min_size=2)
def test_a_group_of_other_ranks_is_refused(comm: mpicomm.Communicator) -> None:
    other, half = (comm.rank + 1) % comm.size, comm.Split(comm.rank)
    for caller, words in ((comm, f"has the ranks .{other}., and not rank {comm.rank}"), (half, "has 1 processes that")):
        group = comm.Get_group().Incl([other])
        with pytest.raises(mpicomm.InvalidUsageError, match=f"Create_group: group {words}") as caught:
            caller.Create_group(group)
        assert isinstance(caught.value, MPI.Exception)
        assert caught.value.Get_error_class() == MPI.ERR_GROUP
        group.Free()
    half.Free()


def test_parent_and_child_are_freed_in_any_order(device: str) -> None:
    parent = communicator(device)
    first, second, third = parent.Dup(), parent.Dup(), parent.Dup()
    arrays = [comm.zeros(1, np.int64) for comm in (parent, first, second)]
    first.Free()
    assert [array.closed for array in arrays] == [False, True, False]
    require_memory_works(parent)
    parent.Free()
    assert [array.closed for array in arrays] == [True, True, False]
    for comm in (second, third):  # used before, and not yet used
        require_memory_works(comm)
        comm.Free()


def test_check_of_an_unused_child_is_local(comm: mpicomm.Communicator) -> None:
    with comm.Dup() as child:
        if comm.rank == 0:
            child.check()
        comm.Barrier()
        require_memory_works(child)


def test_functions_of_attributes_run_once_for_each_communicator(comm_world: MPI.Intracomm) -> None:
    copied: list[Any] = []
    deleted: list[Any] = []

    def copy(comm: MPI.Comm, keyval: int, value: Any) -> Any:
        copied.append(value)
        return value

    def delete(comm: MPI.Comm, keyval: int, value: Any) -> None:
        deleted.append(value)

    keyval = MPI.Comm.Create_keyval(copy, delete)
    plain = comm_world.Dup()
    plain.Set_attr(keyval, "value")
    with mpicomm.Communicator(plain, device="cpu") as comm:
        assert comm.Get_attr(keyval) == "value"
        assert copied == ["value"] and deleted == []
        with comm.Dup() as again:
            again.Allreduce(MPI.IN_PLACE, np.ones(300_000, np.int16))  # sets the communicator up
            assert again.Get_attr(keyval) == "value"
            assert copied == ["value"] * 2 and deleted == []
        assert deleted == ["value"]
    assert deleted == ["value"] * 2
    plain.Free()
    assert deleted == ["value"] * 3 and copied == ["value"] * 2
    MPI.Comm.Free_keyval(keyval)


def test_a_communicator_says_which_memory_its_calls_take(comm_world: MPI.Intracomm) -> None:
    """MPI 4.1, section 11.4.3; programs ask so whether MPI is CUDA-aware."""
    key = "mpi_memory_alloc_kinds"
    with communicator("cpu", comm_world) as comm, comm.Dup() as child:
        kinds = child.Get_info().Get(key)
        assert kinds is not None and {*kinds.split(",")} >= {"system", "mpi"} and "cuda" not in kinds
        take_for_gpu(child)
        kinds = child.Get_info().Get(key)
        assert kinds is not None and {*kinds.split(",")} >= {"system", "mpi", "cuda:device", "cuda:host"}
        asked = MPI.Info.Create({key: "system,cuda:device"})
        with child.Dup_with_info(asked) as again:
            assert again.Get_info().Get(key) == kinds
        asked.Free()


MOST_USED = {*OPERATIONS, "Allreduce_init", "Barrier", "Iallreduce", "Recv", "Send", "Sendrecv", "Split", "zeros"}

CLASSES = (Communicator, mpicomm.Experts, mpicomm.SymmetricArray, mpicomm.Win)


def examples() -> Iterator[tuple[str, str]]:
    methods = inspect.getmembers(CartCommunicator, inspect.isfunction)
    for name, documented in [*methods, *((cls.__name__, cls) for cls in CLASSES)]:
        for block in re.findall(r"(?:^    .*\n?)+", inspect.getdoc(documented) or "", re.MULTILINE):
            yield name, textwrap.dedent(block)


def test_the_most_used_methods_have_examples_and_all_examples_run(host_comm: Communicator) -> None:
    missing = {*MOST_USED}
    for name, source in examples():
        missing.discard(name)
        assert name in source or name == "SymmetricArray"
        code = compile(source, f"the example of {name}", "exec")
        exec(code, {"comm": host_comm, "cp": np, "mpicomm": mpicomm, "MPI": MPI})
    assert not missing
