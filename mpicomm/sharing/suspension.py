"""Suspension: the memory of a communicator goes back to the driver for a while, and its addresses stay reserved.

The order of its steps matters:

1. All ranks finish their work. Otherwise a peer could write bytes after this rank has saved them.
2. All ranks save the bytes to the host that they restore later.
3. All ranks unmap the memory of their peers, and then their own memory. The last mapping keeps memory alive, so a rank
   that returned earlier would not find the memory free.
4. Each rank allocates new memory, and fills it, before a peer can map it. Otherwise it could overwrite a peer's first
   store.
5. All ranks map the memory of their peers. When that is done on all ranks, calls can go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mpicomm.cluster.agreement import Group, require_same
from mpicomm.devices.cuda.types import Backend
from mpicomm.devices.handle import VIRTUAL_KINDS, Kind
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.sharing.segments import SharedSegments, reopen


class Suspension:
    """The memory of one communicator that is released, and the saved bytes that `restore` copies back.

    ``group`` has all ranks of the communicator, and ``kind`` is its handle kind. The collective methods raise the same
    error on all ranks.
    """

    def __init__(self, group: Group, backend: Backend, kind: Kind) -> None:
        self._group = group
        self._backend = backend
        self._kind = kind
        self._memories: list[SharedSegments] = []
        self._saved: dict[SharedSegments, npt.NDArray[np.uint8]] = {}

    @property
    def host_nbytes(self) -> int:
        """The saved bytes, in host memory."""
        return sum(self._saved[shared].nbytes for shared in self._open() if shared in self._saved)

    def save(self, memories: Callable[[], list[SharedSegments]], before: Callable[[], None], *, keep: bool) -> None:
        """Finish the work of all ranks, and save the bytes that `restore` copies back. Collective, blocking.

        ``memories`` returns what to release, on all ranks in the same order. ``before`` runs between both steps. If
        this raises, the memory is as it was.
        """

        def finish_work() -> bool:
            if self._kind == "ipc":
                raise InvalidUsageError(
                    'suspend: memory of handle="ipc" cannot come back at its addresses: create the communicator with '
                    'handle="fd", or set MPICOMM_HANDLE=fd'
                )
            self._backend.synchronize()
            self._backend.check()
            return keep

        def save() -> None:
            before()
            if self._kind in VIRTUAL_KINDS:  # other memory is memory of the host, and stays
                self._memories = memories()
            for shared in self._memories:
                content = shared.content
                assert content is not None
                if content.kept_nbytes and (keep or not content.of_user):
                    host = self._backend.pinned(content.kept_nbytes)
                    self._copy(host.ctypes.data, shared.own.pointer, host.nbytes)
                    self._saved[shared] = host

        require_same("suspend: keep", self._group.allgather("suspend: finish all work", finish_work))
        self._group.agree("suspend: save", save)

    def release(self) -> None:
        """Release the memory, after `save`. Collective, blocking."""
        self._group.agree("suspend: unmap", self._unmap_peers)
        self._group.agree("suspend: release", self._unmap_own)

    def restore(self) -> None:
        """Allocate new memory at the same addresses, and copy the saved bytes into it. Collective, blocking.

        If this raises, the memory is released as before, and another attempt may follow.
        """
        try:
            self._group.agree("resume: allocate", self._allocate)
            # If the ranks of one node fail, the ranks of the others must not go on.
            self._group.agree("resume: on all nodes", self._map_peers)
        except Exception:
            for step in (self._unmap_peers, self._unmap_own):
                with contextlib.suppress(MpicommError):
                    step()
            raise

    def _map_peers(self) -> None:
        for shared in self._open():
            reopen(shared, self._backend, "resume")

    def _unmap_peers(self) -> None:
        for shared in self._open():
            for index in shared.peers:
                shared.virtual(index).suspend()

    def _unmap_own(self) -> None:
        for shared in self._open():
            shared.virtual(shared.node.rank).suspend()
        self._backend.suspend()

    def _allocate(self) -> None:
        for shared in self._open():
            shared.virtual(shared.node.rank).resume()
            if shared.content is not None and shared.content.fill is not None:
                shared.content.fill(shared.own.pointer)
            if (host := self._saved.get(shared)) is not None:
                self._copy(shared.own.pointer, host.ctypes.data, host.nbytes)
        self._backend.resume()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        stream = self._backend.stream(None)
        self._backend.copy(target, source, nbytes, stream)
        self._backend.synchronize(stream)

    def _open(self) -> list[SharedSegments]:
        """Return the memories that are not closed meanwhile: the same ones on all ranks."""
        return [shared for shared in self._memories if shared.is_open]
