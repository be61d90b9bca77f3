"""The collectives of ``torch.distributed`` as collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.collectives.host.selection import best_mapped
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.wire import Wire
from mpicomm.errors import InvalidUsageError
from mpicomm.torch.failures import ElementTypeError, TensorError
from mpicomm.torch.known_calls import KnownCalls, TensorCall, unknown
from mpicomm.torch.reductions import reduction_of
from mpicomm.torch.tensors import (
    Pieces,
    apart,
    flat,
    movable,
    put_back,
    split_counts,
)


class TensorCollectives:
    """The collectives of one group on tensors. All of them are *collective*.

    A call on tensors of the host blocks until its output is there. A call on tensors of a GPU is enqueued on PyTorch's
    current stream. Calls on host tensors go through mapped memory at every size, because MPI's waits have no limit.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size

    def all_reduce(self, tensor: torch.Tensor, op: Any, name: str, wire: Wire | None) -> None:
        """Reduce ``tensor`` over all ranks, in place. Elements travel as codes of ``wire``, if it is not None."""
        memory = flat(tensor, name)
        reduction = reduction_of(op, memory, name)
        send = MPI.IN_PLACE if reduction.factor is None else reduction.given(memory)
        way, codes = self._way("Allreduce", memory), None if wire is None else wire.codes
        self._comm.Allreduce(send, memory, reduction.op, algorithm=way, wire_dtype=codes)
        if reduction.averages_whole:
            reduction.finish(memory, self._size)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> None:
        """Reduce ``tensor`` over all ranks into the root's ``tensor``."""
        memory = flat(tensor, "tensor")
        reduction = reduction_of(op, memory, "tensor")
        given = reduction.given(memory)
        send = MPI.IN_PLACE if given is memory and self._rank == root else given
        receive = memory if self._rank == root else None
        self._comm.Reduce(send, receive, reduction.op, root, algorithm=self._way("Reduce", memory))
        if receive is not None:
            reduction.finish(receive, self._size)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Give the root's ``tensor`` to all ranks."""
        memory = movable(flat(tensor, "tensor"))
        self._comm.Bcast(memory, root, algorithm=self._way("Bcast", memory))

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> None:
        """Put the ``given`` tensors of all ranks one after the other into ``output``."""
        receive, send = flat(output, "output_tensor", ordered=True), flat(given, "input_tensor", ordered=True)
        self._require_blocks(receive, send, "output_tensor", "input_tensor")
        sent = apart(send, receive, self._rank * send.numel())
        sent = sent if sent is MPI.IN_PLACE else movable(sent)
        self._comm.Allgather(sent, movable(receive), algorithm=self._way("Allgather", receive))
        put_back(receive, output)

    def all_gather_list(self, outputs: Sequence[torch.Tensor], given: torch.Tensor) -> None:
        """Put each rank's ``given`` tensor into the output with the rank's number. Sizes may differ."""
        pieces = self._pieces(outputs, "tensor_list")
        send = flat(given, "tensor", ordered=True)
        self._require_size(send, pieces.counts[self._rank], f"tensor_list[{self._rank}]", "tensor")
        self._require_type(send, pieces.memory, "tensor", "tensor_list")
        receive = _of_counts(pieces.memory, pieces.counts)
        sent = apart(send, pieces.memory, sum(pieces.counts[: self._rank]))
        sent = sent if sent is MPI.IN_PLACE else movable(sent)
        self._comm.Allgatherv(sent, receive, algorithm=self._way("Allgatherv", pieces.memory))
        pieces.scatter()

    def gather(self, outputs: Sequence[torch.Tensor] | None, given: torch.Tensor, root: int) -> None:
        """Put each rank's ``given`` tensor into the root's output with the rank's number. Sizes may differ."""
        send = flat(given, "tensor", ordered=True)
        if outputs is None:
            self._comm.Gatherv(movable(send), None, root, algorithm=self._way("Gatherv", send))
            return
        pieces = self._pieces(outputs, "gather_list")
        self._require_type(send, pieces.memory, "tensor", "gather_list")
        receive = _of_counts(pieces.memory, pieces.counts)
        self._comm.Gatherv(movable(apart(send, pieces.memory)), receive, root, algorithm=self._way("Gatherv", send))
        pieces.scatter()

    def gather_into(self, output: torch.Tensor, given: torch.Tensor, root: int) -> None:
        """Put the ``given`` tensors of all ranks one after the other into the root's ``output``."""
        send, receive = flat(given, "tensor", ordered=True), None
        if self._rank == root:
            receive = flat(output, "gather_tensor", ordered=True)
            self._require_blocks(receive, send, "gather_tensor", "tensor")
            send = apart(send, receive)
        sent, received = movable(send), None if receive is None else movable(receive)
        self._comm.Gather(sent, received, root, algorithm=self._way("Gather", sent))
        if receive is not None:
            put_back(receive, output)

    def scatter(self, output: torch.Tensor, given: Sequence[torch.Tensor] | None, root: int) -> None:
        """Put the root's given tensor with this rank's number into ``output``. Sizes may differ."""
        receive, send = flat(output, "tensor", ordered=True), None
        if given is not None:
            pieces = self._pieces(given, "scatter_list")
            self._require_type(receive, pieces.memory, "tensor", "scatter_list")
            send = _of_counts(apart(pieces.gather(), receive), pieces.counts)
        self._comm.Scatterv(send, movable(receive), root, algorithm=self._way("Scatterv", receive))
        put_back(receive, output)

    def reduce_scatter(self, output: torch.Tensor, given: torch.Tensor, op: Any) -> None:
        """Reduce ``given`` over all ranks, and put this rank's block of the result into ``output``."""
        receive, send = flat(output, "output", ordered=True), flat(given, "input", ordered=True)
        self._require_blocks(send, receive, "input", "output")
        reduction = reduction_of(op, receive, "output")
        if reduction.factor is not None:
            send = reduction.given(send)
        send = apart(send, receive)
        way = self._way("Reduce_scatter_block", send)
        self._comm.Reduce_scatter_block(send, receive, reduction.op, algorithm=way)
        if reduction.averages_whole:
            reduction.finish(receive, self._size)
        put_back(receive, output)

    def reduce_scatter_list(self, output: torch.Tensor, given: Sequence[torch.Tensor], op: Any) -> None:
        """Reduce the given tensors over all ranks, and put the tensor with this rank's number into ``output``."""
        pieces = self._pieces(given, "input_list")
        receive = flat(output, "output", ordered=True)
        reduction = reduction_of(op, receive, "output")
        self._require_size(receive, pieces.counts[self._rank], f"input_list[{self._rank}]", "output")
        self._require_type(receive, pieces.memory, "output", "input_list")
        send = apart(reduction.given(pieces.gather()), receive)
        way = self._way("Reduce_scatter", send)
        self._comm.Reduce_scatter(send, receive, pieces.counts, reduction.op, algorithm=way)
        reduction.finish(receive, self._size)
        put_back(receive, output)

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> None:
        """Send the parts of ``given`` to the ranks, and put their parts one after the other into ``output``.

        Splits count rows, which are the elements along the first dimension. Without them all parts are equal.
        """
        receive, send = flat(output, "output", ordered=True), flat(given, "input", ordered=True)
        self._require_type(receive, send, "output", "input")
        receive_counts = split_counts(output, output_splits, self._size, "output")
        send_counts = split_counts(given, input_splits, self._size, "input")
        self._alltoallv(receive, receive_counts, send, send_counts, "{}_split_sizes")
        put_back(receive, output)

    def all_to_all_list(self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Send each given tensor to the rank with its number, and receive the outputs in the same way."""
        received, sent = self._pieces(outputs, "output_tensor_list"), self._pieces(given, "input_tensor_list")
        self._require_type(received.memory, sent.memory, "output_tensor_list", "input_tensor_list")
        self._alltoallv(received.memory, received.counts, sent.gather(), sent.counts, "{}_tensor_list")
        received.scatter()

    def barrier(self) -> None:
        """Wait until all ranks have come here. It serves groups on the host."""
        self.all_reduce(torch.zeros(1, dtype=torch.uint8, device="cpu"), torch.distributed.ReduceOp.SUM, "tensor", None)

    def _alltoallv(
        self,
        receive: torch.Tensor,
        receive_counts: list[int],
        send: torch.Tensor,
        send_counts: list[int],
        argument: str,
    ) -> None:
        """Exchange parts. ``argument`` names the two arguments with the counts; {} stands for input and output."""
        rank = self._rank
        if receive_counts[rank] != send_counts[rank]:
            raise TensorError(
                f"{argument.format('output')}[{rank}] stands for {receive_counts[rank]} elements, but "
                f"{argument.format('input')}[{rank}] for {send_counts[rank]}: rank {rank} sends itself as many as it "
                "receives from itself, so both must agree"
            )
        sent, received = _of_counts(apart(send, receive), send_counts), _of_counts(receive, receive_counts)
        self._comm.Alltoallv(sent, received, algorithm=self._way("Alltoallv", receive))

    def _way(self, name: str, memory: torch.Tensor) -> str:
        return "auto" if memory.is_cuda else best_mapped(OPERATIONS[name], memory.nbytes)

    def _pieces(self, tensors: Sequence[torch.Tensor], name: str) -> Pieces:
        if len(tensors) != self._size:
            raise InvalidUsageError(f"{name} has {len(tensors)} tensors for {self._size} ranks: pass one for each")
        return Pieces(tensors, name)

    def _require_blocks(self, whole: torch.Tensor, block: torch.Tensor, name: str, block_name: str) -> None:
        if whole.dtype is not block.dtype or whole.get_device() != block.get_device():
            self._require_type(whole, block, name, block_name)
        if whole.numel() != block.numel() * self._size:
            raise InvalidUsageError(
                f"{name} has {whole.numel()} elements and {block_name} {block.numel()}: for {self._size} ranks "
                f"{name} needs {block.numel() * self._size}"
            )

    def _require_size(self, memory: torch.Tensor, count: int, other: str, name: str) -> None:
        if memory.numel() != count:
            raise InvalidUsageError(f"{name} has {memory.numel()} elements, but {other} has {count}: they must agree")

    def _require_type(self, one: torch.Tensor, other: torch.Tensor, name: str, other_name: str) -> None:
        if one.dtype != other.dtype or one.device != other.device:
            raise ElementTypeError(
                f"{name} has {one.dtype} on {one.device}, but {other_name} has {other.dtype} on {other.device}: they "
                "must agree"
            )


class TensorCalls:
    """The collectives of one group as calls: see `TensorCollectives`."""

    def __init__(self, comm: Communicator) -> None:
        any_call = TensorCollectives(comm)
        # A communicator that records calls makes all of them by its methods.
        known = None if comm._session.channel else KnownCalls(comm.rank, comm.size)

        def call(name: str) -> TensorCall:
            return TensorCall(getattr(any_call, name), getattr(known, name, unknown))

        self.all_reduce = call("all_reduce")
        self.reduce = call("reduce")
        self.broadcast = call("broadcast")
        self.all_gather = call("all_gather")
        self.all_gather_list = call("all_gather_list")
        self.gather = call("gather")
        self.gather_into = call("gather_into")
        self.scatter = call("scatter")
        self.reduce_scatter = call("reduce_scatter")
        self.reduce_scatter_list = call("reduce_scatter_list")
        self.all_to_all = call("all_to_all")
        self.all_to_all_list = call("all_to_all_list")
        self.barrier = call("barrier")


def _of_counts(memory: torch.Tensor, counts: list[int]) -> list[Any]:
    """Return ``memory`` in mpi4py's form for blocks of these numbers of elements, one after the other."""
    moved = movable(memory)
    if moved.dtype != memory.dtype:
        counts = [count * memory.element_size() for count in counts]
    return [moved, counts]
