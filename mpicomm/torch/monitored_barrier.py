"""``torch.distributed.monitored_barrier``: a barrier that names the missing ranks, and leaves the group usable."""

from __future__ import annotations

import json
import time
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from mpicomm.torch.failures import GroupTimeoutError

_NOTHING = timedelta(milliseconds=1)  # a store does not wait for less


def wait_for_all(
    store: c10d.Store, rank: int, size: int, timeout_s: float, *, name_all: bool, step: str = "monitoredBarrier"
) -> None:
    """Wait until all ranks have come to ``step``. Raise `GroupTimeoutError`. Collective, with its own store.

    Rank 0 names the first missing rank, or all with ``name_all``. The other ranks get its error, and a late rank gets
    it, too. The errors begin like gloo's, because programs look for these words.
    """
    if rank == 0:
        agreed_error, missing = _roll_call(store, size, timeout_s, name_all=name_all, step=step)
        store.set("agreed_error", json.dumps([agreed_error, missing]))
        if agreed_error:
            raise GroupTimeoutError(agreed_error, ranks=missing)
        return
    store.set(str(rank), "")
    came = f"Rank {rank} successfully reached {step}"
    came += ", but received errors while waiting for send/recv from rank 0"
    # Rank 0 may come up to `timeout_s` after this rank. It writes the agreed error at most `timeout_s` later.
    if not _comes(store, "agreed_error", 2 * timeout_s):
        raise GroupTimeoutError(f"{came}: it did not come within {2 * timeout_s:g} s", ranks=[0])
    agreed_error, missing = json.loads(store.get("agreed_error"))
    if agreed_error:
        raise GroupTimeoutError(f"{came}: {agreed_error}", ranks=missing)


def forget(store: c10d.Store, size: int) -> None:
    """Delete the keys of a barrier that all ranks have left. Local."""
    for key in ("agreed_error", *map(str, range(1, size))):
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
