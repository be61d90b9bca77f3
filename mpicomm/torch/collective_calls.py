"""CollectiveCalls: the methods by which PyTorch calls the collectives of a group."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from mpicomm.torch.collectives import TensorCalls
from mpicomm.torch.known_calls import Given, TensorCall
from mpicomm.torch.works import Tensors, Work


class CollectiveCalls(c10d.ProcessGroup):
    """The collectives of a group, under the names and with the arguments of PyTorch. All methods are *collective*."""

    collectives: TensorCalls

    @abstractmethod
    def enqueue(self, call: TensorCall, given: Given) -> None:
        """Carry out a call, or enqueue it on the current stream. The caller has the turn of the call."""

    @abstractmethod
    def _run(
        self, name: str, opts: Any, call: TensorCall, given: Given, outputs: Tensors, inputs: Tensors = ()
    ) -> Work | None:
        """Carry out or begin a call, as ``opts`` say. It writes ``outputs`` and reads ``inputs``.

        It returns no work if the options say that the call is not asynchronous, which functions of PyTorch say.
        """

    @abstractmethod
    def _bucket(self, tensor: torch.Tensor, opts: Any) -> torch.futures.Future[Any] | None:
        """Begin an all-reduce that code in C++ calls, if its form is known: see `Streams.bucket`; else return None."""

    def _run_each(
        self, name: str, opts: Any, call: TensorCall, each: Iterable[Given], outputs: Tensors, inputs: Tensors = ()
    ) -> Work | None:
        """As `_run`, for several calls as one."""

        def calls() -> None:
            for given in each:
                self.enqueue(call, given)

        return self._run(name, opts, TensorCall(calls), (), outputs, inputs)

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_reduce`. ``DistributedDataParallel.join`` passes a tensor in place of a list."""
        opts = opts or c10d.AllreduceOptions()
        # The class of lists is tested first, because PyTorch's tensors make the other test slow.
        if type(tensors) is not list and isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        (tensor,) = tensors
        if sys._getframe().f_back is None:  # code in C++ without Python below it calls, such as DDP
            future = self._bucket(tensor, opts)
            if future is not None:
                of_cpp: Any = c10d._create_work_from_future(future)
                return of_cpp  # type: ignore[no-any-return]
        given = tensor, opts.reduceOp, "tensor", None
        return self._run("all_reduce", opts, self.collectives.all_reduce, given, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_reduce_coalesced`."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        each = [(tensor, opts.reduceOp, f"tensors[{index}]", None) for index, tensor in enumerate(tensors)]
        return self._run_each("all_reduce_coalesced", opts, self.collectives.all_reduce, each, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Work | None:
        """See `torch.distributed.reduce`."""
        (tensor,) = tensors
        return self._run("reduce", opts, self.collectives.reduce, (tensor, opts.reduceOp, opts.rootRank), tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work | None:
        """See `torch.distributed.broadcast`."""
        (tensor,) = tensors
        return self._run("broadcast", opts, self.collectives.broadcast, (tensor, opts.rootRank), tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_gather`."""
        (given,), (received,) = inputs, outputs
        return self._run("all_gather", opts, self.collectives.all_gather_list, (received, given), received, inputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_gather_coalesced`: ``outputs[r][i]`` receives ``inputs[i]`` of rank r."""
        each = ((received, given) for given, *received in zip(inputs, *outputs, strict=True))
        flattened = [tensor for received in outputs for tensor in received]
        call = self.collectives.all_gather_list
        work = self._run_each("all_gather_coalesced", opts, call, each, flattened, inputs)
        if work is not None:
            work.value = [list(received) for received in outputs]
        return work

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_gather_into_tensor`."""
        call = self.collectives.all_gather
        return self._run("all_gather_into_tensor", opts, call, (output, given), [output], [given])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Do the same as `torch.distributed.all_gather_into_tensor`, for several tensors."""
        call, each = self.collectives.all_gather, zip(outputs, inputs, strict=True)
        return self._run_each("all_gather_into_tensor_coalesced", opts, call, each, outputs, inputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work | None:
        """See `torch.distributed.gather`."""
        (given,), received = inputs, outputs[0] if outputs else None
        call = self.collectives.gather
        return self._run("gather", opts, call, (received, given, opts.rootRank), received or (), inputs)

    def gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Work | None:
        """See `torch.distributed.gather_single`."""
        root = opts.rootRank
        outputs = [output] if self.rank() == root else ()
        return self._run("gather_single", opts, self.collectives.gather_into, (output, given, root), outputs, [given])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work | None:
        """See `torch.distributed.scatter`."""
        (output,), given = outputs, inputs[0] if inputs else None
        call = self.collectives.scatter
        return self._run("scatter", opts, call, (output, given, opts.rootRank), outputs, given or ())

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work | None:
        """See `torch.distributed.reduce_scatter`."""
        opts = opts or c10d.ReduceScatterOptions()
        (output,), (given,) = outputs, inputs
        call = self.collectives.reduce_scatter_list
        return self._run("reduce_scatter", opts, call, (output, given, opts.reduceOp), outputs, given)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work | None:
        """See `torch.distributed.reduce_scatter_tensor`."""
        opts = opts or c10d.ReduceScatterOptions()
        call = self.collectives.reduce_scatter
        return self._run("reduce_scatter_tensor", opts, call, (output, given, opts.reduceOp), [output], [given])

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Do the same as `torch.distributed.reduce_scatter_tensor`, for several tensors."""
        opts = opts or c10d.ReduceScatterOptions()
        call = self.collectives.reduce_scatter
        each = ((output, given, opts.reduceOp) for output, given in zip(outputs, inputs, strict=True))
        return self._run_each("reduce_scatter_tensor_coalesced", opts, call, each, outputs, inputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work | None:
        """See `torch.distributed.all_to_all_single`."""
        arguments = output, given, output_splits, input_splits
        return self._run("all_to_all_single", opts, self.collectives.all_to_all, arguments, [output], [given])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_to_all`."""
        return self._run("all_to_all", opts, self.collectives.all_to_all_list, (outputs, inputs), outputs, inputs)

    # Later versions of PyTorch call these names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base
