"""The arguments of a host backend, its signals, and existing memory that it adopts."""

from __future__ import annotations

import array
import contextlib
import itertools
import mmap
import multiprocessing.resource_tracker
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpicomm.devices.host import HostBackend
from mpicomm.errors import InvalidUsageError
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.rigs.host_segments import PAGE, opened


class DlpackProducer:
    """An array that offers only DLPack, as tensors of other libraries do."""

    def __init__(self, content: Any, error: Exception | None = None) -> None:
        self.content = content
        self.error = error

    def __dlpack__(self, **arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.content.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.content.__dlpack_device__()


def test_host_arrays_are_taken_without_a_copy(no_leaks: None) -> None:
    local = np.zeros(4, np.float32)
    text = bytearray(16)
    for given_, size in ((local, 4), (local.data, 4), (DlpackProducer(local), 4), (text, 16)):
        taken = HostBackend(1.0).asarray(given_)
        assert taken.size == size
        assert np.shares_memory(taken, np.frombuffer(given_, np.uint8) if given_ is text else local)
    numbers = array.array("d", [1.0, 2.0])
    HostBackend(1.0).asarray(numbers)[1] = 3.0
    assert numbers[1] == 3.0


class GpuArray:
    __cuda_array_interface__ = {"shape": (1,)}


NO_ARRAYS: list[tuple[Any, str]] = [
    *(
        (value, f"^array is a {type(value).__name__}, .*: pass a NumPy array")
        for value in (None, 5, [1, 2], "text", object(), {1})
    ),
    *(
        (DlpackProducer(np.zeros(1), error("it needs a gradient")), "DLPack cannot hand over: it needs a gradient")
        for error in (BufferError, RuntimeError, ValueError, TypeError)
    ),
    (GpuArray(), r'GpuArray on a GPU.*: create it with device="auto"'),
]


@pytest.mark.parametrize(("value", "said"), NO_ARRAYS)
def test_what_is_no_host_array_is_refused_with_the_way_out(backend: HostBackend, value: Any, said: str) -> None:
    with pytest.raises(InvalidUsageError, match=said) as refusal:
        backend.asarray(value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 2, 2**63 - 2])
def test_signals_go_on_counting_beyond_32_bits(backend: HostBackend, start: int) -> None:
    sent, expected, inbox = (np.full(1, start, np.uint64) for _ in range(3))
    for _ in range(5):
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        for _ in range(2):
            backend.wait_signal(expected.ctypes.data, inbox.ctypes.data, 0, 0)
    assert [int(word[0]) for word in (sent, expected, inbox)] == [start + 10] * 3


ELEMENTS = 5000


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    # The resource tracker of SharedMemory is a process that lives as long as this one.
    multiprocessing.resource_tracker.ensure_running()


@contextlib.contextmanager
def in_shared_memory(offset: int, dtype: str) -> Iterator[npt.NDArray[Any]]:
    shared = SharedMemory(create=True, size=ELEMENTS * 16)
    try:
        yield np.ndarray((ELEMENTS,), dtype, shared.buf, offset)
    finally:
        shared.close()
        shared.unlink()


@contextlib.contextmanager
def in_file(folder: str | Path, offset: int, dtype: Any, mode: Any = "r+") -> Iterator[npt.NDArray[Any]]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="with a space ") as file:
        file.truncate(ELEMENTS * 16)
        yield np.memmap(file.name, dtype, mode, offset, (ELEMENTS,))


def check_adopted(backend: HostBackend, local: npt.NDArray[Any]) -> None:
    """The array and an adopted segment hold the same bytes, and writes through one change no byte beside them."""
    local[...] = 1
    segment = backend.adopt(local)
    with opened(backend, segment) as peer:
        assert segment.pointer == local.ctypes.data
        assert peer.nbytes == segment.nbytes == local.nbytes
        remote = backend.view(peer, local.shape, local.dtype)
        assert remote.tolist() == local.tolist()
        remote[...] = np.arange(local.size).reshape(local.shape)
        assert local.tolist() == np.arange(local.size, dtype=local.dtype).reshape(local.shape).tolist()
        local[-1] = 77
        assert remote[-1].tolist() == local[-1].tolist()
    segment.close()
    local[...] = 2
    assert (local == 2).all()


@pytest.mark.parametrize("offset", [0, 1, 13, PAGE, PAGE + 1])
@pytest.mark.parametrize("dtype", ["uint16", "float64"])
def test_shared_memory_is_adopted(backend: HostBackend, offset: int, dtype: str) -> None:
    with in_shared_memory(offset, dtype) as local:
        check_adopted(backend, local)
        del local


def test_a_memmap_and_a_part_of_it_are_adopted_whatever_its_name(backend: HostBackend, tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x0c")  # file names need not be text
    os.mkdir(folder)
    for place, offset in itertools.product(("/dev/shm", folder), (0, 1, PAGE + 1)):
        with in_file(place, offset, "int32") as whole:
            check_adopted(backend, whole)
            whole[:] = -1
            check_adopted(backend, whole[1001:2001].reshape(10, 100))
            assert (whole[:1001] == -1).all() and (whole[2001:] == -1).all()


def test_an_empty_array_is_adopted_wherever_it_is(backend: HostBackend, tmp_path: Path) -> None:
    with in_file(tmp_path, 0, "float64") as local:
        for empty in (np.empty(0), np.empty((3, 0)), local[ELEMENTS:]):
            segment = backend.adopt(empty)
            with opened(backend, segment) as peer:
                assert backend.view(peer, empty.shape, empty.dtype).shape == empty.shape
            segment.close()


def refused_because(backend: HostBackend, local: npt.NDArray[Any]) -> str:
    with nothing_leaks(), pytest.raises(InvalidUsageError) as refusal:  # the error lives while the test looks for leaks
        backend.adopt(local)
    return str(refusal.value)


def test_private_memory_is_refused_with_the_way_out(backend: HostBackend, tmp_path: Path) -> None:
    way_out = "allocate it with comm.empty(), or place it in multiprocessing.shared_memory or a writable numpy.memmap"
    for nbytes in (1, 1 << 24):  # on the heap, and in a separate mapping
        assert way_out in refused_because(backend, np.zeros(nbytes, np.uint8))
    for mode in ("c", "r"):
        with in_file(tmp_path, 0, "int32", mode) as local:
            assert way_out in refused_because(backend, local)


def test_memory_without_a_name_is_refused_with_the_way_out(backend: HostBackend, tmp_path: Path) -> None:
    way_out = "allocate with comm.empty(), or register before the name is removed"
    assert way_out in refused_because(backend, np.frombuffer(mmap.mmap(-1, PAGE), np.uint8))
    np.zeros(PAGE, np.uint8).tofile(tmp_path / "first")
    local = np.memmap(tmp_path / "first", np.uint8, "r+")
    os.rename(tmp_path / "first", tmp_path / "second")
    check_adopted(backend, local)
    os.unlink(tmp_path / "second")
    assert way_out in refused_because(backend, local)
    # The name that the kernel shows for the removed file, and its name from before: both belong to other files now.
    for name in ("second (deleted)", "second"):
        np.zeros(PAGE, np.uint8).tofile(tmp_path / name)
        assert way_out in refused_because(backend, local)
