"""A stranger finds nothing: shared memory has no name in a file system, and others can read no secret."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.sharing.fd_exchange import FdExchange
from tests.helpers.rigs.communicators import communicator


def shared_mappings() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    fields = [line.split(maxsplit=5) for line in lines]
    return {each[5] for each in fields if each[1].endswith("s") and len(each) == 6}


def test_shared_memory_has_no_name_and_secrets_are_not_shown(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with communicator("cpu"):
        pass  # descriptors that MPI opens at first
    mapped = shared_mappings()
    secrets = []
    begin = FdExchange.__init__

    def remembering(exchange: FdExchange, rank: int, size: int) -> None:
        begin(exchange, rank, size)
        secrets.append(exchange.address.secret)

    monkeypatch.setattr(FdExchange, "__init__", remembering)
    with communicator("cpu") as comm:
        array = comm.zeros(1000)
        comm.Allreduce(MPI.IN_PLACE, np.ones(1000), algorithm="one_shot")
        comm.Barrier()
        new = shared_mappings() - mapped
        assert new <= {"/memfd:mpicomm (deleted)"}, new
        shown = b"".join(Path("/proc/self", name).read_bytes() for name in ("cmdline", "environ"))
        assert secrets
        for secret in secrets:
            assert secret not in shown and secret.hex().encode() not in shown
        array.close()
