"""Pass file descriptors between processes of one node: abstract unix sockets and SCM_RIGHTS, no CUDA, no MPI.

Every rank listens, tells the others its `address` over a channel that they trust (MPI), and then calls `swap`: each
rank sends each other rank one message with one descriptor. ``pidfd_getfd`` would need no socket, but containers often
forbid it.

Every user of the machine can see the name of the socket (/proc/net/unix) and connect, so a name proves nothing. A
message counts only if the kernel says that its sender has the uid of this process (SO_PEERCRED). It must also carry the
secret that the sending rank has sent to all ranks over MPI. The swap drops all other messages and goes on.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpicomm.devices.descriptor import Descriptor, way_out
from mpicomm.errors import HandleError
from mpicomm.interrupts import uninterrupted

logger = logging.getLogger("mpicomm")

_MAGIC = b"mpicommF"
_SECRET_NBYTES = 32
_HELLO = struct.Struct(f"<8sII{_SECRET_NBYTES}s")
_CREDENTIALS = struct.Struct("3i")
_RETRY_S = 0.01


@dataclass(frozen=True)
class Address:
    """The name at which a rank listens, and the secret in its messages. The repr does not show the secret."""

    name: bytes
    secret: bytes = field(repr=False)


# The target of a rank's descriptor: an address, or a connection over which too many descriptors were in flight.
_Target = Address | socket.socket


class FdExchange:
    """One rank's end of one swap of descriptors; ``rank`` of ``size``. Local; `close` it, or use ``with``."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._listener: socket.socket | None = None
        name = b"\0mpicomm-" + secrets.token_hex(16).encode()
        self.address = Address(name, secrets.token_bytes(_SECRET_NBYTES))
        if size == 1:
            return
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                listener.bind(name)
                listener.listen(socket.SOMAXCONN)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise HandleError(
                f"cannot listen on an abstract unix socket: {error.strerror}{way_out(error.errno)}"
            ) from error
        self._listener = listener

    def __enter__(self) -> FdExchange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def swap(self, addresses: Sequence[Address], fd: int, timeout_s: float) -> dict[int, Descriptor]:
        """Send ``fd`` to every other rank, and return the others' descriptors by rank. Collective, blocking.

        ``addresses`` holds the `address` of every rank. The caller still owns ``fd``. The returned descriptors are new,
        and the caller closes each. An error closes the descriptors that have come. Raises `HandleError` for a peer that
        cannot be reached, that sends anything else, or that sends nothing in time.
        """
        if self._size == 1:
            return {}
        if self._listener is None:
            raise HandleError("this exchange of descriptors is closed: create another")
        deadline = time.monotonic() + timeout_s
        others = {rank: address for rank, address in enumerate(addresses) if rank != self._rank}
        try:
            return self._swap(self._listener, others, fd, deadline)
        except OSError as error:
            raise HandleError(f"cannot exchange descriptors: {error.strerror}{way_out(error.errno)}") from error

    def _swap(
        self, listener: socket.socket, others: Mapping[int, Address], fd: int, deadline: float
    ) -> dict[int, Descriptor]:
        received: dict[int, Descriptor] = {}
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as sockets:
            # All sends come first, so that no failure to receive keeps a peer waiting for this rank. A message stays in
            # the peer's queue with its descriptor, although this end closes before the peer reads it.
            unsent = self._send(others, fd, sockets)
            selector = sockets.enter_context(selectors.DefaultSelector())
            selector.register(listener, selectors.EVENT_READ)
            while unsent or len(received) < len(others):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 and unsent:
                    raise HandleError(_not_sent_in_time(unsent))
                if remaining_s <= 0:
                    missing = sorted(set(others) - set(received))
                    raise HandleError(f"no descriptor came from local ranks {missing} in time")
                for key, _ in selector.select(min(remaining_s, _RETRY_S) if unsent else remaining_s):
                    if key.data is None:
                        # A connection that stays silent takes an entry of the selector, and delays no other connection.
                        if connection := _accept(listener):
                            sockets.enter_context(connection)
                            selector.register(connection, selectors.EVENT_READ, connection)
                        continue
                    selector.unregister(key.data)
                    with key.data as connection:
                        message = self._read(connection, others)
                    if message is None:
                        logger.warning("dropped a stranger's message to the descriptor exchange")
                        continue
                    rank, received_fd = message
                    on_failure.callback(received_fd.close)
                    if rank in received:
                        raise HandleError(f"local rank {rank} sent two descriptors")
                    received[rank] = received_fd
                # A full queue empties as its owner receives, and descriptors in flight land as all ranks receive. The
                # others may wait for this rank in the same way, so this rank receives between its attempts to send.
                unsent = self._send(unsent, fd, sockets)
            on_failure.pop_all()
        return received

    def _send(self, targets: Mapping[int, _Target], fd: int, sockets: contextlib.ExitStack) -> dict[int, _Target]:
        """Send the descriptor; return the targets that cannot take it yet. ``sockets`` closes their connections."""
        unsent: dict[int, _Target] = {}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        for rank, target in targets.items():
            hello = _HELLO.pack(_MAGIC, self._rank, rank, self.address.secret)
            peer: socket.socket | None = None
            try:
                peer = target if isinstance(target, socket.socket) else sockets.enter_context(_connect(rank, target))
                peer.sendmsg([hello], rights)
            except BlockingIOError:
                unsent[rank] = target
            except OSError as error:
                if peer is None or error.errno != errno.ETOOMANYREFS:
                    hint = "; if its container has a separate network namespace, give it another MPICOMM_HOSTID"
                    raise HandleError(
                        f"cannot send a descriptor to rank {rank}: {error.strerror}{way_out(error.errno) or hint}"
                    ) from error
                # The kernel counts the descriptors in flight of all processes of this user, so another job can use them
                # up for a while. The connection stays, because the peer drops a connection that closes in silence.
                unsent[rank] = peer
            else:
                peer.close()
        return unsent

    def _read(self, connection: socket.socket, others: Mapping[int, Address]) -> tuple[int, Descriptor] | None:
        """Return (rank, descriptor), which the caller closes, or None for the message of a stranger.

        It closes the descriptors of a stranger. If it raises, it closes all descriptors.
        """
        try:
            content, fds, flags = _receive(connection)
        except OSError:
            return None
        rank = self._sender(content, others)
        if rank is not None and len(fds) == 1 and not flags & socket.MSG_CTRUNC:
            return rank, fds[0]
        for fd in fds:
            fd.close()
        if rank is None:
            return None
        if flags & socket.MSG_CTRUNC and not fds:
            # The kernel drops a descriptor that it cannot install, and sets nothing but this flag.
            raise HandleError(f"no room for the descriptor of local rank {rank}{way_out(errno.EMFILE)}")
        raise HandleError(f"local rank {rank} sent {len(fds)} descriptors instead of 1")

    def _sender(self, content: bytes, others: Mapping[int, Address]) -> int | None:
        if len(content) != _HELLO.size:
            return None
        magic, sender, receiver, secret = _HELLO.unpack(content)
        if magic != _MAGIC or receiver != self._rank or sender not in others:
            return None
        return sender if hmac.compare_digest(secret, others[sender].secret) else None


