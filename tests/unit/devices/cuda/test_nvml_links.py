"""Links as NVML reports them, with a stand-in for its Python package."""

from __future__ import annotations

import sys
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.devices.base import Link, slowest_gb_s
from mpicomm.devices.cuda.links import nvlink_gb_s, nvml_link, pcie_gb_s

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
    assert nvlink_gb_s(A, B) == gb_s
    assert nvml.open == 0


def test_pcie_is_as_fast_as_the_slower_end(install: Any) -> None:
    install(Nvml([], pcie=((5, 16), (4, 8))))
    assert pcie_gb_s(A) == pytest.approx(63.0, rel=0.01)
    assert pcie_gb_s(A, B) == pytest.approx(15.75, rel=0.01)
    install(Nvml([], pcie=((9, 16), (4, 8))))  # a future generation
    assert pcie_gb_s(A) is None


def test_a_link_is_nvlink_or_pcie(install: Any) -> None:
    install(Nvml([B]))
    assert nvml_link(A, B) == Link("NVLink", None, True, True)
    install(Nvml([]))
    assert nvml_link(A, B) == Link("PCIe", None, True, True)


def test_what_nvml_does_not_say_is_unknown(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml([SWITCH])
    install(nvml)
    stranger = bytes(16)
    assert (nvml_link(A, stranger), nvlink_gb_s(A, stranger), pcie_gb_s(stranger)) == (Link("unknown"), None, None)
    assert nvml.open == 0

    def fails() -> None:
        raise NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", fails)
    monkeypatch.setattr(nvml, "nvmlShutdown", fails)
    assert (nvml_link(A, B), nvlink_gb_s(A, B), pcie_gb_s(A)) == (Link("unknown"), None, None)
    install(None)
    assert (nvml_link(A, B), nvlink_gb_s(A, B), pcie_gb_s(A)) == (Link("unknown"), None, None)


def test_the_slowest_known_link_counts() -> None:
    assert slowest_gb_s([Link("self"), Link("NVLink", gb_s=300), Link("PCIe", gb_s=32)]) == 32
    assert slowest_gb_s([Link("self"), Link("unknown")]) is None
