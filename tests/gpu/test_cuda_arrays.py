"""Arrays and streams of other libraries, taken as they are or refused; and two processes that share memory of a GPU."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cupy
import numpy as np
import pytest
from cuda.bindings import driver

from mpicomm.devices.cuda.backend import CudaBackend
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.handle import FD_KINDS, Descriptor, Kind, MemoryHandle
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.mpi import buffers
from tests.gpu import DEVICES

MIB = 1 << 20


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    backend = CudaBackend(0, timeout_s=5.0)
    yield backend
    backend.check()
    backend.close()


def test_adopts_part_of_a_pool_block(
    backend: CudaBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mpicomm"), "propagate", True)  # a communicator turns it off
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), caplog.at_level(logging.WARNING, "mpicomm"):
        block = cupy.empty(MIB, np.uint8)
        del block  # the pool cuts the next two from it
        arrays = [cupy.full(1000, value, np.uint8) for value in (1, 2)]
        segments = [backend.adopt(array) for array in arrays]
    handles = [backend.export(segment)[0][0] for segment in segments]
    assert handles[0].key == handles[1].key
    assert handles[0].offset != handles[1].offset
    assert all(handle.kind == "ipc" and handle.nbytes == 1000 and handle.size >= MIB for handle in handles)
    assert len(caplog.records) == 1
    assert str(handles[0].size) in caplog.text
    for segment in segments:
        segment.close()
        segment.close()
    assert arrays[1].get().tolist() == [2] * 1000


def test_an_adopted_array_lives_as_long_as_its_segment(backend: CudaBackend) -> None:
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        segment = backend.adopt(cupy.empty(512, np.uint8))
    assert pool.used_bytes() == 512
    segment.close()
    assert pool.used_bytes() == 0


def test_adopts_an_empty_array(backend: CudaBackend) -> None:
    segment = backend.adopt(cupy.empty((0, 3), np.float32))
    assert segment.nbytes == 0
    assert backend.export(segment)[0][0].nbytes == 0
    assert backend.view(segment, (0, 3), np.dtype(np.float32)).shape == (0, 3)
    segment.close()


def array_at(memory: Any) -> Any:
    return cupy.ndarray((16,), np.float32, memory)


def test_refuses_memory_that_ipc_cannot_export(backend: CudaBackend) -> None:
    with pytest.raises(InvalidUsageError, match=r"managed memory.*comm\.empty\(\)"):
        backend.adopt(array_at(cupy.cuda.malloc_managed(64)))
    with pytest.raises(
        InvalidUsageError, match=r"cudaMallocAsync.*not made for export.*cudaMemPoolCreate.*backend:native"
    ):
        backend.adopt(array_at(cupy.cuda.malloc_async(64)))
    pinned = cupy.cuda.alloc_pinned_memory(64)
    host = cupy.cuda.UnownedMemory(pinned.ptr, 64, pinned, 0)
    with pytest.raises(InvalidUsageError, match=r"host memory.*comm\.empty\(\)"):
        backend.adopt(array_at(cupy.cuda.MemoryPointer(host, 0)))
    with (
        mapped_allocations([2 * MIB], exportable=False) as address,
        pytest.raises(InvalidUsageError, match=r"virtual memory.*not made for export.*expandable_segments:False"),
    ):
        backend.adopt(array_at(cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 2 * MIB, None, 0), 0)))


@contextmanager
def mapped_allocations(sizes: Sequence[int], *, exportable: bool) -> Iterator[int]:
    """Map allocations of GPU 0 one after the other, as an allocator with virtual memory does; return their address."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    types = driver.CUmemAllocationHandleType
    properties.requestedHandleTypes = (
        types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR if exportable else types.CU_MEM_HANDLE_TYPE_NONE
    )
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    address = at = int(call(driver.cuMemAddressReserve, sum(sizes), 0, 0, 0))
    for size in sizes:
        allocation = call(driver.cuMemCreate, size, properties, 0)
        call(driver.cuMemMap, at, size, 0, allocation, 0)
        call(driver.cuMemRelease, allocation)
        at += size
    call(driver.cuMemSetAccess, address, sum(sizes), [access], 1)
    yield address
    cupy.cuda.Device(0).synchronize()
    call(driver.cuMemUnmap, address, sum(sizes))
    call(driver.cuMemAddressFree, address, sum(sizes))


