"""The address of a buffer argument decides whether its memory is on a GPU; the argument's class does not."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.mpi.arguments import Operand, is_on_device, parse, parse_on_device
from mpicomm.mpi.buffers import is_host_view, read
from mpicomm.mpi.host_calls import HostCopies
from tests.helpers.fakes import fake_driver
from tests.helpers.fakes.fake_driver import OnGpu


@pytest.fixture
def memory() -> npt.NDArray[np.uint8]:
    return fake_driver.content(256)


def read_argument(spec: Any, **how: Any) -> Operand:
    return parse(spec, writable=True, name="buf", **how)


def around(memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """A NumPy array around an address of a device, as libraries make it that hand memory to a CUDA-aware MPI."""
    return np.frombuffer(memoryview((ctypes.c_char * memory.nbytes).from_address(memory.ctypes.data)), np.float32)


def test_mpi_gets_no_device_memory_for_buffered_sends(memory: npt.NDArray[np.uint8]) -> None:
    for buffer in (MPI.memory.fromaddress(memory.ctypes.data, 256), OnGpu(memory)):
        with pytest.raises(InvalidUsageError, match="Attach_buffer: buf lies in device memory"):
            MPI.Attach_buffer(buffer)
    host = bytearray(1024)
    MPI.Attach_buffer(host)
    MPI.COMM_SELF.Bsend(np.ones(1), MPI.PROC_NULL)
    assert MPI.Detach_buffer() is host


def test_buffers_around_device_memory_are_device_arrays(memory: npt.NDArray[np.uint8]) -> None:
    address = memory.ctypes.data
    by_address = MPI.memory.fromaddress(address, 256)
    for buffer in (
        by_address,
        memoryview(cast(Any, by_address)),
        (ctypes.c_float * 64).from_address(address),
        around(memory),
    ):
        operand = parse_on_device([buffer, MPI.FLOAT], True, "buf")
        assert operand is not None
        assert (operand.pointer, operand.total, operand.device, operand.memory.by_address) == (address, 64, 0, True)
    view = around(memory)[4:]
    assert not is_host_view(view) and is_on_device(view)
    assert read_argument(view).pointer == address + 16


def test_host_memory_is_the_hosts_whatever_offers_it(memory: npt.NDArray[np.uint8]) -> None:
    host = np.zeros(64, np.float32)
    with mmap.mmap(-1, 256) as mapping:
        buffers: list[Any] = [
            host, host[3:], np.frombuffer(bytearray(256), np.float32), np.frombuffer(bytes(256), np.float32),
            np.frombuffer(mapping, np.float32), array.array("f", range(64)), bytearray(256),
            memoryview(cast(Any, host)), MPI.memory.fromaddress(host.ctypes.data, 256), (ctypes.c_float * 64)(),
            OnGpu(host, owned=False),
        ]  # fmt: skip
        for buffer in buffers:
            assert not is_on_device(buffer)
            assert not isinstance(buffer, np.ndarray) or buffer.base is None or is_host_view(buffer)
            assert parse_on_device(buffer, False, "buf") is None
        del buffers, buffer


def test_a_cuda_array_interface_over_device_memory_names_its_gpu() -> None:
    found = read(OnGpu(np.zeros(64, np.float32), device=3), True, "buf")
    assert (found.on_device, found.device, found.by_address) == (True, 3, False)


@pytest.mark.parametrize("nbytes", [0, 32])
def test_counts_beside_an_address_reach_to_the_end_of_its_allocation(
    memory: npt.NDArray[np.uint8], nbytes: int
) -> None:
    bare = MPI.memory.fromaddress(memory.ctypes.data, nbytes)
    assert read_argument([bare, 64, MPI.FLOAT]).nbytes == 256
    assert read_argument([bare, MPI.FLOAT]).nbytes == nbytes
    assert read_argument([bare, (60, 4), MPI.FLOAT]).pointer == memory.ctypes.data + 16
    assert read_argument([bare, ([32, 32], [0, 32]), MPI.FLOAT], shape="vector", blocks=2).total == 64
    with pytest.raises(InvalidUsageError, match="elements 0 to 65 are asked for, but the buffer holds 64"):
        read_argument([bare, 65, MPI.FLOAT])
    host = np.zeros(64, np.float32)
    bare = MPI.memory.fromaddress(host.ctypes.data, nbytes)
    assert read_argument([bare, 64, MPI.FLOAT]).nbytes == 256


def test_elements_with_gaps_reach_to_the_end_of_the_allocation_of_an_address(memory: npt.NDArray[np.uint8]) -> None:
    gaps = MPI.FLOAT.Create_vector(1, 1, 1).Create_resized(0, 16).Commit()
    bare = MPI.memory.fromaddress(memory.ctypes.data, 16 * 4)  # only the bytes of the elements
    derived = read_argument([bare, 16, gaps]).derived
    assert derived is not None and [each.address for each in derived] == [memory.ctypes.data]
    with pytest.raises(InvalidUsageError, match="reach from byte 0 to byte 260 of a buffer of 256 bytes"):
        read_argument([bare, 17, gaps])
    gaps.Free()


def test_mpi_gets_a_copy_of_all_elements_that_an_address_has(memory: npt.NDArray[np.uint8]) -> None:
    """The address says fewer bytes than MPI touches, or none."""
    memory[:] = np.arange(256, dtype=np.uint8)
    gaps = MPI.FLOAT.Create_vector(2, 1, 3).Commit()

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    backend: Any = SimpleNamespace(
        device=0, pinned=lambda nbytes: np.zeros(nbytes, np.uint8), copy=copy, synchronize=lambda stream: None
    )
    bare, short = (MPI.memory.fromaddress(memory.ctypes.data, nbytes) for nbytes in (0, 8))
    operands = [
        (read_argument([bare, 6, MPI.FLOAT]), 24),
        (read_argument([bare, (6, 2), MPI.FLOAT]), 32),
        (read_argument([bare, 3, MPI.FLOAT], blocks=4), 48),
        (read_argument([bare, ([2, 0, 3], [9, 60, 0]), MPI.FLOAT], shape="vector", blocks=3), 44),
        (read_argument([short, 2, gaps]), 2 * 4 * 4),
        (read_argument([short, MPI.FLOAT]), 8),
    ]
    for operand, nbytes in operands:
        copies = HostCopies(backend, 7)
        host = copies.stage(operand.spec, writable=True, name="buf", operand=operand)[0]
        assert np.array_equal(host, np.arange(nbytes, dtype=np.uint8))
        host += 1
        copies.copy_back()
        assert np.array_equal(memory[:nbytes], np.arange(1, nbytes + 1)) and memory[nbytes] == nbytes
        memory[:] = np.arange(256, dtype=np.uint8)
    gaps.Free()


class Exporter:
    """A DLPack object of host memory, which counts its exports."""

    def __init__(self, content: npt.NDArray[Any]) -> None:
        self.content = content
        self.dtype = content.dtype
        self.exports = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.content.__dlpack_device__()
        return device

    def __dlpack__(self, stream: Any = None) -> Any:
        self.exports += 1
        return self.content.__dlpack__()


def test_a_dlpack_object_is_exported_once_and_let_go() -> None:
    gc.disable()
    try:
        exporter = Exporter(np.arange(6.0))
        operand = parse([exporter, 6], writable=False, name="sendbuf")
        assert exporter.exports == 1
        received = np.zeros(6)
        MPI.COMM_SELF.Sendrecv(operand.spec, 0, 0, received, 0, 0)  # MPI reads the exported memory
        assert exporter.exports == 1 and received.tolist() == list(range(6))
        del operand
        gone = weakref.ref(exporter)
        del exporter
        assert gone() is None
    finally:
        gc.enable()


def test_an_object_that_is_no_buffer_is_let_go() -> None:
    class Nothing:
        pass

    gc.disable()
    try:
        nothing = Nothing()
        with pytest.raises(TypeError, match="neither the buffer protocol"):
            read(nothing, False, "buf")
        gone = weakref.ref(nothing)
        del nothing
        assert gone() is None
    finally:
        gc.enable()
