"""Arrays of calls that vary: each call has a place in two pools, its data, and the result that it must leave there.

All calls may be in flight before the first comparison. Then each byte of both pools is compared. This finds a call that
reads, writes or counts something that another call left in a template, because no two places have the same data, and
poison lies between the places.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mpicomm.bench.compare import draw
from mpicomm.bench.operations import REDUCED, BenchOperation, Case, CaseBuffers, blocks_of, buffers, expected

FLOAT = np.dtype(np.float32)
_POISON = 0xA5
_STEP_NBYTES = 512
Bytes = npt.NDArray[np.uint8]


class Pools:
    """The cases of ``calls`` calls of up to ``nbytes``, alike on all ranks, and the memory of this rank for them."""

    def __init__(self, operation: BenchOperation, place: str, nbytes: int, calls: int, rank: int, size: int) -> None:
        (block,) = blocks_of(operation, [nbytes], FLOAT, size)
        case = Case(operation, FLOAT, "sum", block, False, rank, size).at(place)
        variations = draw(block, calls)
        if len(variations) < calls:
            raise ValueError(f"nbytes={nbytes} has {len(variations)} variations: take more bytes for {calls} calls")
        self.cases = [Case(operation, FLOAT, "sum", each, False, rank, size).at(place) for each, _ in variations]
        stride = (case.nbytes // _STEP_NBYTES + 2) * _STEP_NBYTES
        self._starts = (np.random.default_rng(48).permutation(calls) * stride).tolist()
        self._data = [_numbers(peer, calls * stride // FLOAT.itemsize) for peer in range(size)]
        self._reduced = np.asarray(np.sum(self._data, axis=0, dtype=FLOAT))
        self._initial = self._with_inputs(calls * stride)

    @property
    def repeatable(self) -> bool:
        """Whether a call that is made again leaves the same."""
        return not (self.cases[0].operation.reduces and self.cases[0].in_place)

    def put(self, device: torch.device) -> None:
        """Move the pools to a device."""
        self._pools = [torch.from_numpy(pool.copy()).to(device) for pool in self._initial]
        self._arrays = [_as_array(pool) for pool in self._pools]

    def reset(self) -> None:
        """Write the data of all calls, and poison everything else."""
        for pool, initial in zip(self._pools, self._initial, strict=True):
            pool.copy_(torch.from_numpy(initial))

    def tensors(self, call: int) -> CaseBuffers:
        """Return the buffers of a call as tensors of float32."""
        place = self._place(call, self._pools)
        return CaseBuffers(
            *(None if part is None else part.view(torch.float32) for part in (place.send, place.receive))
        )

    def arrays(self, call: int) -> CaseBuffers:
        """Return the buffers of a call as bytes in CuPy or NumPy arrays."""
        return self._place(call, self._arrays)

    def count_wrong(self, called: Iterable[int]) -> int:
        """Return how many bytes of this rank differ from the bytes that exactly these calls leave."""
        wanted = [pool.copy() for pool in self._initial]
        for call in called:
            self._leave(call, wanted)
        found = [pool.cpu().numpy() for pool in self._pools]
        return sum(int(np.count_nonzero(one != other)) for one, other in zip(found, wanted, strict=True))

    def _place(self, call: int, pools: list[Any]) -> CaseBuffers:
        first, second = (pool[self._starts[call] :] for pool in pools)
        return buffers(self.cases[call], first, second, result_at_front=True)

    def _with_inputs(self, nbytes: int) -> list[Bytes]:
        pools = [np.full(nbytes, _POISON, np.uint8) for _ in range(2)]
        for call, case in enumerate(self.cases):
            if case.has_input:
                send, start = self._place(call, pools).send.view(FLOAT), self._starts[call] // FLOAT.itemsize
                send[:] = self._data[case.rank][start : start + send.size]
        return pools

    def _leave(self, call: int, pools: list[Bytes]) -> None:
        """Write the data that a call receives."""
        start = self._starts[call] // FLOAT.itemsize
        for piece in expected(self.cases[call]):
            source = self._reduced if piece.period == REDUCED else self._data[piece.period]
            received = self._place(call, pools).receive.view(FLOAT)
            begin = start + piece.offset
            received[piece.start : piece.start + piece.count] = source[begin : begin + piece.count]


def _numbers(rank: int, count: int) -> npt.NDArray[np.float32]:
    """Return whole numbers, because their sums are the same in every order."""
    return np.random.default_rng([48, rank]).integers(-100_000, 100_000, count).astype(FLOAT)


def _as_array(pool: torch.Tensor) -> Any:
    if pool.device.type == "cpu":
        return pool.numpy()
    import cupy

    return cupy.asarray(pool)