def test_adopts_virtual_memory_of_several_allocations(backend: CudaBackend) -> None:
    sizes = [2 * MIB, 4 * MIB, 2 * MIB]
    with mapped_allocations(sizes, exportable=True) as address:
        memory = cupy.cuda.UnownedMemory(address, sum(sizes), None, 0)
        array = cupy.ndarray((6 * MIB,), np.uint8, cupy.cuda.MemoryPointer(memory, MIB))
        array[...] = cupy.arange(6 * MIB, dtype=np.int64).astype(np.uint8)
        segment = backend.adopt(array)
        parts = backend.export(segment)
        assert [(handle.size, handle.offset, handle.nbytes) for handle, _ in parts] == [
            (2 * MIB, MIB, MIB),
            (4 * MIB, 0, 4 * MIB),
            (2 * MIB, 0, MIB),
        ]
        peer = backend.open(parts)
        for _, fd in parts:
            assert fd is not None
            fd.close()
        there = backend.view(peer, array.shape, array.dtype)
        assert peer.pointer != segment.pointer
        assert bool((there == array).all())
        there[MIB] = 77
        assert int(array[MIB]) == 77
        del there
        peer.close()
        segment.close()


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")
def test_refuses_memory_of_another_device(backend: CudaBackend) -> None:
    with cupy.cuda.Device(1):
        array = cupy.empty(16)
    with pytest.raises(InvalidUsageError, match=r"GPU 1.*GPU 0"):
        backend.asarray(array)
    other = CudaBackend(1, 1.0)
    assert other.link(DEVICES[0].uuid, "ipc").path in ("NVLink", "PCIe")
    other.close()


# Arrays and streams of other libraries


class CudaArray:
    def __init__(self, array: Any) -> None:
        self._array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class ProtocolStream:
    def __init__(self, *answer: int) -> None:
        self._answer = answer

    def __cuda_stream__(self) -> tuple[int, ...]:
        return self._answer


def test_views_arrays_without_copying(backend: CudaBackend) -> None:
    array = cupy.arange(8, dtype=np.int32)
    assert backend.asarray(array) is array
    assert backend.asarray(CudaArray(array)).data.ptr == array.data.ptr
    for other in (np.arange(8), [1, 2], None):
        with pytest.raises(InvalidUsageError, match="on GPU 0"):
            backend.asarray(other)


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("typecode", ["?", "B", "e", "D"])
def test_reads_the_type_of_an_array_that_speaks_only_dlpack(backend: CudaBackend, typecode: str, count: int) -> None:
    array = cupy.zeros(count, typecode)

    class OnlyDlpack:
        def __dlpack_device__(self) -> Any:
            return array.__dlpack_device__()

        def __dlpack__(self, stream: int | None = None) -> Any:
            return array.__dlpack__(stream=stream)

    memory = buffers.read(OnlyDlpack(), writable=True, name="x")
    assert (memory.dtype, memory.nbytes, memory.on_device) == (array.dtype, array.nbytes, True)


def test_resolves_streams(backend: CudaBackend) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    assert backend.stream(None) == cupy.cuda.get_current_stream().ptr
    with stream:
        assert backend.stream(None, cupy.empty(1)) == stream.ptr
    assert backend.stream(stream) == stream.ptr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # CuPy 14 prefers Stream.from_external, 13 has only this
        external = cupy.cuda.ExternalStream(stream.ptr)
    assert backend.stream(external) == stream.ptr
    assert backend.stream(ProtocolStream(0, stream.ptr)) == stream.ptr
    assert backend.stream(stream.ptr) == stream.ptr
    assert backend.stream(0) == 0
    for wrong in (True, -1, "0", 1.5, ProtocolStream(1, 0), ProtocolStream(0)):
        with pytest.raises(InvalidUsageError, match="stream="):
            backend.stream(wrong)


def test_takes_torch_tensors_and_streams(backend: CudaBackend) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    tensor = torch.arange(8, dtype=torch.float32, device="cuda:0", requires_grad=True)
    assert backend.asarray(tensor).data.ptr == tensor.data_ptr()
    assert backend.asarray(tensor.detach().bool()).dtype == np.bool_
    with pytest.raises(InvalidUsageError, match=r"torch\.Tensor.*on GPU 0"):
        backend.asarray(torch.zeros(8))
    stream = torch.cuda.Stream()
    assert backend.stream(stream) == stream.cuda_stream
    with torch.cuda.stream(stream):
        assert backend.stream(None, tensor) == stream.cuda_stream
        assert backend.stream(None, cupy.empty(1)) == cupy.cuda.get_current_stream().ptr


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
