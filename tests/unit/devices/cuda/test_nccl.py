"""Calls of NCCL's C functions, by a library that is a double."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.devices.cuda import nccl

ID = bytes(range(100, 228))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of a library whose communicators have the address 7, and whose work has failed with status 6."""
    made: list[Any] = []

    def note(name: str) -> Any:
        def function(*arguments: Any) -> int:
            made.append((name, *(each.value if isinstance(each, ctypes.c_void_p) else each for each in arguments)))
            return 0

        return function

    def create(handle: Any, size: int, identity: nccl.UniqueId, rank: int) -> int:
        handle._obj.value = 7
        made.append(("ncclCommInitRank", size, bytes(identity), rank))
        return 0

    def create_with(handle: Any, size: int, identity: nccl.UniqueId, rank: int, config: Any) -> int:
        content: nccl.Config = config._obj
        made.append(("ncclCommInitRankConfig", size, bytes(identity), rank, bytes(content)))
        return 0

    def fail(handle: Any, status: Any) -> int:
        status._obj.value = 6
        return 0

    names = ("ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv", "ncclCommAbort", "ncclCommDestroy")
    library = SimpleNamespace(
        **{name: note(name) for name in names},
        ncclCommInitRank=create,
        ncclCommInitRankConfig=create_with,
        ncclCommGetAsyncError=fail,
        ncclGetLastError=lambda handle: b"remote process exited",
        ncclGetErrorString=lambda status: b"unhandled system error",
    )
    monkeypatch.setattr(nccl, "load", lambda: library)
    return made


def test_a_communicator_exchanges_bytes_in_one_group(calls: list[Any]) -> None:
    comm = nccl.NcclCommunicator(4, ID, 3)
    comm.exchange([(1, 4096, 10)], [(2, 8192, 20)], 9)
    comm.destroy()
    assert calls == [
        ("ncclCommInitRank", 4, ID, 3),
        ("ncclGroupStart",),
        ("ncclSend", 4096, 10, 1, 1, 7, 9),
        ("ncclRecv", 8192, 20, 1, 2, 7, 9),
        ("ncclGroupEnd",),
        ("ncclCommDestroy", 7),
    ]


@pytest.mark.parametrize("version", [23007, 23100, 23203])
def test_multicast_goes_off_for_one_communicator_or_for_all_of_an_older_library(
    version: int, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_version(number: Any) -> int:
        number._obj.value = version
        return 0

    monkeypatch.setattr(nccl.load(), "ncclGetVersion", get_version, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    nccl.NcclCommunicator(4, ID, 3, multicast=False)
    ((name, *_, last),) = calls
    if version < 23100:
        assert (name, os.environ["NCCL_NVLS_ENABLE"]) == ("ncclCommInitRank", "0")
        return
    assert (name, os.environ["NCCL_NVLS_ENABLE"]) == ("ncclCommInitRankConfig", "2")
    # ncclConfig_t of nccl.h 2.32: its size, the magic number, a version that has the field; the last field is it.
    assert struct.unpack("@NII", last[:16]) == (120, 0xCAFEBEEF, 23100)
    unset = -(1 << 31)
    fields = (*[unset] * 4, 0, *[unset] * 2, 0, *[unset] * 14, (1 << 31) - 1)
    assert struct.unpack("@4iP2iP14ii4x", last[16:]) == fields


def test_a_group_ends_after_a_send_that_fails(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    comm = nccl.NcclCommunicator(2, ID, 0)
    monkeypatch.setattr(nccl.load(), "ncclSend", lambda *arguments: 2)
    with pytest.raises(RuntimeError, match="ncclSend: unhandled system error"):
        comm.exchange([(1, 4096, 10)], [], 9)
    assert calls[-1] == ("ncclGroupEnd",)


def test_the_error_of_enqueued_work_is_told(calls: list[Any]) -> None:
    comm = nccl.NcclCommunicator(2, ID, 0)
    assert comm.problem() == "remote process exited"
    comm.abort()
    assert calls[-1] == ("ncclCommAbort", 7)


@pytest.mark.parametrize("major", [12, 13])
def test_a_missing_library_is_named_for_the_cuda_in_use(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: major * 1000 + 90)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(nccl, "_path", lambda: "libnccl-of-nowhere.so")
    nccl.load.cache_clear()
    assert str(nccl.missing()).endswith(f": pip install nvidia-nccl-cu{major}")
