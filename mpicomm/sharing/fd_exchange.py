"""Pass file descriptors between processes of one node: abstract unix sockets and SCM_RIGHTS, no CUDA, no MPI.

Every rank listens, tells the peers its `address` over a channel that they trust (MPI), and then calls `swap`: each
rank sends each other rank all its descriptors, in messages of up to `MOST_FDS`. ``pidfd_getfd`` would need no socket,
but containers often forbid it.

Every user of the machine can see the name of the socket (/proc/net/unix) and connect, so a name proves nothing. A
message counts only if the kernel says that its sender has the uid of this process (SO_PEERCRED). It must also carry the
secret that the sending rank has sent to all ranks over MPI. The swap drops all other messages and goes on.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpicomm.devices.handle import Descriptor, limit_hint
from mpicomm.errors import HandleError
from mpicomm.log import logger
from mpicomm.waiting import uninterrupted

_MAGIC = b"mpicommF"
_SECRET_NBYTES = 32
_HELLO = struct.Struct(f"<8sIII{_SECRET_NBYTES}s")
_CREDENTIALS = struct.Struct("3i")
_RETRY_S = 0.01
MOST_FDS = 64
"""The most descriptors in a message. The kernel takes 253."""


@dataclass(frozen=True)
class Address:
    """The name at which a rank listens, and the secret in its messages. The repr does not show the secret."""

    name: bytes
    secret: bytes = field(repr=False)


# The target of a message: an address, or a connection over which too many descriptors were in flight.
_Target = Address | socket.socket
_Message = tuple[int, int]
"""A rank, and the number of the message that it sends or receives."""


class FdExchange(contextlib.AbstractContextManager["FdExchange"]):
    """One rank's end of one swap of descriptors; ``rank`` of ``size``. Local; `close` it, or use ``with``."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._listener: socket.socket | None = None
        self._strangers = 0
        name = b"\0mpicomm-" + secrets.token_hex(16).encode()
        self.address = Address(name, secrets.token_bytes(_SECRET_NBYTES))
        if size == 1:
            return
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        try:
            self._listener = socket.socket(socket.AF_UNIX, kind)
            self._listener.bind(name)
            self._listener.listen(socket.SOMAXCONN)
        except OSError as error:
            self.close()
            reason = f"{error.strerror}{limit_hint(error.errno)}"
            raise HandleError(f"cannot listen on an abstract unix socket: {reason}") from error

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def swap(
        self, addresses: Sequence[Address], fds: Sequence[int], counts: Sequence[int], timeout_s: float
    ) -> dict[int, list[Descriptor]]:
        """Send ``fds`` to every other rank, and return the peers' descriptors by rank. Collective, blocking.

        ``addresses`` holds the `address` of every rank, and ``counts`` the number of descriptors of every rank. The
        caller still owns ``fds``. The returned descriptors are new, and the caller closes each. An error closes the
        descriptors that have come. Raises `HandleError` for a peer that cannot be reached, that sends anything else, or
        that sends nothing in time.
        """
        if self._size == 1:
            return {}
        assert self._listener is not None
        deadline = time.monotonic() + timeout_s
        peers = {rank: address for rank, address in enumerate(addresses) if rank != self._rank}
        expected = {(rank, n): count for rank in peers for n, count in enumerate(_messages(counts[rank]))}
        try:
            received = self._swap(self._listener, peers, fds, expected, deadline)
        except OSError as error:
            raise HandleError(f"cannot exchange descriptors: {error.strerror}{limit_hint(error.errno)}") from error
        finally:
            if self._strangers:  # one line, because strangers may come in a flood
                logger.warning("the descriptor exchange dropped %d messages of strangers", self._strangers)
        of_rank: dict[int, list[Descriptor]] = {rank: [] for rank in peers}
        for message in expected:  # in the order of the descriptors
            of_rank[message[0]] += received[message]
        return of_rank

    def _swap(
        self,
        listener: socket.socket,
        peers: Mapping[int, Address],
        fds: Sequence[int],
        expected: Mapping[_Message, int],
        deadline: float,
    ) -> dict[_Message, list[Descriptor]]:
        received: dict[_Message, list[Descriptor]] = {}
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as sockets:
            # All sends come first, so that no failure to receive keeps a peer waiting for this rank. A message stays in
            # the peer's queue with its descriptors, although this end closes before the peer reads it.
            numbers = range(len(_messages(len(fds))))
            unsent = self._send({(rank, n): peers[rank] for rank in peers for n in numbers}, fds, sockets)
            selector = sockets.enter_context(selectors.DefaultSelector())
            selector.register(listener, selectors.EVENT_READ)
            while unsent or len(received) < len(expected):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 and unsent:
                    ranks = sorted({rank for rank, _ in unsent})
                    if all(isinstance(target, Address) for target in unsent.values()):
                        raise HandleError(f"the sockets of local ranks {ranks} accepted no connection in time")
                    reason = f"{os.strerror(errno.ETOOMANYREFS)}{limit_hint(errno.ETOOMANYREFS)}"
                    raise HandleError(f"cannot send a descriptor to local ranks {ranks} in time: {reason}")
                if remaining_s <= 0:
                    missing = sorted({rank for rank, _ in set(expected) - set(received)})
                    raise HandleError(f"no descriptor came from local ranks {missing} in time")
                for key, _ in selector.select(min(remaining_s, _RETRY_S) if unsent else remaining_s):
                    if key.data is None:
                        # A connection that stays silent takes an entry of the selector, and delays no other connection.
                        if connection := self._accept(listener):
                            sockets.enter_context(connection)
                            selector.register(connection, selectors.EVENT_READ, connection)
                        continue
                    selector.unregister(key.data)
                    with key.data as connection:
                        message = self._read(connection, peers, expected)
                    if message is None:
                        self._strangers += 1
                        continue
                    (rank, number), received_fds = message
                    for fd in received_fds:
                        on_failure.callback(fd.close)
                    if (rank, number) in received:
                        raise HandleError(f"local rank {rank} sent message {number} of its descriptors twice")
                    received[rank, number] = received_fds
                # A full queue empties as its owner receives, and descriptors in flight land as all ranks receive. The
                # peers may wait for this rank in the same way, so this rank receives between its attempts to send.
                unsent = self._send(unsent, fds, sockets)
            on_failure.pop_all()
        return received

    def _send(
        self, targets: Mapping[_Message, _Target], fds: Sequence[int], sockets: contextlib.ExitStack
    ) -> dict[_Message, _Target]:
        """Send messages; return the messages that their targets cannot take yet. ``sockets`` closes connections."""
        unsent: dict[_Message, _Target] = {}
        for (rank, number), target in targets.items():
            hello = _HELLO.pack(_MAGIC, self._rank, rank, number, self.address.secret)
            peer: socket.socket | None = None
            try:
                peer = target if isinstance(target, socket.socket) else sockets.enter_context(_connect(rank, target))
                socket.send_fds(peer, [hello], fds[number * MOST_FDS : (number + 1) * MOST_FDS])
            except BlockingIOError:
                unsent[rank, number] = target
            except OSError as error:
                if peer is None or error.errno != errno.ETOOMANYREFS:
                    hint = "; if its container has a separate network namespace, give it another MPICOMM_HOSTID"
                    raise HandleError(
                        f"cannot send a descriptor to rank {rank}: {error.strerror}{limit_hint(error.errno) or hint}"
                    ) from error
                # The kernel counts the descriptors in flight of all processes of this user, so another job can use them
                # up for a while. The connection stays, because the peer drops a connection that closes in silence.
                unsent[rank, number] = peer
            else:
                peer.close()
        return unsent

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        """Return the next connection, or None if another user has made it: this closes it unread.

        The swap takes one connection at a time, and reads and closes the connections of a flood as they come. So the
        flood cannot use up all descriptors.
        """
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return None
        if _same_user(connection):
            connection.setblocking(False)
            return connection
        connection.close()
        self._strangers += 1
        return None

    def _read(
        self, connection: socket.socket, peers: Mapping[int, Address], expected: Mapping[_Message, int]
    ) -> tuple[_Message, list[Descriptor]] | None:
        """Return a message of a rank with its descriptors, which the caller closes, or None for one of a stranger.

        It closes the descriptors of a stranger. If it raises, it closes all descriptors.
        """
        try:
            content, fds, flags = _receive(connection)
        except OSError:
            return None
        message = self._message(content, peers, expected)
        if message is not None and len(fds) == expected[message] and not flags & socket.MSG_CTRUNC:
            return message, fds
        for fd in fds:
            fd.close()
        if message is None:
            return None
        rank, count = message[0], expected[message]
        if flags & socket.MSG_CTRUNC and len(fds) < count:
            # The kernel drops the descriptors that it cannot install, and sets nothing but this flag.
            raise HandleError(f"no room for the descriptors of local rank {rank}{limit_hint(errno.EMFILE)}")
        raise HandleError(f"local rank {rank} sent {len(fds)} descriptors instead of {count}")

    def _message(
        self, content: bytes, peers: Mapping[int, Address], expected: Mapping[_Message, int]
    ) -> _Message | None:
        if len(content) != _HELLO.size:
            return None
        magic, sender, receiver, number, secret = _HELLO.unpack(content)
        if magic != _MAGIC or receiver != self._rank or (sender, number) not in expected:
            return None
        return (sender, number) if hmac.compare_digest(secret, peers[sender].secret) else None


def _messages(count: int) -> list[int]:
    """Return the number of descriptors in each message of a rank that has ``count`` descriptors."""
    return [min(MOST_FDS, count - begin) for begin in range(0, count, MOST_FDS)]


def _connect(rank: int, address: Address) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        peer.connect(address.name)
        if not _same_user(peer):
            raise HandleError(f"the socket of rank {rank} belongs to another user; nothing was sent to it")
    except BaseException:
        peer.close()
        raise
    return peer


def _receive(connection: socket.socket) -> tuple[bytes, list[Descriptor], int]:
    # Room for more than a peer's message and descriptors, so that a longer message or another descriptor shows.
    room = socket.CMSG_SPACE((MOST_FDS + 1) * array.array("i").itemsize)
    with uninterrupted():
        content, ancillary, flags, _ = connection.recvmsg(_HELLO.size + 1, room, socket.MSG_CMSG_CLOEXEC)
        # The kernel adds only whole descriptors, because a socket has to ask for anything else.
        fds = [Descriptor(number) for _, _, numbers in ancillary for number in array.array("i", numbers)]
    return content, fds, flags


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())  # the kernel reports the effective uid
