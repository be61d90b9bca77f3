"""The arguments of a host backend, and its work on addresses. Its memory: test_host_segments."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.devices.host import HostBackend
from mpicomm.errors import InvalidUsageError


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


@pytest.mark.parametrize("value", [None, 5, [1, 2], "text", object(), {1}], ids=lambda value: type(value).__name__)
def test_what_is_no_array_is_refused_with_the_way_out(backend: HostBackend, value: Any) -> None:
    expected = f"^array is a {type(value).__name__}, .*: pass a NumPy array"
    with pytest.raises(InvalidUsageError, match=expected) as refusal:
        backend.asarray(value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, TypeError])
def test_what_dlpack_refuses_is_named(backend: HostBackend, error: type[Exception]) -> None:
    with pytest.raises(InvalidUsageError, match=r"DlpackProducer that DLPack cannot hand over: it needs a gradient"):
        backend.asarray(DlpackProducer(np.zeros(1), error("it needs a gradient")))


def test_gpu_arrays_are_refused_with_the_way_out(backend: HostBackend) -> None:
    class GpuArray:
        __cuda_array_interface__ = {"shape": (1,)}

    with pytest.raises(InvalidUsageError, match=r'GpuArray on a GPU.*: create it with device="auto"'):
        backend.asarray(GpuArray())


@settings(deadline=None)
@given(source=st.integers(0, 200), target=st.integers(0, 200), nbytes=st.integers(0, 56))
def test_copies_move_these_bytes_and_no_others(source: int, target: int, nbytes: int) -> None:
    memory = np.arange(256, dtype=np.uint8)
    expected = memory.copy()
    expected[target : target + nbytes] = memory[source : source + nbytes].copy()
    HostBackend(1.0).copy(memory.ctypes.data + target, memory.ctypes.data + source, nbytes, 0)
    assert memory.tolist() == expected.tolist()
