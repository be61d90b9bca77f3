"""The meeting of ranks that mpirun has started in ``init_process_group``: MPI gives rank, size and address."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.rendezvous import _rendezvous_handlers

from mpicomm.cluster.agreement import Group
from mpicomm.cluster.process import node_key
from mpicomm.cluster.roll_call import private_copy
from mpicomm.errors import InvalidUsageError

Found = Iterator[tuple[dist.Store, int, int]]

_STEP = "init_process_group"


def install_handler() -> None:
    """Let ``env://``, PyTorch's default, ask MPI if the environment names no rank. Local.

    PyTorch has no public way to change its behaviour without ``init_method``. So this replaces the handler of
    ``env://``.
    """
    by_environment = _rendezvous_handlers["env"]

    def handler(url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any) -> Found:
        if url == "env://" and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
            return _by_mpi(timeout)
        found: Found = by_environment(url, timeout=timeout, **options)
        return found

    _rendezvous_handlers["env"] = handler


def _port() -> int:
    text = os.environ.get("MASTER_PORT", "0")
    if not text.isdecimal() or int(text) > 65535:
        raise InvalidUsageError(f"MASTER_PORT={text!r} is no port: set a number from 0 to 65535, or unset it")
    return int(text)


def _by_mpi(timeout: timedelta) -> Found:
    """Yield a store on the first rank, and rank and size of ``MPI.COMM_WORLD``. Collective.

    If the first rank cannot listen, all ranks raise the same error. Raises `CollectiveTimeoutError` if a rank does not
    come.
    """
    limit_s = timeout.total_seconds()
    private = private_copy(MPI.COMM_WORLD, _STEP, limit_s)
    group = Group(private, range(private.size), limit_s)
    rank, size = private.rank, private.size
    try:
        hosts = group.exchange(f"{_STEP}: hosts", node_key)
        address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if len(set(hosts)) == 1 else socket.gethostname())
        served: list[dist.TCPStore] = []

        def listen() -> tuple[str, int]:
            if private.rank == 0:
                served.append(dist.TCPStore(address, _port(), private.size, True, timeout, wait_for_workers=False))
                return address, served[0].port
            return address, 0

        address, port = group.exchange(f"{_STEP}: store", listen)[0]
        store = served[0] if served else dist.TCPStore(address, port, private.size, False, timeout)
    finally:
        if group.broken is None:  # else a rank is missing, and MPI's Free would wait for it
            private.Free()
    yield store, rank, size
    raise RuntimeError("PyTorch asks for other ranks, but MPI does not change the ranks of a running program")
