"""The question to the CUDA driver where memory lies."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
import pytest

from mpicomm.devices import memory_location
from tests.helpers.fakes import fake_driver


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


def load(monkeypatch: pytest.MonkeyPatch, library: Library | None) -> list[int]:
    modes: list[int] = []

    def open_library(name: str, mode: int) -> Library:
        assert name == "libcuda.so.1"
        modes.append(mode)
        if library is None:
            raise OSError("not loaded")
        return library

    monkeypatch.setattr(memory_location, "_driver", memory_location._Driver())
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    return modes


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
def test_where_memory_lies(monkeypatch: pytest.MonkeyPatch, library: Library, place: Any, device: int | None) -> None:
    load(monkeypatch, library)
    assert memory_location.place_of(0x1100) == place
    assert memory_location.lies_on_device(0x1100) == device


def test_a_process_without_the_driver_does_not_load_it_nor_look_for_it_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = load(monkeypatch, None)
    assert not memory_location.has_driver()
    assert all(memory_location.place_of(0x1000) is None for _ in range(1000))
    assert modes and all(mode & os.RTLD_NOLOAD for mode in modes)
    assert len(modes) < 100


def test_a_driver_that_is_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, None)
    assert memory_location.place_of(0x1000) is None
    now = time.monotonic()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Library(2, 0, 0, 0x1000, 0x800))
    monkeypatch.setattr(time, "monotonic", lambda: now + 1)
    assert memory_location.lies_on_device(0x1000) == 0


def test_the_double_of_other_tests_forgets_memory_that_is_gone() -> None:
    memory = np.zeros(100, np.uint8)
    fake_driver.own(memory, device=2)
    pointer = memory.ctypes.data
    assert memory_location.lies_on_device(pointer + 99) == 2 and memory_location.lies_on_device(pointer + 100) is None
    del memory
    assert memory_location.lies_on_device(pointer) is None
