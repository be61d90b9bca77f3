"""Messages to an exchange of descriptors from strangers, and wrong messages from its ranks."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpicomm.errors import HandleError
from mpicomm.sharing.fd_exchange import Address, FdExchange
from tests.helpers.rigs.fd_exchanges import (
    connected,
    few_free_descriptors,
    flood,
    hello,
    listening,
    names_of_others,
    send,
    swap,
    swap_all,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

# A stranger of another user: `python -c STRANGER <name of a socket in hex> <message in hex>`.
STRANGER = """
import os, socket, sys
try:
    os.setuid(65534)
except OSError:
    sys.exit(77)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
name = bytes.fromhex(sys.argv[1])
"""

# Sends to rank 0 of 2 while rank 1 sends its message; gets the addresses of both.
Stranger = Callable[[Address, Address], None]

STRANGERS: dict[str, Stranger] = {
    "says nothing": lambda victim, peer: send(victim, b""),
    "says something else": lambda victim, peer: send(victim, b"GET / HTTP/1.1\r\n\r\n", fds=1),
    "says much": lambda victim, peer: send(victim, b"x" * 100_000),
    "stops early": lambda victim, peer: send(victim, hello(1, 0, peer.secret)[:-1], fds=1),
    "says more": lambda victim, peer: send(victim, hello(1, 0, peer.secret) + b"\0", fds=1),
    "speaks another protocol": lambda victim, peer: send(victim, b"mpicommX" + hello(1, 0, peer.secret)[8:], fds=1),
    "does not know the secret": lambda victim, peer: send(victim, hello(1, 0, bytes(32)), fds=1),
    "sends two descriptors": lambda victim, peer: send(victim, hello(1, 0, bytes(32)), fds=2),
    "sends many descriptors": lambda victim, peer: send(victim, hello(1, 0, bytes(32)), fds=200),
    "knows another rank's secret": lambda victim, peer: send(victim, hello(1, 0, victim.secret), fds=1),
    "is a rank that is not there": lambda victim, peer: send(victim, hello(2, 0, peer.secret), fds=1),
    "is rank -1": lambda victim, peer: send(victim, hello(2**32 - 1, 0, peer.secret), fds=1),
    "is the receiver": lambda victim, peer: send(victim, hello(0, 0, victim.secret), fds=1),
    "sends another message": lambda victim, peer: send(victim, hello(1, 0, bytes(32), 1), fds=1),
    "means another receiver": lambda victim, peer: send(victim, hello(1, 1, peer.secret), fds=1),
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_dropped_and_the_swap_goes_on(stranger: Stranger, dropped: list[int]) -> None:
    with listening(2) as exchanges:
        stranger(exchanges[0].address, exchanges[1].address)
        assert swap_all(exchanges) == names_of_others(2)
    assert dropped == [1]


def test_silent_strangers_delay_no_rank(dropped: list[int]) -> None:
    with listening(2) as exchanges, contextlib.ExitStack() as strangers:
        for _ in range(50):
            strangers.enter_context(connected(exchanges[0].address))
        assert swap_all(exchanges) == names_of_others(2)
    assert dropped == []


def test_a_swap_survives_strangers_that_keep_coming(dropped: list[int]) -> None:
    over = threading.Event()

    def pester(victim: Address, peer: Address) -> None:
        while not over.is_set():
            for stranger in STRANGERS.values():
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionError):
                    stranger(victim, peer)

    with ThreadPoolExecutor(2) as pool:
        # The end of the exchanges is the end of strangers that wait for room for their descriptors.
        with listening(3) as exchanges:
            first, second = exchanges[0].address, exchanges[1].address
            pestering = [pool.submit(pester, first, second), pool.submit(pester, second, first)]
            try:
                assert swap_all(exchanges) == names_of_others(3)
            finally:
                over.set()
        for each in pestering:
            each.result()


@pytest.mark.parametrize("flooded", [[0], [0, 1]])
def test_a_swap_survives_full_queues(flooded: list[int], dropped: list[int]) -> None:
    with listening(2) as exchanges:
        count = sum(flood(exchanges[rank].address) for rank in flooded)
        assert swap_all(exchanges) == names_of_others(2)
    assert sum(dropped) == count and len(dropped) <= 2  # a line of each rank


def test_a_flood_does_not_use_the_descriptors_up(dropped: list[int]) -> None:
    with listening(2) as exchanges:
        count = flood(exchanges[0].address)
        assert count > 100
        with few_free_descriptors(100):
            assert swap_all(exchanges) == names_of_others(2)
    assert sum(dropped) == count and len(dropped) <= 2  # a line of each rank


@pytest.mark.parametrize("fds", [0, 2, 200])
def test_a_rank_that_sends_another_number_of_descriptors_is_an_error(fds: int) -> None:
    with listening(3) as exchanges:
        addresses = [exchange.address for exchange in exchanges]
        send(addresses[0], hello(1, 0, addresses[1].secret), fds=1)
        send(addresses[0], hello(2, 0, addresses[2].secret), fds=fds)
        with pytest.raises(HandleError, match=r"rank 2 sent \w+ descriptors instead of 1"):
            swap(exchanges[0], 0, addresses)


def test_a_rank_that_sends_twice_is_an_error() -> None:
    with listening(3) as exchanges:
        addresses = [exchange.address for exchange in exchanges]
        send(addresses[0], hello(1, 0, addresses[1].secret), fds=1)
        send(addresses[0], hello(1, 0, addresses[1].secret), fds=1)
        with pytest.raises(HandleError, match="rank 1 sent message 0 of its descriptors twice"):
            swap(exchanges[0], 0, addresses)


@pytest.fixture
def as_another_user() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Runs Python code in a process that begins as root and becomes another user before it runs the code."""

    def start(code: str, name: bytes, message: bytes) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", STRANGER + code, name.hex(), message.hex()]
        # No pipe, which would stay open: only the resources of the test itself may be left when it ends.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.stdout.close()
            if process.wait() == 77:
                pytest.skip("root cannot become another user here")
            raise AssertionError("the stranger failed")
        return process

    yield start


