"""MPI's blocking messages and probes of a Communicator. Its row shows the doctor the rank for which this rank waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from mpicomm.activity.layout import DEST, NOBODY, RECEIVES, SEND_TAG, SENDS, SOURCE, TAG

Result = TypeVar("Result")
_NO_INTEGER = TypeError, ValueError
"""Errors of a row for a rank or a tag that is no integer of 64 bits. MPI takes a float, and refuses all others."""
_recv = MPI.Intracomm.Recv
_sendrecv = MPI.Intracomm.Sendrecv


def sending(send: Callable[..., None]) -> Callable[..., None]:
    """Return a blocking send of mpi4py with four arguments: communicator, buffer or object, destination, and tag."""

    @functools.wraps(send)
    def recorded(comm: Any, obj: Any, dest: int, tag: int = 0) -> None:  # the names of mpi4py's calls on objects
        row = comm._row
        row[SENDS] += 1
        try:
            row[SEND_TAG] = tag
            row[DEST] = dest
        except _NO_INTEGER:
            pass
        try:
            send(comm, obj, dest, tag)
        finally:
            row[DEST] = NOBODY

    return recorded


def receiving(receive: Callable[..., Result], source_at: int) -> Callable[..., Result]:
    """Return a blocking receive or probe of mpi4py.

    The source is argument number ``source_at``, and the tag follows it.
    """

    @functools.wraps(receive)
    def recorded(comm: Any, *arguments: Any) -> Result:
        row = comm._row
        row[RECEIVES] += 1
        try:
            row[TAG] = arguments[source_at + 1]
            row[SOURCE] = arguments[source_at]
        except _NO_INTEGER:
            pass
        try:
            return receive(comm, *arguments)
        finally:
            row[SOURCE] = NOBODY

    return recorded


# The calls of small host arrays do without `*arguments`, which takes a tenth of the time of such a call.


def recv(comm: Any, buf: Any, source: int, tag: int, status: MPI.Status | None) -> None:
    """Receive as MPI's Recv does."""
    row = comm._row
    row[RECEIVES] += 1
    try:
        row[TAG] = tag
        row[SOURCE] = source
    except _NO_INTEGER:
        pass
    try:
        _recv(comm, buf, source, tag, status)
    finally:
        row[SOURCE] = NOBODY


def sendrecv(
    comm: Any, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, tag: int, status: MPI.Status | None
) -> None:
    """Send and receive as MPI's Sendrecv does."""
    row = comm._row
    row[RECEIVES] += 1
    try:
        row[TAG] = tag
        row[SOURCE] = source
    except _NO_INTEGER:
        pass
    try:
        _sendrecv(comm, sendbuf, dest, sendtag, recvbuf, source, tag, status)
    finally:
        row[SOURCE] = NOBODY


recv_object = receiving(MPI.Intracomm.recv, 1)
sendrecv_object = receiving(MPI.Intracomm.sendrecv, 4)
sendrecv_replace = receiving(MPI.Intracomm.Sendrecv_replace, 3)
probe = receiving(MPI.Intracomm.Probe, 0)
mprobe = receiving(MPI.Intracomm.Mprobe, 0)
