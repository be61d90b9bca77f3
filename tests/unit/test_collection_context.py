"""Garbage is collected with a context, on threads without one too."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from mpicomm.devices.cuda.collections import CollectionContext

LENT, OWN = 7, 8


class Driver:
    """A driver that knows what is current on each thread; ``fails`` as CUDA does in the child of a fork."""

    class CUDADriverError(RuntimeError):
        """CuPy's."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.fails = False

    def ctxGetCurrent(self) -> int:
        if self.fails:
            raise self.CUDADriverError("CUDA_ERROR_NOT_INITIALIZED")
        return getattr(self._thread, "context", 0)

    def ctxSetCurrent(self, context: int) -> None:
        self._thread.context = context


class Stream:
    """What is destroyed in the context of the thread that collects it, as it refers to itself."""

    def __init__(self, destroy: Callable[[], object]) -> None:
        self._destroy = destroy
        self._cycle = self

    def __del__(self) -> None:
        self._destroy()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    gc.collect()
    callback = CollectionContext(driver, LENT)
    gc.callbacks.append(callback)
    yield driver
    gc.callbacks.remove(callback)


def collect(driver: Driver, own: int) -> tuple[list[int], int]:
    """Return in which contexts a stream was destroyed by a thread with a context of its own, and what it had after."""
    destroyed: list[int] = []
    after = []
    Stream(lambda: destroyed.append(driver.ctxGetCurrent()))

    def run() -> None:
        driver.ctxSetCurrent(own)
        gc.collect()
        after.append(driver.ctxGetCurrent())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return destroyed, after[0]


@pytest.mark.parametrize(("own", "used"), [(0, LENT), (OWN, OWN)])
def test_thread_gets_a_context_while_it_collects(driver: Driver, own: int, used: int) -> None:
    gc.disable()  # or another thread of the tests collects first
    try:
        assert collect(driver, own) == ([used], own)
        assert collect(driver, own) == ([used], own)
    finally:
        gc.enable()


def test_collections_go_on_where_cuda_is_over(driver: Driver) -> None:
    driver.fails = True
    destroyed: list[bool] = []
    Stream(lambda: destroyed.append(True))
    gc.collect()  # an exception in a callback is unraisable, which is an error in tests
    assert destroyed == [True]
