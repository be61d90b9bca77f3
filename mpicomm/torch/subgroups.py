"""Communicators of some ranks of a group, and the barrier in a store that names the ranks that do not come."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpicomm.api.communicator import Communicator
from mpicomm.torch.failures import GroupTimeoutError

_TAGS = 32768  # MPI promises tags below this number
_NOTHING = timedelta(milliseconds=1)  # a store does not wait for less


def part_of(parent: Communicator, ranks: Sequence[int], name: str, store: c10d.Store, timeout_s: float) -> Communicator:
    """Return a Communicator of some ranks of ``parent``, in this order, on the same devices.

    Collective only over these ranks. They pass the same ``name``, which differs between groups that are made at the
    same time. ``store`` is the store of the new group. Raises `GroupTimeoutError` if a rank does not come.
    """
    plain = members_of(parent, ranks, name, store, timeout_s)
    try:
        return Communicator(plain, device=parent.device, timeout_s=timeout_s)
    finally:
        plain.Free()


def members_of(
    parent: MPI.Intracomm, ranks: Sequence[int], name: str, store: c10d.Store, timeout_s: float
) -> MPI.Intracomm:
    """Return MPI's communicator of some ranks of ``parent``; see `part_of`. The caller frees it."""
    # The barrier comes first, because MPI waits without a limit for ranks that do not come.
    came = dist.PrefixStore("came", store)
    wait_for_all(came, list(ranks).index(parent.rank), len(ranks), timeout_s, name_all=True, step="new_group")
    whole = parent.Get_group()
    members = whole.Incl(ranks)
    tag = zlib.crc32(name.encode()) % _TAGS
    plain = MPI.Intracomm(parent).Create_group(members, tag)
    members.Free()
    whole.Free()
    assert isinstance(plain, MPI.Intracomm)
    return plain


def wait_for_all(
    store: c10d.Store, rank: int, size: int, timeout_s: float, *, name_all: bool, step: str = "monitoredBarrier"
) -> None:
    """Wait until all ranks have come to ``step``. Raise `GroupTimeoutError`. Collective, with its own store.

    Rank 0 names the first missing rank, or all with ``name_all``. The other ranks get its error, and a late rank gets
    it, too. If rank 0 is late, it gets the error of the others. The errors begin like gloo's, because programs look for
    these words.
    """
    result: tuple[str, list[int]] = "", []
    if rank == 0:
        result = _roll_call(store, size, timeout_s, name_all=name_all, step=step)
    else:
        store.set(str(rank), "")
        # Rank 0 may come up to `timeout_s` after this rank. It writes the result at most `timeout_s` later.
        if not _comes(store, "result", 2 * timeout_s):
            result = f"rank 0 did not come within {2 * timeout_s:g} s", [0]
    # The first result that is written holds for all ranks. So rank 0 does not pass after another rank has given up.
    text, missing = json.loads(store.compare_set("result", "", json.dumps(result)))
    if text and rank:
        reached = f"Rank {rank} successfully reached {step}"
        text = f"{reached}, but received errors while waiting for send/recv from rank 0: {text}"
    if text:
        raise GroupTimeoutError(text, ranks=missing)


def forget(store: c10d.Store, size: int) -> None:
    """Delete the keys of a barrier that all ranks have left. Local."""
    for key in ("result", *map(str, range(1, size))):
        store.delete_key(key)


def _roll_call(store: c10d.Store, size: int, timeout_s: float, *, name_all: bool, step: str) -> tuple[str, list[int]]:
    """Return why ``step`` has failed, or "" if all ranks have come, and the missing ranks."""
    if timeout_s <= 0:
        return f"Rank 0 timed out in {step} after {timeout_s:g} s", []
    end = time.monotonic() + timeout_s
    missing = []
    for rank in range(1, size):
        if not _comes(store, str(rank), end - time.monotonic()):
            missing.append(rank)
            if not name_all:
                break
    if not missing:
        return "", []
    names = ", ".join(map(str, missing))
    return f"Rank{'s' * (len(missing) > 1)} {names} failed to pass {step} in {timeout_s:g} s", missing


def _comes(store: c10d.Store, key: str, timeout_s: float) -> bool:
    try:
        store.wait([key], max(timedelta(seconds=timeout_s), _NOTHING))
    except RuntimeError:  # of PyTorch, among them DistStoreError
        return bool(store.check([key]))
    return True
