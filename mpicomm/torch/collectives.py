"""The collectives of ``torch.distributed`` as collectives of a Communicator: one row of `ROWS` for each function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from mpi4py import MPI
from torch import Tensor

from mpicomm.api.communicator import Communicator
from mpicomm.api.internals import AnyPlan, PlanCache, mapped_algorithm
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.wire import Wire
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.mpi.descriptors import (
    IN_PLACE,
    NOTHING,
    BlocksDescriptor,
    ListedBlocks,
    split_tensor_descriptor,
    tensor_descriptor,
    tensor_list_descriptor,
)
from mpicomm.torch.tensors import TensorBlocks, direct_op_of, flat, movable, reduction_of

Args = tuple[Any, ...]
"""The arguments of `TensorCall.run`."""
BlockTensors: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""A tensor with a block for each rank, or a list with a tensor for each rank."""


class TensorCall:
    """A call on tensors."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def run(self, *args: Any, **_: Any) -> None:
        """Carry out the call. On tensors of a GPU, enqueue it on PyTorch's current stream."""
        self._function(*args)

    def find_plan(self, plans: PlanCache, args: Args) -> AnyPlan | None:
        """Return the call with these arguments if the cache knows it; else None, also for wrong arguments. Local.

        It reads each tensor once, because a read takes as long as the rest of a known call. A call that it has found is
        enqueued before it looks for the next one. The template of a known call refuses calls with wrong or negative
        counts, and with buffers that overlap.
        """
        return None


class Collective(TensorCall):
    """A collective of one group, as a `TensorCall`. ``run`` is *collective*, and blocks for tensors of the host.

    ``operation`` is the name of MPI's collective; ``output`` and ``input_`` are PyTorch's names of the arguments.
    """

    def __init__(self, comm: Communicator, operation: str, output: str, input_: str) -> None:
        self._comm, self._rank, self._size = comm, comm.rank, comm.size
        self._operation = OPERATIONS[operation]
        self._output_name, self._input_name = output, input_

    def _call(self, memory: torch.Tensor, *args: Any, **more: Any) -> None:
        """Call the Communicator. Host tensors go through mapped memory at every size: MPI's waits have no limit."""
        algorithm = "auto" if memory.is_cuda else mapped_algorithm(self._operation, memory.nbytes)
        getattr(self._comm, self._operation.name)(*args, algorithm=algorithm, **more)

    def _received(self, output: BlockTensors, splits: Sequence[int] | None = None) -> TensorBlocks:
        return TensorBlocks(output, self._output_name, self._size, splits, receive=True)

    def _sent(self, input_: BlockTensors, splits: Sequence[int] | None = None) -> TensorBlocks:
        return TensorBlocks(input_, self._input_name, self._size, splits)


class AllReduce(Collective):
    """Reduces ``tensor`` over all ranks, in place. Elements travel quantized by ``wire``, if it is not None."""

    def run(self, tensor: torch.Tensor, op: Any, name: str, wire: Wire | None) -> None:
        memory = flat(tensor, name)
        reduction = reduction_of(op, memory, name)
        send = MPI.IN_PLACE if reduction.factor is None else reduction.scaled(memory)
        self._call(memory, send, memory, reduction.op, wire_dtype=None if wire is None else wire.dtype)
        reduction.finish(memory, self._size)

    def find_plan(self, plans: PlanCache, args: Args) -> AnyPlan | None:
        tensor, op, name, wire = args
        plain = tensor_descriptor(tensor) if type(tensor) is Tensor else None
        if plain is None:
            return None
        op = direct_op_of(op, tensor, name)
        return None if op is None else plans.find_described(self._operation, "auto", IN_PLACE, plain, op, 0, wire or ())


