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
    """The storage of the last tensor in this block."""
    follow: Callable[[int], object] | None = None
    """Lets a stream wait for the last call that uses the block on another stream; None without such a call."""


class SymmetricPool:
    """Memory for tensors of the same size on all ranks. The pool reuses it when PyTorch frees the tensor.

    As in PyTorch's own allocator, freed memory goes only to a tensor of the same stream, because its work follows the
    work on the old tensor. ``comm.Free`` frees the memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._blocks: dict[tuple[int, int], list[_Block]] = {}
        self._by_address: dict[int, _Block] = {}
        self.is_in_use = False
        """Whether there may be tensors in memory of the pool."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, stream: int | None = None) -> torch.Tensor:
        """Return a tensor of undefined contents for work on ``stream``, an address. On the host ``stream`` is None.

        Collective if no memory of the size is free, else local. All ranks ask for the same sizes and drop their tensors
        at the same places in the program. Otherwise one rank needs new memory, waits for the other ranks in vain, and
        raises `CollectiveTimeoutError`.
        """
        nbytes = max(math.prod(shape), 1) * dtype.itemsize
        blocks = self._blocks.setdefault((nbytes, stream or 0), [])
        block = next((each for each in blocks if each.user.expired()), None)
        array = self._comm.empty(nbytes, "uint8") if block is None else block.array
        # With -1 no stream waits for another stream, because there is no work on the memory of the array yet.
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
        """Remember that a call uses ``tensors`` on another stream than the stream of their memory. Local.

        ``follow`` lets a stream wait for the call, because the program may drop the tensors before its end. PyTorch's
        `record_stream` keeps only PyTorch's own memory.
        """
        for tensor in tensors:
            block = self._by_address.get(tensor.untyped_storage().data_ptr())
            if block is not None:
                block.follow = follow
