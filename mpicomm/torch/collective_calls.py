"""CollectiveCalls: the methods by which PyTorch calls the collectives of a group, on the host and on streams."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from mpicomm.api.communicator import Communicator
from mpicomm.errors import InvalidUsageError
from mpicomm.torch.call_queue import CallQueue, HostWork
from mpicomm.torch.collectives import Args, TensorCall, collectives_of
from mpicomm.torch.streams import Streams, StreamWork
from mpicomm.torch.tensors import TensorError
from mpicomm.torch.works import NO_TIMEOUT, WAIT_ERRORS, Tensors, Work, as_group_error, completed_work

T = TypeVar("T")


class CollectiveCalls(c10d.ProcessGroup):
    """The collectives of the group of ``comm``, under the names and with the arguments of PyTorch.

    The methods are *collective*. A blocking call on host tensors returns when it is done, and a thread runs an
    asynchronous call. A call on tensors of a GPU is enqueued on the current stream. An asynchronous call is enqueued on
    a stream of the group, after the work of the current stream. A call ends with the timeout of the group. Only a
    barrier has its own timeout. A call that is not asynchronous returns None, because functions of PyTorch would
    only wait for its work.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.communicator = comm
        self.collectives = collectives_of(comm)
        self._all_reduce = self.collectives["all_reduce"]
        self._streams = None if comm.device == "cpu" else Streams(comm)
        self._queue = CallQueue(f"mpicomm rank {comm.rank} of {comm.size}")
        self._coalesced: dict[int, list[Work]] = {}
        """By thread, the works of its calls between `_start_coalescing` and `_end_coalescing`."""
        self._sequence = 0
        self._open = True

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_reduce`. ``DistributedDataParallel.join`` passes a tensor in place of a list."""
        opts = opts or c10d.AllreduceOptions()
        # The class of lists is tested first, because PyTorch's tensors make the other test slow.
        if type(tensors) is not list and isinstance(tensors, Tensor):
            tensors = [tensors]
        (tensor,) = tensors
        # The caller is C++ without a Python frame, such as DDP.
        if self._streams is not None and self._open and sys._getframe().f_back is None:
            future = self._queue.run("all_reduce", self._streams.bucket, self._all_reduce, tensor, opts.reduceOp)
            if future is not None:
                self._sequence += 1
                return c10d._create_work_from_future(future)  # type: ignore[no-any-return]
        return self._run("all_reduce", opts, (tensor, opts.reduceOp, "tensor", None), tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_reduce_coalesced`."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        each = [(tensor, opts.reduceOp, f"tensors[{index}]", None) for index, tensor in enumerate(tensors)]
        return self._run_each("all_reduce", opts, each, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Work | None:
        """See `torch.distributed.reduce`."""
        (tensor,) = tensors
        return self._run("reduce", opts, (tensor, opts.reduceOp, opts.rootRank), tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work | None:
        """See `torch.distributed.broadcast`."""
        (tensor,) = tensors
        return self._run("broadcast", opts, (tensor, opts.rootRank), tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_gather`."""
        (input_,), (output_list,) = inputs, outputs
        return self._run("all_gather", opts, (output_list, input_), output_list, inputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_gather_coalesced`: ``outputs[r][i]`` receives ``inputs[i]`` of rank r."""
        each = ((received, input_) for input_, *received in zip(inputs, *outputs, strict=True))
        work = self._run_each("all_gather", opts, each, [tensor for received in outputs for tensor in received], inputs)
        if work is not None:
            work.future_value = [list(received) for received in outputs]
        return work

    def _allgather_base(self, output: Tensor, input_: Tensor, opts: Any = None) -> Work | None:
        return self._run("all_gather_into_tensor", opts, (output, input_), [output], [input_])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Do the same as `torch.distributed.all_gather_into_tensor`, for several tensors."""
        return self._run_each("all_gather_into_tensor", opts, zip(outputs, inputs, strict=True), outputs, inputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work | None:
        """See `torch.distributed.gather`."""
        (input_,), output_list = inputs, outputs[0] if outputs else None
        return self._run("gather", opts, (output_list, input_, opts.rootRank), output_list or (), inputs)

    def gather_single(self, output: Tensor, input_: Tensor, opts: Any) -> Work | None:
        """See `torch.distributed.gather_single`."""
        root = opts.rootRank
        if self.rank() == root:
            return self._run("gather_single", opts, (output, input_, root), [output], [input_])
        return self._run("gather_single", opts, (None, input_, root), (), [input_])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work | None:
        """See `torch.distributed.scatter`."""
        (output,), input_list = outputs, inputs[0] if inputs else None
        return self._run("scatter", opts, (output, input_list, opts.rootRank), outputs, input_list or ())

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work | None:
        """See `torch.distributed.reduce_scatter`."""
        opts = opts or c10d.ReduceScatterOptions()
        (output,), (input_list,) = outputs, inputs
        return self._run("reduce_scatter", opts, (output, input_list, opts.reduceOp), outputs, input_list)

    def _reduce_scatter_base(self, output: Tensor, input_: Tensor, opts: Any = None) -> Work | None:
        opts = opts or c10d.ReduceScatterOptions()
        return self._run("reduce_scatter_tensor", opts, (output, input_, opts.reduceOp), [output], [input_])

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Do the same as `torch.distributed.reduce_scatter_tensor`, for several tensors."""
        opts = opts or c10d.ReduceScatterOptions()
        each = ((output, input_, opts.reduceOp) for output, input_ in zip(outputs, inputs, strict=True))
        return self._run_each("reduce_scatter_tensor", opts, each, outputs, inputs)

    def alltoall_base(
        self, output: Tensor, input_: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any = None
    ) -> Work | None:
        """See `torch.distributed.all_to_all_single`."""
        args = output, input_, out_splits, in_splits
        return self._run("all_to_all_single", opts, args, [output], [input_])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_to_all`."""
        return self._run("all_to_all", opts, (outputs, inputs, (), ()), outputs, inputs)

    # Later versions of PyTorch call these names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Work:
        """See `torch.distributed.barrier`. On a GPU a rank also waits until its current stream has done its work."""
        self._require_open("barrier")
        is_async, limit = getattr(opts, "asyncOp", False), max(getattr(opts, "timeout", NO_TIMEOUT), NO_TIMEOUT)
        if self._streams is None:
            args = torch.zeros(1, dtype=torch.uint8, device="cpu"), dist.ReduceOp.SUM, "tensor", None
            meet = partial(self._all_reduce.run, *args)
            if not (is_async or limit):
                self._queue.run("barrier", meet)
                return completed_work(())
            work: StreamWork | HostWork = self._queue.submit(meet, (), "barrier")
        else:
            call = TensorCall(partial(self.communicator.Barrier, stream=self._streams.stream))
            work = self._queue.run("barrier", self._streams.start, call, (), (), (), "barrier")
        work.limit = limit
        if not is_async:
            work.wait()
        return work

    def run_in_order(self, name: str, call: Callable[[], T]) -> T:
        """Return ``call()``, a call of the group's Communicator, after the earlier calls of the group."""
        self._require_open(name)
        return self._queue.run(name, call)

    def enqueue(self, call: TensorCall, args: Args) -> None:
        """Run a call, or enqueue it on the current stream, within another call of the group."""
        if self._streams is None:
            call.run(*args)
        else:
            self._streams.enqueue(call, args)

    def future(
        self, name: str, call: TensorCall, args: Args, output: Tensor, inputs: Tensors = (), *, overlap: bool
    ) -> torch.futures.Future[Any]:
        """Start ``call`` with ``args``. Return a future of ``output``. Collective.

        On a GPU the future is complete, and a stream that takes its value waits for the call. The call is enqueued on
        the current stream, or with ``overlap`` on the stream of the group, after the work of the current stream.
        """
        self._require_open(name)
        self._sequence += 1
        if not output.is_cuda:
            work = self._queue.submit(partial(call.run, *args), [output], name)
            work.future_value = output
            return work.get_future()
        streams = self._gpu_streams(name, output)
        return self._queue.run(name, streams.future, call, args, output, (output, *inputs), overlap)

    def _run(
        self, name: str, opts: Any, args: Args, outputs: Tensors, inputs: Tensors = (), call: TensorCall | None = None
    ) -> Work | None:
        """Run or start the collective ``name``, or ``call``. It writes ``outputs`` and reads ``inputs``."""
        if not self._open:
            self._require_open(name)
        self._sequence += 1
        is_async = getattr(opts, "asyncOp", True)
        if not (outputs or inputs):
            raise InvalidUsageError(f"{name}: the list of tensors is empty: pass one or more")
        if call is None:
            call = self.collectives[name]
        first = outputs[0] if outputs else inputs[0]
        work: Work | None = None
        queue = self._queue
        if first.is_cuda:
            streams = self._streams or self._gpu_streams(name, first)
            queue.acquire()
            try:
                if is_async and sys._getframe(1).f_back is None:
                    # The caller is C++ without a Python frame, such as DDP in the thread of autograd. It only takes the
                    # future of the work, or waits for it. PyTorch's own work does both without Python. C++ accepts a
                    # tensor in place of a list of one.
                    value = outputs[0] if len(outputs) == 1 else list(outputs)
                    future = streams.future(call, args, value, (*outputs, *inputs), overlap=True)
                    return c10d._create_work_from_future(future)  # type: ignore[no-any-return]
                if is_async:
                    work = streams.start(call, args, outputs, inputs, name)
                else:
                    streams.enqueue(call, args)
            except WAIT_ERRORS as error:
                raise as_group_error(error, name) from error
            finally:
                queue.release()
        elif is_async:
            work = queue.submit(partial(call.run, *args), outputs, name)
        else:
            queue.run(name, call.run, *args)
        if self._coalesced and get_ident() in self._coalesced:
            return self._joined(work or completed_work(outputs))
        return work

    def _run_each(
        self, name: str, opts: Any, each: Iterable[Args], outputs: Tensors, inputs: Tensors = ()
    ) -> Work | None:
        """As `_run`, for several calls of the collective ``name`` as one."""

        def calls() -> None:
            for args in each:
                self.enqueue(self.collectives[name], args)

        return self._run(f"{name}_coalesced", opts, (), outputs, inputs, TensorCall(calls))

    def _gpu_streams(self, name: str, tensor: Tensor) -> Streams:
        if self._streams is None:
            raise TensorError(f"{name}: a tensor is on {tensor.device}, but this group has no GPU: pass tensor.cpu()")
        return self._streams

    def _joined(self, work: Work) -> Work:
        works = self._coalesced.get(get_ident())
        if works is not None:
            works.append(work)
        return work

    def _require_open(self, name: str) -> None:
        if not self._open:
            raise InvalidUsageError(f"{name}: the process group was destroyed or aborted; make another")