class ReduceToRoot(Collective):
    """Reduces ``tensor`` over all ranks into the root's ``tensor``."""

    def run(self, tensor: torch.Tensor, op: Any, root: int) -> None:
        memory = flat(tensor, self._output_name)
        reduction = reduction_of(op, memory, self._output_name)
        send = reduction.scaled(memory)
        receive = memory if self._rank == root else None
        self._call(memory, MPI.IN_PLACE if send is receive else send, receive, reduction.op, root)
        if receive is not None:
            reduction.finish(receive, self._size)

    def find_plan(self, plans: PlanCache, args: Args) -> AnyPlan | None:
        tensor, op, root = args
        plain = tensor_descriptor(tensor) if type(tensor) is Tensor else None
        if plain is None:
            return None
        op = direct_op_of(op, tensor, self._output_name)
        sent, received = (IN_PLACE, plain) if self._rank == root else (plain, NOTHING)
        return None if op is None else plans.find_described(self._operation, "auto", sent, received, op, root)


class Broadcast(Collective):
    """Gives the root's ``tensor`` to all ranks."""

    def run(self, tensor: torch.Tensor, root: int) -> None:
        memory = movable(flat(tensor, self._output_name))
        self._call(memory, memory, root)

    def find_plan(self, plans: PlanCache, args: Args) -> AnyPlan | None:
        tensor, root = args
        plain = tensor_descriptor(tensor) if type(tensor) is Tensor else None
        return None if plain is None else plans.find_described(self._operation, "auto", NOTHING, plain, None, root)


class AllGather(Collective):
    """Puts the ``input_`` tensor of each rank into this rank's block of ``output``. Sizes may differ in a list."""

    def run(self, output: BlockTensors, input_: torch.Tensor) -> None:
        whole, own = self._received(output), self._sent(input_)
        whole.require_block(own, self._rank)
        sent: Any = MPI.IN_PLACE
        if own.address() != whole.address(self._rank):
            own.packed(whole)
            sent = own.buffer()
        self._call(whole.memory, sent, whole.buffer())
        whole.unpack()

    def find_plan(self, plans: PlanCache, args: Args) -> AnyPlan | None:
        output, own = args
        block = tensor_descriptor(own) if type(own) is Tensor else None
        if block is None:
            return None
        received: Any
        if type(output) is list and len(output) == self._size:
            received = _listed(output, receive=True)
            if received is None or received[2][0] != block[2] or received[3][self._rank] != block[1]:
                return None
            place = received[4][self._rank]
        else:
            received = tensor_descriptor(output) if type(output) is Tensor else None
            if received is None or received[2] != block[2] or received[1] != self._size * block[1]:
                return None
            place = self._rank * block[1]
        sent = IN_PLACE if block[0] == received[0] + place * block[2][0].itemsize else block
        return plans.find_described(self._operation, "auto", sent, received, None, 0)


class Gather(Collective):
    """As `AllGather`, into the root's ``output``. On other ranks it is None."""

    def run(self, output: BlockTensors | None, input_: torch.Tensor, root: int) -> None:
        own, whole = self._sent(input_), None if output is None else self._received(output)
        if whole is not None:
            whole.require_type_of(own)
        memory = own.packed(whole)
        self._call(memory, own.buffer(), whole and whole.buffer(), root)
        if whole is not None:
            whole.unpack()


class Scatter(Collective):
    """Puts the root's ``input_`` tensor for this rank into ``output``. On other ranks it is None. Sizes may differ."""

    def run(self, output: torch.Tensor, input_: BlockTensors | None, root: int) -> None:
        own = self._received(output)
        if input_ is None:
            self._call(own.memory, None, own.buffer(), root)
        else:
            try:
                whole = self._sent(input_)
                whole.require_type_of(own)
                self._call(whole.packed(own), whole.buffer(), own.buffer(), root)
            except InvalidUsageError:
                # The other ranks would wait for the root until their limit. A call that PyTorch does not have tells
                # them that it makes another one than they.
                with suppress(MpicommError):
                    flag = torch.zeros(1, dtype=torch.uint8, device=own.memory.device)
                    self._comm.Exscan(MPI.IN_PLACE, flag, algorithm="auto" if flag.is_cuda else "one_shot")
                raise
        own.unpack()