@pytest.mark.needs_root
def test_another_user_is_refused_although_he_knows_the_secret(
    as_another_user: Callable[..., subprocess.Popen[bytes]], dropped: list[int]
) -> None:
    send_all = """
peer.connect(name)
socket.send_fds(peer, [bytes.fromhex(sys.argv[2])], [0])
print("ready", flush=True)
"""
    with listening(2) as exchanges:
        message = hello(1, 0, exchanges[1].address.secret)
        with as_another_user(send_all, exchanges[0].address.name, message) as stranger:
            assert stranger.wait() == 0
        assert swap_all(exchanges) == names_of_others(2)
    assert dropped == [1]


@pytest.mark.needs_root
def test_nothing_is_sent_to_another_users_socket(as_another_user: Callable[..., subprocess.Popen[bytes]]) -> None:
    listen = """
peer.bind(name)
peer.listen()
print("ready", flush=True)
message, fds, _, _ = socket.recv_fds(peer.accept()[0], 100, 1)
print("got", message, fds)
"""
    with FdExchange(0, 2) as exchange:
        taken = Address(b"\0mpicomm-" + secrets.token_hex(16).encode(), bytes(32))
        with as_another_user(listen, taken.name, b"") as stranger:
            with pytest.raises(HandleError, match="rank 1 belongs to another user; nothing was sent"):
                swap(exchange, 0, [exchange.address, taken])
            said, _ = stranger.communicate()
    assert said == b"got b'' []\n"


@pytest.mark.needs_root
def test_a_program_that_runs_with_the_rights_of_another_user_is_no_stranger_to_itself() -> None:
    code = """
import os, sys
from mpicomm.errors import HandleError
from tests.helpers.rigs.fd_exchanges import listening, names_of_others, swap_all
try:
    os.seteuid(65534)
except OSError:
    sys.exit(77)
with listening(2) as exchanges:
    assert swap_all(exchanges) == names_of_others(2)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    if process.returncode == 77:
        pytest.skip("root cannot take the rights of another user here")
    assert process.returncode == 0
