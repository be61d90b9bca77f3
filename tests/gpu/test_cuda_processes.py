"""Two processes on one GPU: the second opens the memory of the first."""

from __future__ import annotations

import multiprocessing
from multiprocessing import reduction
from multiprocessing.connection import Connection

import cupy
import numpy as np
import pytest

from mpicomm.devices.cuda.backend import CudaBackend
from mpicomm.devices.handle import FD_KINDS, Descriptor, Kind, MemoryHandle
from mpicomm.errors import HandleError

KINDS: list[Kind] = ["ipc", "fd", "staged"]
INBOX = 64  # the second process signals with the counter at this place of the first process's memory


def peer(connection: Connection, packet: bytes, exported_event: bytes) -> None:
    """Open the memory twice, read it, change it, signal into it."""
    backend = CudaBackend(0, timeout_s=60.0)
    handle = MemoryHandle.unpack(packet)
    fd = Descriptor(reduction.recv_handle(connection)) if handle.kind in FD_KINDS else None
    first, second = backend.open(((handle, fd),)), backend.open(((handle, fd),))
    if fd is not None:
        fd.close()
    shared = first.pointer == second.pointer
    first.close()
    with pytest.raises(HandleError, match="only the process that owns it"):
        backend.export(second)
    event = backend.open_event(exported_event)
    event.wait(0)
    view = backend.view(second, (4,), np.dtype(np.int64))
    connection.send((shared, view.get().tolist()))
    view += 100
    sent = backend.allocate("ipc", 8)
    backend.zero(sent.pointer, 8)
    backend.signal(sent.pointer, second.pointer + INBOX, 0)
    backend.synchronize()
    for resource in (event, sent, second, second, backend):
        resource.close()
    connection.send("closed")


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_opens_the_memory(kind: Kind) -> None:
    backend = CudaBackend(0, timeout_s=60.0)
    segment = backend.allocate(kind, 128)
    backend.zero(segment.pointer, segment.nbytes)
    view = backend.view(segment, (4,), np.dtype(np.int64))
    view[...] = cupy.arange(4)
    event = backend.create_event()
    event.record(0)
    ((handle, fd),) = backend.export(segment)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=peer, args=(there, handle.pack(), event.export()))
    process.start()
    there.close()
    if fd is not None:
        assert process.pid is not None
        reduction.send_handle(here, fd, process.pid)
        fd.close()
    # The peer's signal publishes its change; the wait is on this process's own memory.
    expected = backend.allocate("ipc", 8)
    backend.zero(expected.pointer, 8)
    backend.wait_signal(expected.pointer, segment.pointer + INBOX, 1, 0)
    assert here.poll(60)
    shared, content = here.recv()
    assert content == [0, 1, 2, 3]
    assert shared == (kind == "ipc")
    backend.synchronize()
    backend.check()
    assert view.get().tolist() == [100, 101, 102, 103]
    assert here.poll(60)
    assert here.recv() == "closed"
    process.join(60)
    assert process.exitcode == 0
    for resource in (event, expected, segment, backend):
        resource.close()