class ReduceScatter(Collective):
    """Reduces ``input_`` over all ranks, and puts this rank's block of the result into ``output``."""

    def run(self, output: torch.Tensor, input_: BlockTensors, op: Any) -> None:
        own, whole = self._received(output), self._sent(input_)
        whole.require_block(own, self._rank)
        receive = own.memory
        reduction = reduction_of(op, receive, self._output_name)
        send = reduction.scaled(whole.packed(own, in_order=True))
        counts = () if whole.counts is None else (whole.counts,)
        self._call(send, send, receive, *counts, reduction.op)
        reduction.finish(receive, self._size)
        own.unpack()

    def find_plan(self, plans: PlanCache, args: Args) -> AnyPlan | None:
        output, whole, op = args
        if not type(output) is type(whole) is Tensor:
            return None
        received, sent = tensor_descriptor(output), tensor_descriptor(whole)
        if received is None or sent is None or received[2] != sent[2]:
            return None
        op = direct_op_of(op, output, self._output_name)
        return None if op is None else plans.find_described(self._operation, "auto", sent, received, op, 0)


class AllToAll(Collective):
    """Sends the blocks of ``input_`` to the ranks, and puts their blocks into ``output``. Sizes may differ."""

    def run(
        self, output: BlockTensors, input_: BlockTensors, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        received, sent = self._received(output, output_splits), self._sent(input_, input_splits)
        received.require_type_of(sent)
        memory = sent.packed(received)
        self._call(memory, sent.buffer(), received.buffer())
        received.unpack()

    def find_plan(self, plans: PlanCache, args: Args) -> AnyPlan | None:
        output, whole, output_splits, input_splits = args
        received: BlocksDescriptor | None
        sent: BlocksDescriptor | None
        if type(output) is type(whole) is Tensor:
            received = split_tensor_descriptor(output, output_splits, self._size)
            sent = split_tensor_descriptor(whole, input_splits, self._size)
        elif type(output) is type(whole) is list:
            received, sent = _listed(output, receive=True), _listed(whole)
        else:
            return None
        if received is None or sent is None or received[2] != sent[2]:
            return None
        return plans.find_described(self._operation, "auto", sent, received, None, 0)


def _listed(tensors: list[Any], *, receive: bool = False) -> ListedBlocks | None:
    """As `tensor_list_descriptor`; None for objects of subclasses, which may have no memory of their own."""
    return tensor_list_descriptor(tensors, receive=receive) if {*map(type, tensors)} == {Tensor} else None


ROWS: dict[str, tuple[type[Collective], str, str, str]] = {
    "all_reduce": (AllReduce, "Allreduce", "tensor", ""),
    "reduce": (ReduceToRoot, "Reduce", "tensor", ""),
    "broadcast": (Broadcast, "Bcast", "tensor", ""),
    "all_gather": (AllGather, "Allgatherv", "tensor_list", "tensor"),
    "all_gather_into_tensor": (AllGather, "Allgather", "output_tensor", "input_tensor"),
    "gather": (Gather, "Gatherv", "gather_list", "tensor"),
    "gather_single": (Gather, "Gather", "gather_tensor", "tensor"),
    "scatter": (Scatter, "Scatterv", "tensor", "scatter_list"),
    "reduce_scatter": (ReduceScatter, "Reduce_scatter", "output", "input_list"),
    "reduce_scatter_tensor": (ReduceScatter, "Reduce_scatter_block", "output", "input"),
    "all_to_all": (AllToAll, "Alltoallv", "output_tensor_list", "input_tensor_list"),
    "all_to_all_single": (AllToAll, "Alltoallv", "output", "input"),
}
"""The collective of each function of ``torch.distributed``, and the arguments of `Collective`."""


def collectives_of(comm: Communicator) -> dict[str, Collective]:
    """Return the collectives of a group, by PyTorch's names. Local."""
    return {name: collective(comm, *names) for name, (collective, *names) in ROWS.items()}
