"""Descriptors that close with their last reference, once, although a Ctrl-C comes in between; handles of memory.

`uninterrupted` holds a Ctrl-C back, and raises it at its end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.devices import handle as descriptor
from mpicomm.devices import memory_location
from mpicomm.devices.handle import KEY_NBYTES, KINDS, PACKET_NBYTES, Descriptor, Kind, MemoryHandle
from mpicomm.waiting import uninterrupted
from tests.helpers.faults.interrupts import interrupt_everywhere, interrupts_raise

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


def test_it_is_the_number_that_the_system_takes_and_closes_with_its_last_reference() -> None:
    fd = make()
    assert os.write(fd, b"content") == 7
    number, another = int(fd), fd
    assert os.pread(number, 10, 0) == b"content"
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


class Library:
    """libcuda.so.1, which answers with ``values``: type, managed, ordinal, start and size of the allocation."""

    def __init__(self, *values: int, status: int = 0) -> None:
        self.asked = 0

        def query(count: int, attributes: Any, targets: Any, pointer: int) -> int:
            self.asked += 1
            for target, value in zip(targets, values, strict=True):
                ctypes.c_uint64.from_address(target).value = value
            return status

        self.cuPointerGetAttributes = type("Function", (), {"__call__": lambda _, *arguments: query(*arguments)})()


Load = Callable[[Library | None], list[int]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Lets a library be loaded, or none. Returns the modes of the attempts to open it."""

    def load(library: Library | None) -> list[int]:
        modes: list[int] = []

        def open_library(name: str, mode: int) -> Library:
            assert name == "libcuda.so.1"
            modes.append(mode)
            if library is None:
                raise OSError("not loaded")
            return library

        monkeypatch.setattr(ctypes, "CDLL", open_library)
        return modes

    monkeypatch.setattr(memory_location, "_driver", memory_location._Driver())
    return load


@pytest.mark.parametrize(
    ("library", "place", "device"),
    [
        (Library(2, 0, 3, 0x1000, 0x800), (3, 0x700, False), 3),  # the rest of its allocation counts
        (Library(2, 1, 0, 0x1000, 0x800), (0, 0x700, True), None),  # managed memory is for both
        (Library(1, 0, 0, 0x1000, 0x800), None, None),  # pinned memory is the host's
        (Library(0, 0, 0, 0, 0), None, None),  # the driver does not know it
        (Library(2, 0, 0, 0, 0, status=3), None, None),  # the driver has not started
    ],
)
def test_where_memory_lies(load: Load, library: Library, place: Any, device: int | None) -> None:
    load(library)
    assert memory_location.locate(0x1100) == place
    assert memory_location.device_of(0x1100) == device


def test_a_driver_is_not_loaded_nor_looked_for_each_time_and_found_later(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = load(None)
    assert not memory_location.has_driver()
    assert all(memory_location.locate(0x1000) is None for _ in range(1000))
    assert modes and all(mode & os.RTLD_NOLOAD for mode in modes)
    assert len(modes) < 100
    load(Library(2, 0, 0, 0x1000, 0x800))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1)
    assert memory_location.device_of(0x1000) == 0


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may ignore it
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def press() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def test_one_comes_at_once_outside_a_block_and_once_at_the_end_of_the_outermost_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                press()
                press()
                steps.append("the rest of the block")
            steps.append("between the ends")
        steps.append("behind them")
    assert steps == ["the rest of the block", "between the ends"]
    with pytest.raises(KeyboardInterrupt):
        press()


def test_one_comes_although_the_block_raises() -> None:
    with pytest.raises(KeyboardInterrupt) as info, uninterrupted():
        press()
        raise ValueError
    assert isinstance(info.value.__context__, ValueError)


def test_the_users_handler_is_called() -> None:
    with interrupts_raise(ValueError) as interrupt, pytest.raises(ValueError), uninterrupted():
        interrupt()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_not_pythons_stay(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_are_never_interrupted() -> None:
    def handler_in_a_block() -> object:
        with uninterrupted():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler_in_a_block).result() is signal.default_int_handler
