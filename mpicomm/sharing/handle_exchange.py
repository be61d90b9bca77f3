"""HandleExchange: the ranks of a node tell each other handles and descriptors of their memory, and open the memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from mpicomm.cluster.agreement import Group
from mpicomm.devices.descriptor import Descriptor
from mpicomm.devices.handle import SEALED_KINDS, Exported, MemoryHandle
from mpicomm.devices.host_memory import require_sealed
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.sharing.fd_exchange import Address, FdExchange

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Offer:
    """The description of a rank's memories for the other ranks."""

    signature: Hashable
    handles: tuple[tuple[MemoryHandle, ...], ...]
    """The handles of each memory."""
    descriptors: int
    address: Address | None  # for the exchange of descriptors, if the memories have any


class HandleExchange:
    """One exchange of the memories of all ranks of ``node``: `offer`, then `open`, in a ``with`` block.

    ``what`` names the call in errors. The end of the block closes all descriptors and sockets.
    """

    def __init__(self, node: Group, what: str) -> None:
        self._node = node
        self._what = what
        self._temporary = contextlib.ExitStack()
        self._swap: FdExchange | None = None
        self._own_fds: list[Descriptor] = []
        self._offers: list[_Offer] = []
        self._addresses: list[Address] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._temporary.close()

    def offer(self, export: Callable[[], tuple[Hashable, Iterable[Exported]]]) -> None:
        """Tell the other ranks the memories that ``export`` returns. Collective, blocking.

        ``export`` returns a signature, which has to be the same on all ranks, and the parts of each memory. A failure
        on any rank raises the same error on all ranks, before a rank has opened any memory.
        """
        self._offers = self._node.exchange(f"{self._what}: allocate and export", lambda: self._offer(*export()))
        _require_same_signature(self._what, self._node, self._offers)
        self._addresses = [offer.address for offer in self._offers if offer.address]
        if 0 < len(self._addresses) < self._node.size:  # ranks have memory of different kinds
            self._addresses = self._node.exchange(f"{self._what}: exchange descriptors", self._listen)

    def open(self, open_peer: Callable[[int, list[Exported]], None], *, sealed: bool) -> None:
        """Call ``open_peer`` with the index of each other rank and the parts of its memories. Collective, blocking.

        Host memory has to be ``sealed``, unless it is memory of the user. A failure on any rank raises the same error
        on all ranks.
        """
        self._node.agree(f"{self._what}: open", lambda: self._open(open_peer, sealed))

    def _listen(self) -> Address:
        if self._swap is None:
            self._swap = self._temporary.enter_context(FdExchange(self._node.rank, self._node.size))
        return self._swap.address

    def _offer(self, signature: Hashable, memories: Iterable[Exported]) -> _Offer:
        handles: list[tuple[MemoryHandle, ...]] = []
        for parts in memories:  # the next memory may fail, so the descriptors of this memory get their owner first
            for _, fd in parts:
                if fd is not None:
                    self._own_fds.append(fd)
                    self._temporary.callback(fd.close)
            handles.append(tuple(handle for handle, _ in parts))
        return _Offer(signature, tuple(handles), len(self._own_fds), self._listen() if self._own_fds else None)

    def _open(self, open_peer: Callable[[int, list[Exported]], None], sealed: bool) -> None:
        received: dict[int, list[Descriptor]] = {}
        if self._swap is not None:
            counts = [offer.descriptors for offer in self._offers]
            # Half the deadline, so that the ranks have time to agree that a descriptor has not come.
            received = self._swap.swap(self._addresses, self._own_fds, counts, self._node.timeout_s / 2)
            for fds in received.values():
                for fd in fds:
                    self._temporary.callback(fd.close)
        for index, offer in enumerate(self._offers):
            if index != self._node.rank:
                with _naming(self._node.ranks[index]):
                    open_peer(index, _with_descriptors(offer.handles, received.get(index, []), sealed))


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Name the rank whose memory a `HandleError` is about."""
    try:
        yield
    except HandleError as error:
        raise HandleError(f"memory of rank {rank}: {error}") from error


def _with_descriptors(handles: Sequence[Sequence[MemoryHandle]], fds: list[Descriptor], sealed: bool) -> list[Exported]:
    """Return the parts of each memory, each with the next descriptor if its handle has one."""
    descriptors = iter(fds)

    def part(handle: MemoryHandle) -> tuple[MemoryHandle, Descriptor | None]:
        descriptor = next(descriptors, None) if handle.has_descriptor else None
        if sealed and descriptor is not None and handle.kind in SEALED_KINDS:
            require_sealed(descriptor)
        return handle, descriptor

    return [tuple(map(part, each)) for each in handles]


def _require_same_signature(what: str, node: Group, offers: list[_Offer]) -> None:
    if len({offer.signature for offer in offers}) > 1:
        said = ", ".join(f"{offer.signature} on rank {rank}" for rank, offer in zip(node.ranks, offers, strict=True))
        raise InvalidUsageError(f"{what}: the ranks differ: {said}; a symmetric array is the same on all")
