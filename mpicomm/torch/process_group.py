"""ProcessGroup: a Communicator with the methods that PyTorch calls, and how groups are made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpicomm.api.communicator import Communicator
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.log import logger
from mpicomm.mpi.requests import DeferredRequest, ProgressThread
from mpicomm.torch.collective_calls import CollectiveCalls
from mpicomm.torch.groups import communicator_on, create_communicator, create_subgroup, store_barrier
from mpicomm.torch.tensors import flat, movable
from mpicomm.torch.works import WAIT_ERRORS, JoinedWork, MessageWork, Tensors, Work, as_group_error, completed_work

_FREE_S = 30.0
"""A destroyed group waits this long for its other ranks, because they may have ended without destroying it."""


class ProcessGroup(CollectiveCalls):
    """The group of ``comm`` for ``torch.distributed``, which calls these methods. Programs call PyTorch.

    It is a subclass of PyTorch's process group, not of its `Backend`. PyTorch would hide the works of a `Backend` in
    Python in works that never complete.
    """

    supports_coalescing = False
    supports_splitting = True
    supports_shrinking = False
    supports_time_estimate = _supports_time_estimate = False  # PyTorch from 2.15 on asks for the second
    options = None

    def __init__(self, store: c10d.Store, comm: Communicator, timeout_s: float) -> None:
        super().__init__(comm)
        self._group_name = ""
        self._store = store
        self._timeout_s = timeout_s
        self._messages = ProgressThread(self_driven=True)
        self._monitored = 0

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `torch.distributed.monitored_barrier`. It leaves the group usable."""
        self._require_open("monitored_barrier")
        self._monitored += 1
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        comm = self.communicator
        store, before = (
            dist.PrefixStore(f"monitored_barrier/{number}/", self._store)
            for number in (self._monitored, self._monitored - 1)
        )
        store_barrier(store, comm.rank, comm.size, timeout_s, wait_all_ranks=wait_all_ranks)
        if comm.rank == 0:  # all ranks have left the barrier before this one
            for key in ("result", *map(str, range(1, comm.size))):
                before.delete_key(key)

    # Messages

    def send(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """See `torch.distributed.isend`. MPI matches messages by rank and tag. Does not block.

        In a capture the kernels of the two ranks match messages by their order.
        """
        return self._message("send", tensors, rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """See `torch.distributed.irecv`, and `send`. Does not block."""
        return self._message("recv", tensors, rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """See `torch.distributed.irecv` without ``src``. Does not block."""
        return self._message("recv", tensors, MPI.ANY_SOURCE, tag)

    def _start_coalescing(self, device: Any = None) -> None:
        """Join the works of this thread's calls up to `_end_coalescing`. Local."""
        self._coalesced[get_ident()] = []

    def _end_coalescing(self, device: Any = None) -> Work:
        """Return a work for the calls since `_start_coalescing`. Local."""
        return JoinedWork(self._coalesced.pop(get_ident(), []))

    # The group

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "mpicomm"

    name = getBackendName
    _get_backend_name = getBackendName

    def setGroupName(self, name: str) -> None:
        """Take the name by which PyTorch's compiled code finds the group. Local."""
        self._group_name = name

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._group_name

    @property
    def _device_types(self) -> list[torch.device]:
        """The kinds of device that the group's tensors may be on."""
        kinds = ("cpu",) if self.communicator.device == "cpu" else ("cpu", "cuda")
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """Return the group itself, because it takes the tensors of all devices."""
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether `allocate_tensor` has memory that collectives fill faster, which is on this rank's GPU."""
        return torch.device(device).type == "cuda" and self._streams is not None

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of ``size`` elements. On a GPU it lies in symmetric memory: see `SymmetricPool.allocate`."""
        if self._streams is None or torch.device(device).type != "cuda":
            return torch.empty(size, dtype=dtype, device=device)
        return self._queue.run("allocate_tensor", self._streams.allocate, size, dtype)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Take the ``device_id`` of `torch.distributed.init_process_group`. Local."""
        own = self.communicator.device
        if (device.type if own == "cpu" else device.index) != own:  # PyTorch refuses a CPU here up to 2.14
            raise InvalidUsageError(
                f"device_id={device} is not the device {own} of this rank: leave it out on the cpu, or call "
                f"torch.cuda.set_device({device.index}) on every rank before init_process_group"
            )
        self.bound_device_id = device  # `torch.distributed.split_group` refuses a group without it

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing, because ranks outside all parts of a group take no part in making the parts."""

    def split_group(self, ranks: Sequence[int], timeout: timedelta | None = None, **names: Any) -> ProcessGroup | None:
        """See `torch.distributed.split_group`. Collective over ``ranks`` of this group. Other ranks get None."""
        if self.communicator.rank not in ranks:
            return None
        name = names["group_name"]
        timeout_s = timeout.total_seconds() if timeout else self._timeout_s
        store = dist.PrefixStore(f"{name}/", self._store)
        members = create_subgroup(self.communicator, ranks, name, store, timeout_s)
        part = ProcessGroup(store, communicator_on(members, self.communicator.device, timeout_s), timeout_s)
        part._set_group_name(name)
        part._set_group_desc(names.get("group_desc") or "")
        return part

    def get_group_store(self) -> c10d.Store:
        """Return the store of the group."""
        return self._store

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called, without barriers."""
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Refuse a new timeout, because kernels and messages of the group know the timeout of its creation."""
        raise InvalidUsageError(
            f"timeout={timeout}: a group keeps its timeout; make another with new_group(timeout=...)"
        )

    def shutdown(self) -> None:
        """Free the group. `torch.distributed.destroy_process_group` calls this. Collective, blocking.

        After 30 s, or the timeout of the group, it frees only this rank's part. If a call has not ended by then, it
        frees nothing.
        """
        if not self._open:
            return
        self._open = False
        limit_s = min(self._timeout_s, _FREE_S)
        until_s, call_lock = time.monotonic() + limit_s, self._queue.call_lock
        # A free during a call, also in another thread, would take away the memory that the call uses, and both would
        # wait for the same messages.
        if not (self._queue.close(limit_s) and call_lock.acquire(timeout=max(0.0, until_s - time.monotonic()))):
            logger.warning("a process group is not freed, because a call of it has not ended within %g s", limit_s)
            return
        try:
            self.communicator._internals.free(limit_s)
        except MpicommError as error:
            logger.warning("a process group is not freed on all ranks: %s", error)
        finally:
            call_lock.release()

    def abort(self) -> None:
        """Refuse further calls. Local. Calls in progress end with the timeout of the group.

        The memory of the group is freed with the process, because the other ranks may still use it.
        """
        self._open = False
        self._queue.close(0)
        self.communicator._internals.abandon()

    def _message(self, name: str, tensors: Tensors, rank: int, tag: int) -> Work:
        """Begin to send or receive a message. In a capture it is enqueued."""
        self._require_open(name)
        comm, receives = self.communicator, name == "recv"
        if not (0 <= rank < comm.size or (receives and rank == MPI.ANY_SOURCE)):
            raise InvalidUsageError(
                f"{name}: {'src' if receives else 'dst'}={rank} is no rank of this group of {comm.size}: use 0 to "
                f"{comm.size - 1}"
            )
        (tensor,) = tensors
        memory = movable(flat(tensor, "tensor"))
        if memory.is_cuda and self._streams is not None and self._streams.capture():
            self._queue.run(name, comm.Recv if receives else comm.Send, memory, rank, tag)
            return self._joined(completed_work([tensor]))
        try:
            request: MPI.Request = (comm.Irecv if receives else comm.Isend)(memory, rank, tag)
        except WAIT_ERRORS as error:
            raise as_group_error(error, name) from error
        other = "any rank" if rank == MPI.ANY_SOURCE else f"rank {rank}"
        prepare_thread, name = comm._internals.prepare_thread, f"{name} {'from' if receives else 'to'} {other}"
        work = MessageWork(request, tensor, name, self._timeout_s, prepare_thread, receives=receives)
        if not isinstance(request, DeferredRequest):
            self._messages.add(work, prepare_thread)
        return self._joined(work)


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the Communicator of a group of the backend ``mpicomm``, by default of all ranks. Local.

    The group keeps it, and `torch.distributed.destroy_process_group` frees it. Its collectives take no turn among the
    calls of the group. So wait for the group's works first, and call the collectives in one thread. Raises
    `InvalidUsageError` for a group of another backend.
    """
    return group_of(group).communicator


def group_of(group: dist.ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, by default the group of all ranks. Raise `InvalidUsageError` for other backends. Local."""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise InvalidUsageError(
            f'group={group!r} is no group of mpicomm: pass one that init_process_group("mpicomm") or new_group has made'
        )
    return group


def create(description: Any, options: Any) -> ProcessGroup:
    """Return a group for ``torch.distributed``, from PyTorch's ``description`` of it. Collective over its ranks.

    Raises the same error on all ranks: `InvalidUsageError` if PyTorch has other ranks than ``MPI.COMM_WORLD``,
    `GroupTimeoutError` if a rank does not come, and the errors of `Communicator`.
    """
    if options is not None:
        raise InvalidUsageError(f"pg_options={options!r}: the backend mpicomm has no options")
    whole = dist.group.WORLD
    comm = create_communicator(description, whole.communicator if isinstance(whole, ProcessGroup) else None)
    return ProcessGroup(description.store, comm, description.timeout.total_seconds())
