"""ProcessGroup: a Communicator with the methods that PyTorch calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpicomm.api.communicator import Communicator
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.log import logger
from mpicomm.mpi.requests import Completer, DeferredRequest
from mpicomm.torch.call_queue import CallQueue, JoinedWork
from mpicomm.torch.collective_calls import CollectiveCalls
from mpicomm.torch.collectives import TensorCalls
from mpicomm.torch.failures import WAITS, TensorError, translated
from mpicomm.torch.known_calls import Given, TensorCall
from mpicomm.torch.streams import Streams
from mpicomm.torch.subgroups import forget, part_of, wait_for_all
from mpicomm.torch.tensors import flat, movable
from mpicomm.torch.works import FOREVER, MessageWork, Tensors, Work, ended

T = TypeVar("T")

_FREE_S = 30.0
"""A destroyed group waits this long for its other ranks, because they may have ended without destroying it."""


class ProcessGroup(CollectiveCalls):
    """The group of ``comm`` for ``torch.distributed``, which calls these methods. Programs call PyTorch.

    The methods of collectives are *collective*. A blocking call on host tensors returns when it is done, and a thread
    carries out an asynchronous call. A call on tensors of a GPU is enqueued on the current stream. An asynchronous call
    is enqueued on a stream of the group, after the work of the current stream. If the options of a call name a timeout,
    the host waits for the call, but no longer than this timeout. The call itself ends with the timeout of the group.

    It is a subclass of PyTorch's process group, not of its `Backend`. PyTorch would hide the works of a `Backend` in
    Python in works that never complete.
    """

    supports_coalescing = False
    supports_splitting = True
    supports_shrinking = False
    supports_time_estimate = False
    options = None

    def __init__(self, store: c10d.Store, comm: Communicator, timeout_s: float) -> None:
        super().__init__(comm.rank, comm.size)
        self._group_name = self._group_desc = ""
        self.communicator = comm
        self._store = store
        self.collectives = TensorCalls(comm)
        self._streams = None if comm.device == "cpu" else Streams(comm)
        self._timeout_s = timeout_s
        self._queue = CallQueue(f"mpicomm rank {comm.rank} of {comm.size}")
        self._messages = Completer(by_itself=True)
        self._coalesced: dict[int, list[Work]] = {}
        """By thread, the works of its calls between `_start_coalescing` and `_end_coalescing`."""
        self._sequence = 0
        self._monitored = 0
        self._open = True

    # Barriers

    def barrier(self, opts: Any = None) -> Work:
        """See `torch.distributed.barrier`. On a GPU a rank also waits until its current stream has done its work."""
        self._require_open("barrier")
        begin, limit = getattr(opts, "asyncOp", False), _limit(opts)
        if self._streams is None:
            return self._queue.run(self.collectives.barrier.carry_out, (), "barrier", begin=begin, limit=limit)
        work = self._queue.call("barrier", self._streams.barrier, limit or FOREVER)
        if not begin:
            work.wait()
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `torch.distributed.monitored_barrier`. It leaves the group usable."""
        self._require_open("monitored_barrier")
        self._monitored += 1
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        comm = self.communicator
        store = _store_of_barrier(self._store, self._monitored)
        wait_for_all(store, comm.rank, comm.size, timeout_s, name_all=wait_all_ranks)
        if comm.rank == 0:  # all ranks have left the barrier before this one
            forget(_store_of_barrier(self._store, self._monitored - 1), comm.size)

    def in_turn(self, name: str, call: Callable[[], T]) -> T:
        """Carry out a call of the group's Communicator in its turn among the calls of the group."""
        self._require_open(name)
        return self._queue.call(name, call)

    # Messages

    def send(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """See `torch.distributed.isend`. MPI matches messages by rank and tag. Does not block.

        In a capture the kernels of the two ranks match messages by their order.
        """
        self._require_rank("send", "dst", rank)
        comm = self.communicator
        return self._message("send", f"to rank {rank}", tensors, rank, tag, comm.Isend, comm.Send)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """See `torch.distributed.irecv`, and `send`. Does not block."""
        self._require_rank("recv", "src", rank)
        comm = self.communicator
        return self._message("recv", f"from rank {rank}", tensors, rank, tag, comm.Irecv, comm.Recv)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """See `torch.distributed.irecv` without ``src``. Does not block."""
        comm = self.communicator
        return self._message("recv", "from any rank", tensors, MPI.ANY_SOURCE, tag, comm.Irecv, comm.Recv)

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

    def setGroupDesc(self, description: str) -> None:
        """Take the description of the group. Local."""
        self._group_desc = description

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._group_desc

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
        with self._queue:
            return self._streams.allocate(size, dtype)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Take the ``device_id`` of `torch.distributed.init_process_group`. Local."""
        if device.index != self.communicator.device:
            raise InvalidUsageError(
                f"device_id={device} is not the device {self.communicator.device} of this rank: call "
                f"torch.cuda.set_device({device.index}) on every rank before init_process_group"
            )
        self.bound_device_id = device  # `torch.distributed.split_group` refuses a group without it

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing, because ranks outside all parts of a group take no part in making the parts."""

    def split_group(self, ranks: Sequence[int], timeout: timedelta | None = None, **given: Any) -> ProcessGroup | None:
        """See `torch.distributed.split_group`. Collective over ``ranks`` of this group. Other ranks get None."""
        if self.communicator.rank not in ranks:
            return None
        name = given["group_name"]
        timeout_s = timeout.total_seconds() if timeout else self._timeout_s
        store = dist.PrefixStore(f"{name}/", self._store)
        part = ProcessGroup(store, part_of(self.communicator, ranks, name, store, timeout_s), timeout_s)
        part._set_group_name(name)
        part._set_group_desc(given.get("group_desc") or "")
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
        if self._queue.is_here():
            with self._queue:  # callbacks that the program has added before this one make their calls
                pass
        self._open = False
        limit_s = min(self._timeout_s, _FREE_S)
        # A free during a call would take away the memory that the call uses, and both would wait for the same messages.
        with self._queue.last_turn(limit_s) as ended:
            if not ended:
                logger.warning("a process group is not freed, because a call of it has not ended within %g s", limit_s)
                return
            try:
                self.communicator._free_within(limit_s)
            except MpicommError as error:
                logger.warning("a process group is not freed on all ranks: %s", error)

    def abort(self) -> None:
        """Refuse further calls. Local. Calls in progress end with the timeout of the group.

        The memory of the group is freed with the process, because the other ranks may still use it.
        """
        self._open = False
        self._queue.close(0)
        self.communicator._unfreed = False  # else Python warns that the program has not freed it

    def enqueue(self, call: TensorCall, given: Given) -> None:
        """See `CollectiveCalls.enqueue`."""
        if self._streams is None:
            call.carry_out(*given)
        else:
            self._streams.enqueue(call, given)

    def future(
        self, name: str, call: TensorCall, given: Given, output: torch.Tensor, inputs: Tensors = (), *, beside: bool
    ) -> torch.futures.Future[Any]:
        """Begin ``call`` with the arguments ``given``. Return a future of ``output``. Collective.

        On a GPU the future is complete, and a stream that takes its value waits for the call. With ``beside`` the call
        is enqueued on the stream of the group, after the work of the current stream. Without it the call is enqueued on
        the current stream.
        """
        self._require_open(name)
        self._sequence += 1
        if not output.is_cuda:
            work = self._queue.run(partial(call.carry_out, *given), [output], name, begin=True)
            work.value = output
            return work.get_future()
        streams = self._gpu_streams(name, output)
        return self._queue.call(name, streams.future, call, given, output, (output, *inputs), beside)

    def _bucket(self, tensor: torch.Tensor, opts: Any) -> torch.futures.Future[Any] | None:
        streams, queue = self._streams, self._queue
        if streams is None or not self._open or opts.timeout > FOREVER:
            return None
        queue.take_turn()
        try:
            future = streams.bucket(self.collectives.all_reduce, tensor, opts.reduceOp)
        except WAITS as error:
            raise translated(error, "all_reduce") from error
        finally:
            queue.end_turn()
        if future is not None:
            self._sequence += 1
        return future

    def _run(
        self, name: str, opts: Any, call: TensorCall, given: Given, outputs: Tensors, inputs: Tensors = ()
    ) -> Work | None:
        if not self._open:
            self._require_open(name)
        self._sequence += 1
        begin, limit = getattr(opts, "asyncOp", True), getattr(opts, "timeout", FOREVER)
        if limit <= FOREVER:
            limit = None
        if not (outputs or inputs):
            raise InvalidUsageError(f"{name}: the list of tensors is empty: pass one or more")
        first = outputs[0] if outputs else inputs[0]
        work: Work | None = None
        queue = self._queue
        if first.is_cuda:
            streams = self._streams or self._gpu_streams(name, first)
            queue.take_turn()
            try:
                if begin and limit is None and sys._getframe(1).f_back is None:
                    # Code in C++ without Python below it calls, such as DDP in the thread of autograd. It takes only
                    # the future of a work, or waits for it. PyTorch's own work does both without Python. Code in C++
                    # reads a tensor and a list of tensors alike.
                    value = outputs[0] if len(outputs) == 1 else list(outputs)
                    future = streams.future(call, given, value, (*outputs, *inputs), beside=True)
                    of_cpp: Any = c10d._create_work_from_future(future)
                    return of_cpp  # type: ignore[no-any-return]
                if begin:
                    work = streams.begin(call, given, outputs, inputs, name, limit)
                else:
                    streams.enqueue(call, given)
                    if limit is not None:
                        work = streams.here(outputs, name, limit)
            except WAITS as error:
                raise translated(error, name) from error
            finally:
                queue.end_turn()
        elif begin or limit is not None:
            work = queue.run(partial(call.carry_out, *given), outputs, name, begin=True, limit=limit)
        else:
            queue.call(name, call.carry_out, *given)
        if not begin and work is not None:
            work.wait()
        if self._coalesced and get_ident() in self._coalesced:
            return self._joined(work or ended(outputs))
        return work  # None for a function of PyTorch that would only wait for a work

    def _gpu_streams(self, name: str, tensor: torch.Tensor) -> Streams:
        if self._streams is None:
            raise TensorError(f"{name}: a tensor is on {tensor.device}, but this group has no GPU: pass tensor.cpu()")
        return self._streams

    def _require_rank(self, name: str, argument: str, rank: int) -> None:
        self._require_open(name)
        size = self.communicator.size
        if not 0 <= rank < size:
            raise InvalidUsageError(
                f"{name}: {argument}={rank} is no rank of this group of {size}: use 0 to {size - 1}"
            )

    def _message(
        self,
        name: str,
        other: str,
        tensors: Tensors,
        rank: int,
        tag: int,
        begin: Callable[..., Any],
        call: Callable[..., Any],
    ) -> Work:
        """Begin a message to or from the ``other`` rank. In a capture ``call`` enqueues it."""
        self._require_open(name)
        (tensor,) = tensors
        # Autograd may make the tensor require a gradient while it receives a message.
        memory = movable(flat(tensor.detach(), "tensor"))
        if memory.is_cuda and self._streams is not None and self._streams.capture():
            self._queue.call(name, call, memory, rank, tag)
            return self._joined(ended([tensor]))
        try:
            request = begin(memory, rank, tag)
        except WAITS as error:
            raise translated(error, name) from error
        receives, prepare_thread = name == "recv", self.communicator._prepare_thread
        work = MessageWork(request, tensor, f"{name} {other}", self._timeout_s, prepare_thread, receives=receives)
        if not isinstance(request, DeferredRequest):
            self._messages.add(work, prepare_thread)
        return self._joined(work)

    def _joined(self, work: Work) -> Work:
        works = self._coalesced.get(get_ident())
        if works is not None:
            works.append(work)
        return work

    def _require_open(self, name: str) -> None:
        if not self._open:
            raise InvalidUsageError(f"{name}: the process group was destroyed or aborted; make another")


def _store_of_barrier(store: c10d.Store, number: int) -> c10d.Store:
    return dist.PrefixStore(f"monitored_barrier/{number}/", store)


def _limit(opts: Any) -> timedelta | None:
    """Return the timeout of a single call, or None if it has none."""
    timeout = getattr(opts, "timeout", FOREVER)
    return timeout if timeout > FOREVER else None
