"""Memory that a rank shows to its peers in several parts, and ranks whose memory has different kinds of handles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.devices.handle import Descriptor, Exported, MemoryHandle
from mpicomm.devices.host import HostBackend
from mpicomm.devices.host_memory import HostSegment, map_shared
from mpicomm.errors import HandleError
from mpicomm.sharing import fd_exchange
from mpicomm.sharing.segments import share
from tests.helpers.faults.raising import raises_everywhere

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


def test_a_rank_that_cannot_export_is_an_error_on_all_ranks(
    no_leaks: None, comm_world: MPI.Intracomm, group: Group
) -> None:
    class Refuses(InParts):
        def export(self, segment: Any) -> Exported:
            if group.rank == group.size - 1:
                raise HandleError("no descriptor")
            return super().export(segment)

    backend = Refuses(2)
    with raises_everywhere(comm_world, HandleError, match="no descriptor"):
        share(group, backend, "parts", lambda: backend.allocate("memfd", PART), lambda: "")
    backend.close()