def _connect(rank: int, address: Address) -> socket.socket:
    """Return a connection to a rank, which the caller closes."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        peer.connect(address.name)
        if not _same_user(peer):
            raise HandleError(f"the socket of rank {rank} belongs to another user; nothing was sent to it")
    except BaseException:
        peer.close()
        raise
    return peer


def _not_sent_in_time(targets: Mapping[int, _Target]) -> str:
    if any(isinstance(target, socket.socket) for target in targets.values()):
        reason = f"{os.strerror(errno.ETOOMANYREFS)}{way_out(errno.ETOOMANYREFS)}"
        return f"cannot send a descriptor to local ranks {sorted(targets)} in time: {reason}"
    return f"the sockets of local ranks {sorted(targets)} accepted no connection in time"


def _accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection, or None if another user has made it: this closes it unread.

    The swap takes one connection at a time, and reads and closes the connections of a flood as they come. So the flood
    cannot use up all descriptors.
    """
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return None
    if _same_user(connection):
        connection.setblocking(False)
        return connection
    connection.close()
    logger.warning("dropped another user's connection to the descriptor exchange")
    return None


def _receive(connection: socket.socket) -> tuple[bytes, list[Descriptor], int]:
    """Return a message, its descriptors, which the caller closes, and its flags."""
    # Room for more than a peer's message and descriptor, so that a longer message or a second descriptor shows.
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    with uninterrupted():
        content, ancillary, flags, _ = connection.recvmsg(_HELLO.size + 1, room, socket.MSG_CMSG_CLOEXEC)
        # The kernel adds only whole descriptors, because a socket has to ask for anything else.
        fds = [Descriptor(number) for _, _, numbers in ancillary for number in array.array("i", numbers)]
    return content, fds, flags


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())  # the kernel reports the effective uid
