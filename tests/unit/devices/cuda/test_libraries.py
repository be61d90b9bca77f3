"""Calls of NCCL's C functions, and links as NVML reports them, by doubles of the two libraries."""

from __future__ import annotations

import ctypes
import sys
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.devices.base import Link, slowest_gb_s
from mpicomm.devices.cuda import nccl
from mpicomm.devices.cuda.links import ask_nvml, nvlink_gb_s, nvml_link, pcie_gb_s

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

    def fail(handle: Any, status: Any) -> int:
        status._obj.value = 6
        return 0

    names = ("ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv", "ncclCommAbort", "ncclCommDestroy")
    library = SimpleNamespace(
        **{name: note(name) for name in names},
        ncclCommInitRank=create,
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


A, B = bytes(15) + b"a", bytes(15) + b"b"
SWITCH = b"switch"


class NVMLError(Exception):
    pass


class Nvml:
    """A machine with two GPUs and the far ends of their NVLinks; ``pcie`` has the generation and lanes of each GPU."""

    NVMLError = NVMLError
    NVML_SUCCESS = NVML_P2P_STATUS_OK = 0
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(self, ends: list[bytes], *, off: int = 0, speed: int | None = 25_000, pcie: Any = ((4, 16), (4, 16))):
        self.open = 0
        self._ends = ends
        self._off = off
        self._speed = speed
        self._pcie = dict(zip((A, B), pcie, strict=True))

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name: bytes) -> bytes:
        found = uuid.UUID(name.decode().removeprefix("GPU-")).bytes
        if found not in (A, B):
            raise NVMLError
        return found

    def nvmlDeviceGetP2PStatus(self, device: bytes, peer: bytes, capability: int) -> int:
        return 0 if capability != 2 or self._ends else 1

    def nvmlDeviceGetPciInfo(self, device: bytes) -> Any:
        return SimpleNamespace(busId=device)

    def nvmlDeviceGetNvLinkState(self, device: bytes, link: int) -> int:
        if link >= len(self._ends):
            raise NVMLError
        return int(link >= self._off)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: bytes, link: int) -> Any:
        return SimpleNamespace(busId=self._ends[link])

    def nvmlDeviceGetFieldValues(self, device: bytes, fields: list[int]) -> list[Any]:
        assert fields == [90]
        failed = self._speed is None
        return [SimpleNamespace(nvmlReturn=int(failed), value=SimpleNamespace(uiVal=self._speed))]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, device: bytes) -> int:
        generation: int = self._pcie[device][0]
        return generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, device: bytes) -> int:
        width: int = self._pcie[device][1]
        return width


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(nvml: Nvml | None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)

    return install


@pytest.mark.parametrize(
    ("nvml", "gb_s"),
    [
        (Nvml([SWITCH] * 18, speed=26_562), 478.116),  # all links reach every peer
        (Nvml([SWITCH] * 12, off=2), 250),
        (Nvml([B, SWITCH, B, A, A, A]), 50),  # no switch: the links to the peer
        (Nvml([SWITCH] * 18, off=18), None),
        (Nvml([SWITCH] * 18, speed=None), None),
    ],
)
def test_nvlinks_that_lead_to_the_peer_count(install: Any, nvml: Nvml, gb_s: float | None) -> None:
    install(nvml)
    assert ask_nvml(nvlink_gb_s, A, B) == gb_s
    assert nvml.open == 0


def test_pcie_is_as_fast_as_the_slower_end(install: Any) -> None:
    install(Nvml([], pcie=((5, 16), (4, 8))))
    assert ask_nvml(pcie_gb_s, A) == pytest.approx(63.0, rel=0.01)
    assert ask_nvml(pcie_gb_s, A, B) == pytest.approx(15.75, rel=0.01)
    install(Nvml([], pcie=((9, 16), (4, 8))))  # a future generation
    assert ask_nvml(pcie_gb_s, A) is None


def test_a_link_is_nvlink_or_pcie(install: Any) -> None:
    install(Nvml([B]))
    assert ask_nvml(nvml_link, A, B) == Link("NVLink", None, True, True)
    install(Nvml([]))
    assert ask_nvml(nvml_link, A, B) == Link("PCIe", None, True, True)


def test_what_nvml_does_not_say_is_unknown(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml([SWITCH])
    install(nvml)
    stranger = bytes(16)
    for question in (nvml_link, nvlink_gb_s, pcie_gb_s):
        assert ask_nvml(question, A, stranger) is None
    assert nvml.open == 0

    def fails() -> None:
        raise NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", fails)
    monkeypatch.setattr(nvml, "nvmlShutdown", fails)
    assert ask_nvml(nvml_link, A, B) is None
    install(None)
    assert ask_nvml(nvml_link, A, B) is None


def test_the_slowest_known_link_counts() -> None:
    assert slowest_gb_s([Link("self"), Link("NVLink", gb_s=300), Link("PCIe", gb_s=32)]) == 32
    assert slowest_gb_s([Link("self"), Link("unknown")]) is None
