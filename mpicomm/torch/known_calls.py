"""KnownCalls: a fast way for calls on plain tensors of a GPU that were made before, or have a known form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.wire import Wire
from mpicomm.mpi.plain_arrays import ReadArray, plain_tensor


class KnownCalls:
    """Looks up calls of ``comm`` by tensors that are read once, because a read takes as long as the rest of a call.

    The methods of the Communicator read arguments of any kind. They take all calls that `enqueue` does not know.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def enqueue(
        self,
        operation: Operation,
        send: Any,
        receive: ReadArray,
        tensor: torch.Tensor,
        op: Any = None,
        root: int = 0,
        wire: Wire | None = None,
    ) -> bool:
        """Enqueue a known call on the current stream of PyTorch for ``tensor``. Return whether the call is known.

        ``send`` and ``receive`` are results of `read`, or ``MPI.IN_PLACE`` or None.
        """
        # A communicator with methods that record calls has another class. A freed communicator has another class, too.
        if type(self._comm) is not Communicator:
            return False
        gpu = self._comm._collectives.engines.gpu
        known = gpu and gpu.find(operation, "auto", send, receive, op, root, None, wire or ())
        if not gpu or not known:
            return False
        gpu.run(known, None, tensor, tensor)
        return True


def read(tensor: torch.Tensor) -> ReadArray | None:
    """Return a plain tensor of a GPU as `KnownCalls` takes it, or None for every other tensor. Local."""
    plain = plain_tensor(tensor) if type(tensor) is torch.Tensor else None
    return None if plain is None else ReadArray(plain)


def are_blocks(whole: ReadArray, block: ReadArray, size: int) -> bool:
    """Return whether ``whole`` has ``size`` times the elements of ``block``, with its type and device. Local."""
    return bool(whole[1] == size * block[1] and whole[2] == block[2])


def in_blocks(tensor: ReadArray, counts: Sequence[int]) -> ReadArray:
    """Return a tensor in blocks with these numbers of elements, one after the other. Local."""
    return ReadArray((tensor[0], tensor[1], (tensor[2], None), tuple(counts), None))


def sent_of(send: ReadArray, receive: ReadArray, place: int | None = None) -> Any:
    """Return ``send`` as MPI takes it beside ``receive`` of the same type, or None if they overlap. Local.

    Data at element ``place`` of ``receive`` becomes MPI.IN_PLACE.
    """
    begins, received, itemsize = send[0], receive[0], send[2][0].itemsize
    if place is not None and begins == received + place * itemsize:
        return MPI.IN_PLACE
    overlap = begins < received + receive[1] * itemsize and received < begins + send[1] * itemsize
    return None if overlap else send
