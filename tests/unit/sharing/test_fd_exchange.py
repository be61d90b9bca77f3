"""Exchanges of descriptors between their ranks, and their errors. Messages of others: test_fd_exchange_strangers."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpicomm.devices.handle import Descriptor
from mpicomm.errors import HandleError
from mpicomm.sharing import fd_exchange
from mpicomm.sharing.fd_exchange import Address, FdExchange
from tests.helpers.faults.interrupts import interrupt_everywhere
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.rigs.fd_exchanges import (
    SOON_S,
    connected,
    few_free_descriptors,
    flood,
    hello,
    listening,
    memory,
    names_of_others,
    send,
    swap,
    swap_all,
    swap_one,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_gets_every_other_ranks_descriptor(size: int, dropped: list[int]) -> None:
    with listening(size) as exchanges:
        assert swap_all(exchanges) == names_of_others(size)
    assert dropped == []


@pytest.mark.parametrize("counts", [(0, 1, 2), (3, 0, 0), (4, 3, 8)], ids=str)
def test_ranks_swap_any_numbers_of_descriptors_in_order(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few are in flight then, because other tests of this user count descriptors in flight.
    monkeypatch.setattr(fd_exchange, "MOST_FDS", 3)

    def swap_some(exchange: FdExchange, rank: int) -> dict[int, list[str]]:
        with contextlib.ExitStack() as stack:
            own = [stack.enter_context(memory(f"{rank}.{number}")) for number in range(counts[rank])]
            received = exchange.swap(addresses, own, counts, HANG_S)
            for fd in (fd for fds in received.values() for fd in fds):
                stack.callback(fd.close)
            return {peer: [os.pread(fd, 100, 0).decode() for fd in fds] for peer, fds in received.items()}

    with listening(3) as exchanges, ThreadPoolExecutor(3) as pool:
        addresses = [exchange.address for exchange in exchanges]
        swapped = list(pool.map(swap_some, exchanges, range(3)))
    assert swapped == [
        {peer: [f"{peer}.{number}" for number in range(counts[peer])] for peer in range(3) if peer != rank}
        for rank in range(3)
    ]


def test_one_rank_needs_no_socket() -> None:
    with FdExchange(0, 1) as exchange:
        assert exchange.address.name[1:] not in Path("/proc/net/unix").read_bytes()


def test_received_descriptors_are_closed_by_exec() -> None:
    with listening(2) as (exchange, peer):
        addresses = [exchange.address, peer.address]
        send(exchange.address, hello(1, 0, peer.address.secret), fds=1)
        with memory("own") as own:
            received = swap_one(exchange, addresses, own)
        inheritable = os.get_inheritable(received[1])
        received[1].close()
    assert not inheritable


# The last reference to a socket closes it, with a warning.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupt_loses_no_descriptor() -> None:
    with listening(2) as (exchange, peer), memory("own") as own:
        addresses = [exchange.address, peer.address]

        def swap() -> dict[int, Descriptor]:
            send(exchange.address, hello(1, 0, peer.address.secret), fds=1)
            return swap_one(exchange, addresses, own)

        assert interrupt_everywhere(swap, fd_exchange) >= {"swap", "_send", "_accept", "_receive"}


def test_names_and_secrets_are_new_every_time() -> None:
    with listening(8) as exchanges:
        assert len({exchange.address.name for exchange in exchanges}) == 8
        assert len({exchange.address.secret for exchange in exchanges}) == 8


def test_the_secret_is_not_shown() -> None:
    with FdExchange(0, 1) as exchange:
        address = exchange.address
    assert repr(address.name) in repr(address)
    assert repr(address.secret)[2:-1] not in repr(address)
    assert address.secret.hex() not in repr(address)


def test_sockets_are_gone_after_close() -> None:
    with FdExchange(0, 2) as exchange:
        name = exchange.address.name[1:]
        assert name in Path("/proc/net/unix").read_bytes()
    assert name not in Path("/proc/net/unix").read_bytes()
    exchange.close()


def test_a_closed_exchange_says_so() -> None:
    with listening(2) as (exchange, peer):
        exchange.close()
        with pytest.raises(HandleError, match="closed"):
            swap(exchange, 0, [exchange.address, peer.address])


def test_a_name_that_is_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: name)
    with FdExchange(0, 2), pytest.raises(HandleError, match="cannot listen"):
        FdExchange(1, 2)


# With 2 there is room for the selector and the connection, and the kernel drops the descriptor that comes on it.
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_limit_on_descriptors_that_is_too_low_is_named(count: int) -> None:
    with listening(2) as (exchange, peer), memory("own") as own:
        addresses = [exchange.address, peer.address]
        send(exchange.address, hello(1, 0, peer.address.secret), fds=1)
        with few_free_descriptors(count), pytest.raises(HandleError, match="ulimit -n"):
            swap_one(exchange, addresses, own)


def test_a_descriptor_of_two_that_finds_room_is_closed_again() -> None:
    with listening(2) as (exchange, peer), memory("own") as own:
        addresses = [exchange.address, peer.address]
        send(exchange.address, hello(1, 0, peer.address.secret), fds=2)
        with few_free_descriptors(3), pytest.raises(HandleError, match="descriptors"):
            swap_one(exchange, addresses, own)


def test_a_peer_that_sends_nothing_is_named() -> None:
    with listening(4) as exchanges:
        addresses = [exchange.address for exchange in exchanges]
        send(addresses[0], hello(2, 0, addresses[2].secret), fds=1)
        with (
            connected(addresses[0]),
            pytest.raises(HandleError, match=r"no descriptor came from local ranks \[1, 3\]"),
        ):
            swap(exchanges[0], 0, addresses, SOON_S)


@pytest.mark.parametrize("messages", [[1], [1, 1], [2], [1, 2]], ids=str)
def test_a_swap_that_fails_keeps_nothing_although_its_error_is_kept(messages: list[int]) -> None:
    with listening(3) as exchanges, memory("own") as own:
        addresses = [exchange.address for exchange in exchanges]
        for fds in messages:
            send(addresses[0], hello(1, 0, addresses[1].secret), fds=fds)
        with nothing_leaks(), pytest.raises(HandleError) as error:
            swap_one(exchanges[0], addresses, own, SOON_S)
        assert error.tb is not None


def test_strangers_do_not_put_the_deadline_off() -> None:
    over = threading.Event()

    def pester(victim: Address) -> None:
        while not over.is_set():
            with contextlib.suppress(BlockingIOError, ConnectionError):  # not accepted yet, or closed
                send(victim, b"hello?")

    with listening(2) as (exchange, peer), ThreadPoolExecutor(1) as pool:
        pestering = pool.submit(pester, exchange.address)
        try:
            with pytest.raises(HandleError, match=r"\[1\]"):
                swap(exchange, 0, [exchange.address, peer.address], SOON_S)
        finally:
            over.set()
        pestering.result()


def test_a_peer_that_is_not_there_is_named_with_the_way_out() -> None:
    with FdExchange(0, 2) as exchange:
        gone = Address(b"\0mpicomm-" + secrets.token_hex(16).encode(), bytes(32))
        with pytest.raises(HandleError, match=r"cannot send a descriptor to rank 1: .*MPICOMM_HOSTID"):
            swap(exchange, 0, [exchange.address, gone])


def test_a_peer_that_accepts_nothing_is_named() -> None:
    with listening(2) as (exchange, peer):
        flood(peer.address)
        with pytest.raises(HandleError, match=r"local ranks \[1\] accepted no connection in time"):
            swap(exchange, 0, [exchange.address, peer.address], SOON_S)


def test_a_descriptor_that_is_none_is_an_error() -> None:
    with listening(2) as (exchange, peer), pytest.raises(HandleError, match="cannot send a descriptor to rank 1"):
        swap_one(exchange, [exchange.address, peer.address], 1 << 20)
