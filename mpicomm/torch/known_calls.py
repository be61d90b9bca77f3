"""KnownCalls: the way of calls on plain tensors of a GPU that were made before, or whose form is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.collectives.operations import Operation
from mpicomm.mpi.plain_arrays import ReadArray, plain_tensor


class KnownCalls:
    """Looks calls of ``comm`` up by tensors that are read once, because reading takes as long as all else of a call.

    The methods of the Communicator read arguments of any kind. They take all calls that `enqueue` does not know.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def enqueue(
        self, operation: Operation, send: Any, receive: ReadArray, tensor: torch.Tensor, op: Any = None, root: int = 0
    ) -> bool:
        """Enqueue a call on the current stream of PyTorch for ``tensor``, if it is known; return whether it is.

        ``send`` and ``receive`` are tensors of `read`, or ``MPI.IN_PLACE`` or None.
        """
        # A communicator whose methods record calls has another class, and so has one that was freed.
        if type(self._comm) is not Communicator:
            return False
        gpu = self._comm._collectives.engines.gpu
        known = gpu and gpu.find(operation, "auto", send, receive, op, root, None)
        if not gpu or not known:
            return False
        gpu.run(known, None, tensor, tensor)
        return True


def read(tensor: torch.Tensor) -> ReadArray | None:
    """Return a plain tensor of a GPU as `KnownCalls` takes it, None for every other tensor. Local."""
    plain = plain_tensor(tensor) if type(tensor) is torch.Tensor else None
    return None if plain is None else ReadArray(plain)


def are_blocks(whole: ReadArray, block: ReadArray, size: int) -> bool:
    """Return whether ``whole`` has ``size`` times the elements of ``block``, of its type, on its device. Local."""
    return bool(whole[1] == size * block[1] and whole[2] == block[2])


def in_blocks(tensor: ReadArray, counts: Sequence[int]) -> ReadArray:
    """Return a tensor in blocks of these numbers of elements, one after the other. Local."""
    return ReadArray((tensor[0], tensor[1], (tensor[2], None), tuple(counts), None))


def sent_of(send: ReadArray, receive: ReadArray, place: int | None = None) -> Any:
    """Return ``send`` as MPI takes it beside ``receive`` of its type, None where they overlap. Local.

    Data that is in its ``place`` in ``receive``, which counts elements, is MPI.IN_PLACE.
    """
    begins, received, itemsize = send[0], receive[0], send[2][0].itemsize
    if place is not None and begins == received + place * itemsize:
        return MPI.IN_PLACE
    overlap = begins < received + receive[1] * itemsize and received < begins + send[1] * itemsize
    return None if overlap else send
