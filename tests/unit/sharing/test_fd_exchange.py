"""Exchanges of descriptors between their ranks, and their errors."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpicomm.devices.handle import Descriptor
from mpicomm.errors import HandleError
from mpicomm.sharing import fd_exchange
from mpicomm.sharing.fd_exchange import Address, FdExchange
from tests.helpers.faults.interrupts import interrupt_everywhere
from tests.helpers.faults.leaks import nothing_leaks
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


@pytest.mark.parametrize("counts", [(1,), (1, 1), (1, 1, 1, 1), (0, 1, 2), (3, 0, 0), (4, 3, 8)], ids=str)
def test_ranks_swap_any_numbers_of_descriptors_in_order(
    counts: tuple[int, ...], dropped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few are in flight then, because other tests of this user count descriptors in flight.
    monkeypatch.setattr(fd_exchange, "MOST_FDS", 3)
    with listening(len(counts)) as exchanges:
        assert swap_all(exchanges, counts) == names_of_others(*counts)
    assert dropped == []


# The last reference to a socket closes it, with a warning.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupt_loses_no_descriptor() -> None:
    with listening(2) as (exchange, peer), memory("own") as own:
        addresses = [exchange.address, peer.address]

        def swap() -> dict[int, Descriptor]:
            send(exchange.address, hello(1, 0, peer.address.secret), fds=1)
            return swap_one(exchange, addresses, own)

        assert interrupt_everywhere(swap, fd_exchange) >= {"swap", "_send", "_accept", "_receive"}


def test_names_and_secrets_are_new_every_time_and_secrets_are_not_shown() -> None:
    with listening(8) as exchanges:
        addresses = [exchange.address for exchange in exchanges]
    assert len({address.name for address in addresses}) == len({address.secret for address in addresses}) == 8
    for address in addresses:
        assert repr(address.name) in repr(address)
        assert repr(address.secret)[2:-1] not in repr(address) and address.secret.hex() not in repr(address)


def test_sockets_are_of_several_ranks_and_gone_after_close() -> None:
    with FdExchange(0, 1) as alone, FdExchange(0, 2) as exchange:
        name, sockets = exchange.address.name[1:], Path("/proc/net/unix").read_bytes()
        assert name in sockets and alone.address.name[1:] not in sockets
    assert name not in Path("/proc/net/unix").read_bytes()
    exchange.close()


def test_a_name_that_is_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: name)
    with FdExchange(0, 2), pytest.raises(HandleError, match="cannot listen"):
        FdExchange(1, 2)


# With 2 there is room for the selector and the connection, and the kernel drops the descriptor that comes on it.
@pytest.mark.parametrize(
    ("count", "fds", "said"), [*((count, 1, "ulimit -n") for count in (0, 1, 2)), (3, 2, "descriptors")]
)
def test_a_limit_on_descriptors_that_is_too_low_is_named(count: int, fds: int, said: str) -> None:
    with listening(2) as (exchange, peer), memory("own") as own:
        addresses = [exchange.address, peer.address]
        send(exchange.address, hello(1, 0, peer.address.secret), fds=fds)
        with few_free_descriptors(count), pytest.raises(HandleError, match=said):
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
        assert swap_all(exchanges) == names_of_others(1, 1)
    assert dropped == [1]


def test_silent_strangers_delay_no_rank(dropped: list[int]) -> None:
    with listening(2) as exchanges, contextlib.ExitStack() as strangers:
        for _ in range(50):
            strangers.enter_context(connected(exchanges[0].address))
        assert swap_all(exchanges) == names_of_others(1, 1)
    assert dropped == []


@pytest.mark.parametrize("flooded", [[0], [0, 1]])
def test_a_swap_survives_full_queues_and_they_do_not_use_the_descriptors_up(
    flooded: list[int], dropped: list[int]
) -> None:
    with listening(2) as exchanges:
        counts = [flood(exchanges[rank].address) for rank in flooded]
        assert min(counts) > 100
        with few_free_descriptors(100):
            assert swap_all(exchanges) == names_of_others(1, 1)
    assert sum(dropped) == sum(counts) and len(dropped) <= 2  # a line of each rank


@pytest.mark.parametrize(
    ("rank", "fds", "said"),
    [
        *((2, fds, r"rank 2 sent \w+ descriptors instead of 1") for fds in (0, 2, 200)),
        (1, 1, "rank 1 sent message 0 of its descriptors twice"),
    ],
)
def test_a_rank_that_sends_another_number_of_descriptors_is_an_error(rank: int, fds: int, said: str) -> None:
    with listening(3) as exchanges:
        addresses = [exchange.address for exchange in exchanges]
        send(addresses[0], hello(1, 0, addresses[1].secret), fds=1)
        send(addresses[0], hello(rank, 0, addresses[rank].secret), fds=fds)
        with pytest.raises(HandleError, match=said):
            swap(exchanges[0], 0, addresses)


# A stranger of another user: `python -c OTHER_USER <his socket> <socket of a rank> <message of another rank>`, in hex.
OTHER_USER = """
import os, socket, sys
try:
    os.setuid(65534)
