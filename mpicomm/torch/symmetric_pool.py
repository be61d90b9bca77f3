"""SymmetricPool: tensors in symmetric memory, which collectives fill without a copy from staging memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mpicomm.api.communicator import Communicator
from mpicomm.symmetric.array import SymmetricArray


@dataclass
class _Block:
    array: SymmetricArray
    user: StorageWeakRef
    """The storage of the tensor that was made of it last."""
    follow: Callable[[int], object] | None = None
    """Lets a stream wait for the last call that uses it on another stream than its own; None without such a call."""


class SymmetricPool:
    """Memory for tensors of the same size on all ranks, which is given out again when PyTorch frees the tensor.

    As in PyTorch's own allocator, memory that a tensor has left goes to a tensor of the same stream alone, because work
    of that stream is ordered after the work on the old tensor. ``comm.Free`` frees the memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._blocks: dict[tuple[int, int], list[_Block]] = {}
        self._by_address: dict[int, _Block] = {}
        self.is_in_use = False
        """Whether there may be tensors in memory of the pool."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, stream: int | None = None) -> torch.Tensor:
        """Return a tensor of undefined contents for work on ``stream``, an address; None on the host.

        Collective where no memory of the size is free, else local. All ranks ask for the same sizes and drop their
        tensors at the same places in the program, because a rank alone that needs new memory would wait for the others
        in vain: it raises `CollectiveTimeoutError` then.
        """
        nbytes = max(math.prod(shape), 1) * dtype.itemsize
        blocks = self._blocks.setdefault((nbytes, stream or 0), [])
        block = next((each for each in blocks if each.user.expired()), None)
        array = self._comm.empty(nbytes, "uint8") if block is None else block.array
        # -1: no stream waits for another one, as there is no work on the memory of the array yet.
        memory = torch.from_dlpack(array if stream is None else array.__dlpack__(stream=-1))
        user = StorageWeakRef(memory.untyped_storage())
        if block is None:
            block = self._by_address[memory.data_ptr()] = _Block(array, user)
            self.is_in_use = True
            blocks.append(block)
        block.user = user
        if stream is not None and block.follow is not None:
            block.follow(stream)
            block.follow = None
        return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def used(self, tensors: Sequence[torch.Tensor], follow: Callable[[int], object]) -> None:
        """Remember that a call uses ``tensors`` on another stream than theirs. Local.

        ``follow`` lets a stream wait for the call. The program may drop the tensors before. PyTorch's `record_stream`
        keeps PyTorch's own memory alone.
        """
        for tensor in tensors:
            block = self._by_address.get(tensor.untyped_storage().data_ptr())
            if block is not None:
                block.follow = follow
