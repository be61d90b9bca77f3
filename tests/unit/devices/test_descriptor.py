"""Descriptors that close with their last reference, once, although a Ctrl-C comes in between; handles of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mpicomm.devices import handle as descriptor
from mpicomm.devices.handle import KEY_NBYTES, KINDS, PACKET_NBYTES, Descriptor, Kind, MemoryHandle
from tests.helpers.faults.interrupts import interrupt_everywhere

pytestmark = pytest.mark.usefixtures("no_leaks")


def make() -> Descriptor:
    return Descriptor.of(os.memfd_create, "test", os.MFD_CLOEXEC)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The closed numbers."""
    numbers: list[int] = []

    def close(number: int) -> None:
        os.close(number)
        numbers.append(number)

    monkeypatch.setattr(descriptor, "os", SimpleNamespace(close=close))
    yield numbers


def test_it_is_the_number_that_the_system_takes() -> None:
    fd = make()
    assert os.write(fd, b"content") == 7
    assert os.pread(int(fd), 10, 0) == b"content"
    fd.close()


def test_it_is_closed_with_its_last_reference() -> None:
    fd = make()
    number, another = int(fd), fd
    del fd
    assert is_open(number)
    del another
    assert not is_open(number)


def test_it_is_closed_at_once_and_only_once(closed: list[int]) -> None:
    fd = make()
    number = int(fd)
    fd.close()
    with open(os.devnull) as file:  # it has the number now, and stays open
        assert file.fileno() == number
        fd.close()
        del fd
        assert is_open(number)
    assert closed == [number]


def test_one_that_is_left_at_the_end_of_a_process_is_quiet() -> None:
    code = """
import os, sys
from mpicomm.devices.handle import Descriptor
sys.left = [Descriptor.of(os.memfd_create, "test")]
sys.left.append(sys.left)
left = Descriptor.of(os.memfd_create, "test")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_interrupt_leaves_none_open_when_it_is_made() -> None:
    assert interrupt_everywhere(make, descriptor) == {"of"}


def test_an_interrupt_leaves_none_open_when_it_is_closed_nor_closes_it_twice(closed: list[int]) -> None:
    made: list[Descriptor] = []

    def close_one() -> None:
        made.append(Descriptor(os.memfd_create("test", os.MFD_CLOEXEC)))
        made[-1].close()

    assert interrupt_everywhere(close_one, descriptor) == {"close"}
    numbers = [int(fd) for fd in made]
    made.clear()
    assert sorted(closed) == sorted(numbers)


@pytest.mark.parametrize("key", [bytes(range(KEY_NBYTES)), b""], ids=["key", "no key"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_handle_survives_the_round_trip(kind: Kind, key: bytes) -> None:
    handle = MemoryHandle(kind, bytes(range(16)), key, 2**64 - 1, 2**63, 4096)
    packet = handle.pack()
    assert len(packet) == PACKET_NBYTES
    assert MemoryHandle.unpack(packet) == handle