except OSError:
    sys.exit(77)
own, victim, message = map(bytes.fromhex, sys.argv[1:])
listener, peer = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
listener.bind(own)
listener.listen()
peer.connect(victim)
socket.send_fds(peer, [message], [0])
print("ready", flush=True)
print("got", *socket.recv_fds(listener.accept()[0], 100, 1)[:2])
"""


@pytest.mark.needs_root
def test_another_user_is_refused_although_he_knows_the_secret_and_gets_nothing(dropped: list[int]) -> None:
    taken = Address(b"\0mpicomm-" + secrets.token_hex(16).encode(), bytes(32))
    with listening(2) as exchanges:
        message = hello(1, 0, exchanges[1].address.secret)
        arguments = [each.hex() for each in (taken.name, exchanges[0].address.name, message)]
        command = [sys.executable, "-I", "-S", "-c", OTHER_USER, *arguments]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout is not None
            if stranger.stdout.readline() != b"ready\n" and stranger.wait() == 77:
                pytest.skip("root cannot become another user here")
            assert swap_all(exchanges) == names_of_others(1, 1)
            assert dropped == [1]
            refused = pytest.raises(HandleError, match="rank 1 belongs to another user; nothing was sent")
            with FdExchange(0, 2) as exchange, refused:
                swap(exchange, 0, [exchange.address, taken])
            assert stranger.stdout.read() == b"got b'' []\n"


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
    assert swap_all(exchanges) == names_of_others(1, 1)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    if process.returncode == 77:
        pytest.skip("root cannot take the rights of another user here")
    assert process.returncode == 0


ORDINARY_USER = """
import errno, os, resource, socket, time
from concurrent.futures import ThreadPoolExecutor
from mpicomm.errors import HandleError
from tests.helpers.rigs.fd_exchanges import SOON_S, listening, names_of_others, swap, swap_all

if os.geteuid() == 0:
    os.setuid(65534)
# This process sends more descriptors than the limit of the test. So the test does not depend on the descriptors of
# other processes of this user, which the kernel counts too, and which may land at any time.
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
into, out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    while True:
        socket.send_fds(into, [b"another job's"], [0] * 10)
except OSError as error:
    assert error.errno == errno.ETOOMANYREFS, error
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
"""

SWAPS_LATER = """
with listening(3) as exchanges, ThreadPoolExecutor(1) as pool:
    swapped = pool.submit(swap_all, exchanges)
    # The swap need not wait so long: another job of this user may take descriptors out of flight meanwhile.
    time.sleep(0.2)
    out.close()
    assert swapped.result() == names_of_others(1, 1, 1)
"""

NAMES_THE_LIMIT = """
with listening(2) as (exchange, peer):
    try:
        swap(exchange, 0, [exchange.address, peer.address], SOON_S)
    except HandleError as error:
        print(error)
"""


def output_of(code: str) -> str:
    command = [sys.executable, "-c", ORDINARY_USER + code]
    result = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")  # nor does a rank take another for a stranger
    return result.stdout


def test_a_swap_waits_until_fewer_descriptors_are_in_flight() -> None:
    assert output_of(SWAPS_LATER) == ""


def test_too_many_descriptors_in_flight_are_an_error_that_names_the_limit() -> None:
    said = output_of(NAMES_THE_LIMIT)
    assert "cannot send a descriptor to local ranks [1] in time" in said
    assert "this user may have 100 descriptors in flight between processes: raise the limit (ulimit -n)" in said
