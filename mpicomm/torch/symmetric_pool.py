"""SymmetricPool: tensors in symmetric memory, which collectives fill without a copy from staging memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class SymmetricPool:
    """Memory for tensors of the same size on all ranks, which is given out again when PyTorch frees the tensor.

    As in PyTorch's own allocator, memory that a tensor has left goes to a tensor of the same stream alone, because work
    of that stream is ordered after the work on the old tensor. ``comm.Free`` frees the memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._blocks: dict[tuple[int, int], list[_Block]] = {}

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, stream: int = 0) -> torch.Tensor:
        """Return a tensor of undefined contents for work on ``stream``.

        Collective where no memory of the size is free, else local. All ranks ask for the same sizes and drop their
        tensors at the same places in the program, because a rank alone that needs new memory would wait for the others
        in vain: it raises `CollectiveTimeoutError` then.
        """
        nbytes = max(math.prod(shape), 1) * dtype.itemsize
        blocks = self._blocks.setdefault((nbytes, stream), [])
        block = next((each for each in blocks if each.user.expired()), None)
        array = self._comm.empty(nbytes, "uint8") if block is None else block.array
        memory = torch.from_dlpack(array)
        user = StorageWeakRef(memory.untyped_storage())
        if block is None:
            blocks.append(_Block(array, user))
        else:
            block.user = user
        return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
