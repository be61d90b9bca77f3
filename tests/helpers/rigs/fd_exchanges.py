"""Exchanges of descriptors between threads, other messages to their sockets, and host memory that peers map."""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpicomm.devices.cuda.types import Segment
from mpicomm.devices.handle import Descriptor, MemoryHandle
from mpicomm.devices.host import HostBackend
from mpicomm.devices.host_memory import HostSegment
from mpicomm.sharing import fd_exchange
from mpicomm.sharing.fd_exchange import Address, FdExchange
from tests.helpers.jobs.pace import HANG_S

SOON_S = 0.2  # a deadline that should pass


@contextlib.contextmanager
def listening(size: int) -> Iterator[list[FdExchange]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FdExchange(rank, size)) for rank in range(size)]


@contextlib.contextmanager
def memory(text: str) -> Iterator[Descriptor]:
    fd = Descriptor.of(os.memfd_create, "test", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode())
        yield fd
    finally:
        fd.close()


def swap(
    exchange: FdExchange,
    rank: int,
    addresses: Sequence[Address],
    timeout_s: float = HANG_S,
    counts: Sequence[int] = (),
) -> dict[int, list[str]]:
    """Swap memory with this rank's name, ``counts[rank]`` pieces or one; return the names in the peers' memory."""
    counts = counts or [1] * len(addresses)
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(memory(f"{rank}.{number}")) for number in range(counts[rank])]
        received = exchange.swap(addresses, own, counts, timeout_s)
        for fd in (fd for fds in received.values() for fd in fds):
            stack.callback(fd.close)
            assert not os.get_inheritable(fd)
        return {peer: [os.pread(fd, 100, 0).decode() for fd in fds] for peer, fds in received.items()}


def swap_one(
    exchange: FdExchange, addresses: Sequence[Address], own: int, timeout_s: float = HANG_S
) -> dict[int, Descriptor]:
    """Swap one descriptor of each rank."""
    received = exchange.swap(addresses, [own], [1] * len(addresses), timeout_s)
    return {peer: fd for peer, (fd,) in received.items()}


def swap_all(exchanges: Sequence[FdExchange], counts: Sequence[int] = ()) -> list[dict[int, list[str]]]:
    """Let every rank swap, each in a thread."""
    addresses = [exchange.address for exchange in exchanges]
    size = len(exchanges)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(swap, exchanges, range(size), [addresses] * size, [HANG_S] * size, [counts] * size))


def names_of_others(*counts: int) -> list[dict[int, list[str]]]:
    """What ranks get that swap so many descriptors."""
    names = {rank: [f"{rank}.{number}" for number in range(count)] for rank, count in enumerate(counts)}
    return [{peer: each for peer, each in names.items() if peer != rank} for rank in names]


def hello(sender: int, receiver: int, secret: bytes, number: int = 0) -> bytes:
    return fd_exchange._HELLO.pack(fd_exchange._MAGIC, sender, receiver, number, secret)


@contextlib.contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.setblocking(False)
        peer.connect(address.name)
        yield peer


def send(address: Address, content: bytes, fds: int = 0) -> None:
    """Send a message after fewer descriptors of this user are in flight than the limit."""
    with connected(address) as peer, memory("a stranger's") as fd:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * fds))] if fds else []
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                peer.sendmsg([content], rights)
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    raise
            time.sleep(0.001)


def flood(address: Address) -> int:
    """Connect until there is no more room; return the number of connections."""
    for count in range(1 << 16):
        try:
            with connected(address):
                pass
        except BlockingIOError:
            return count
    raise AssertionError("the socket takes any number of connections")


@contextlib.contextmanager
def few_free_descriptors(count: int) -> Iterator[None]:
    """Leave room for ``count`` more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def allocated(backend: HostBackend, nbytes: int) -> Iterator[HostSegment]:
    segment = backend.allocate("memfd", nbytes)
    try:
        yield segment
    finally:
        segment.close()


@contextlib.contextmanager
def opened(backend: HostBackend, segment: Segment) -> Iterator[HostSegment]:
    """Map a segment a second time, as a peer does."""
    ((handle, fd),) = backend.export(segment)
    assert fd is not None
    try:
        peer = backend.open(((MemoryHandle.unpack(handle.pack()), fd),))
    finally:
        fd.close()
    try:
        yield peer
    finally:
        peer.close()
