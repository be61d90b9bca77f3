"""`uninterrupted` holds a Ctrl-C back, and raises it at its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpicomm.waiting import uninterrupted
from tests.helpers.faults.interrupts import interrupts_raise


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
