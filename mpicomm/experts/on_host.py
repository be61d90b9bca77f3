"""HostWay: dispatches and combines of arrays in host memory, by MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.experts.arrays import WIRE, Received, Shape, host_view
from mpicomm.kernels.experts import GROUP
from mpicomm.mpi.types import covered_dtype
from mpicomm.session import Session

Array = npt.NDArray[Any]
_LARGEST, _LEAST_LARGEST = 448, 1e-4  # as in experts_quantize.cu


class Dispatched(NamedTuple):
    """The arrays of a dispatch: the arguments as `Experts` reads them, and the result."""

    received: Received
    x: Any
    ids: Any
    weights: Any = None
    scales: Any = None
    """The scales of ``x``; None if the call quantises ``x``, or sends no scales."""


class Combined(NamedTuple):
    """The arrays of a combine, as above. The sums go into ``output``, which is the memory of ``result``."""

    received: Received
    rows: Any
    result: Any
    output: Any
    values: Any = None
    of_slots: Any = None


class HostWay:
    """Carries calls out between all ranks, also of several nodes. All methods are collective and block.

    All tokens go to all ranks, so that each rank lays its rows out as NumPy indexes them.
    Before data goes, all ranks meet: an error of one rank is an error of all ranks, and they can go on.
    """

    def __init__(self, session: Session, shape: Shape) -> None:
        self._session = session
        self._shape = shape
        self._rank = session.group.rank

    def dispatch(self, prepare: Callable[[], Dispatched]) -> Received:
        """Return the laid out rows. ``prepare`` reads the arguments, and raises for bad ones."""
        shape, made = self._shape, list[Dispatched]()

        def routes() -> tuple[Array, Array]:
            made.append(given := prepare())
            ids = given.ids.astype(np.int64)
            wrong = np.argwhere((ids < -1) | (ids >= shape.num_experts))
            if len(wrong):
                token, slot = wrong[0]
                raise InvalidUsageError(
                    f"Experts.dispatch: topk_ids of rank {self._rank} has the id {ids[token, slot]} at token {token}: "
                    f"pass 0 to {shape.num_experts - 1}, or -1 for none"
                )
            return ids, np.ones(ids.shape, np.float32) if given.weights is None else given.weights

        all_ids, all_weights = zip(*self._session.group.allgather("Experts.dispatch", routes), strict=True)
        given, received, tokens_of = made[0], made[0].received, list(map(len, all_ids))
        ids, weights = self._together(all_ids, -1), self._together(all_weights, 0)
        owners = np.searchsorted(shape.firsts, ids, side="right") - 1  # the rank of each slot's expert, or -1
        counts = np.bincount(ids[ids >= 0], minlength=shape.num_experts)
        # Every rank computes the rows of all ranks, so all ranks raise the same error.
        for rank in range(shape.size):
            came = (owners == rank).any(axis=2)
            rows = np.count_nonzero(came) if shape.by_token else self._offsets(counts, rank)[-1]
            if rows > shape.capacity:
                raise InvalidUsageError(
                    f"Experts.dispatch: rank {rank} gets {rows} rows, more than capacity={shape.capacity} of the "
                    "Experts: create it with a larger capacity",
                    ranks=[rank],
                )
        host_view(received.tokens)[:] = tokens_of
        numbers, tokens, ranks, end = self._describe(received, ids, weights, owners, counts)
        if given.scales is not None:
            leaving: tuple[Array, ...] = given.x.view(covered_dtype(WIRE)), given.scales
        else:
            leaving = quantized(given.x) if shape.scales else (given.x,)
        for array, target in zip(leaving, (received.x, received.scales), strict=False):
            view, arrived = host_view(target), self._together(self._exchanged([array] * shape.size, tokens_of), 0)
            view[:end] = 0
            view[numbers] = arrived[tokens, ranks]
        return received

    def combine(self, prepare: Callable[[], Combined], *, weighted: bool) -> Combined:
        """Fill the arrays of a combine. ``prepare`` reads the arguments, and raises for bad ones."""
        given = self._session.group.agree("Experts.combine", prepare)
        received = given.received
        counts = host_view(received.tokens)
        places = [each[:count] for each, count in zip(host_view(received.places), counts, strict=True)]
        summed, weights = places, host_view(received.weights) if weighted else None
        if self._shape.by_token:
            of_tokens = zip(host_view(received.token_rows), counts, strict=True)
            summed, weights = [each[:count, None] for each, count in of_tokens], None
        own = [received.num_tokens] * self._shape.size
        total = np.zeros((received.num_tokens, self._shape.hidden), np.float32)
        for sums in self._exchanged([self._sums(given.rows, each, weights) for each in summed], own):
            total += sums.astype(np.float32)
        given.output[...] = total.astype(given.output.dtype)
        if given.values is not None:
            of_slots = host_view(given.of_slots)
            of_slots[...] = 0
            found = [given.values[each[:, 0] if self._shape.by_token else each] for each in summed]
            sent = [np.where(each >= 0, those, np.float32(0)) for each, those in zip(places, found, strict=True)]
            for come in self._exchanged(sent, own):
                of_slots += come
        return given

    def _sums(self, rows: Array, places: Array, weights: Array | None) -> Array:
        """Return the sum of the rows of each token in ``places``, in their order; zeros for a token without places."""
        sums = np.zeros((len(places), self._shape.hidden), np.float32)
        for slot in range(places.shape[1]):
            here = np.flatnonzero(places[:, slot] >= 0)
            taken = places[here, slot]
            terms = rows[taken].astype(np.float32)
            sums[here] += terms if weights is None else weights[taken, None] * terms
        return sums.astype(self._shape.dtype)

    def _together(self, of_ranks: Sequence[Array], none: float) -> Array:
        """Return the tokens of all ranks: ``[tokens, ranks, ...]``, with ``none`` for tokens that a rank lacks."""
        most = max(map(len, of_ranks))
        together = np.full((most, self._shape.size, *of_ranks[0].shape[1:]), none, of_ranks[0].dtype)
        for rank, mine in enumerate(of_ranks):
            together[: len(mine), rank] = mine
        return together

    def _offsets(self, counts: Array, rank: int) -> Array:
        """Return the first place of each expert of a rank, then the end. ``counts`` are the pairs of all experts."""
        first, end = self._shape.firsts[rank : rank + 2]
        aligned = -(-counts[first:end] // self._shape.alignment) * self._shape.alignment
        return np.concatenate([[0], np.cumsum(aligned)])

    def _describe(
        self, received: Received, ids: Array, weights: Array, owners: Array, counts: Array
    ) -> tuple[Array, Array, Array, int]:
        """Write all that describes the rows. Return the number, token and rank of each row, and the end of all rows.

        ``ids``, ``weights`` and ``owners`` have the slots of all ranks' tokens.
        """
        first, last = self._shape.firsts[self._rank : self._rank + 2]
        here, counts, offsets = owners == self._rank, counts[first:last], self._offsets(counts, self._rank)
        pairs = np.flatnonzero(here)
        pairs = pairs[np.argsort(ids.reshape(-1)[pairs], kind="stable")]
        experts = ids.reshape(-1)[pairs] - first
        within = np.arange(len(pairs)) - (np.cumsum(counts) - counts)[experts]
        places = offsets[experts] + within
        tokens, ranks, slots = np.unravel_index(pairs, ids.shape)
        host_view(received.counts)[:], host_view(received.offsets)[:] = counts, offsets
        sources, of_places = host_view(received.sources), host_view(received.weights)
        sources[:], of_places[:] = -1, 0
        sources[places] = np.stack([ranks, tokens, slots], axis=1)
        of_places[places] = weights[tokens, ranks, slots]
        all_places = host_view(received.places)
        all_places[:] = -1
        all_places[ranks, tokens, slots] = places
        own = owners[: received.num_tokens, self._rank]
        sets = host_view(received.targets)[: len(own)]
        sets[:, 0] = (own[:, :, None] == np.arange(self._shape.size)).any(axis=1) @ (1 << np.arange(self._shape.size))
        sets[:, 1] = (own >= 0) @ (1 << np.arange(self._shape.top_k))
        if not self._shape.by_token:
            return places, tokens, ranks, int(offsets[-1])
        came = here.any(axis=2)
        numbers = (np.cumsum(came) - 1).reshape(came.shape)
        received_rows, token_rows = host_view(received.rows), host_view(received.token_rows)
        received_rows[:], token_rows[:] = -1, -1
        received_rows[places] = numbers[tokens, ranks]
        token_rows[:, : len(came)] = np.where(came, numbers, -1).T
        count = int(np.count_nonzero(came))
        for target, slots_of_all, none in (
            (received.topk_ids, ids - first, -1),
            (received.topk_weights, weights, 0),
        ):
            view = host_view(target)
            view[:count], view[count:] = np.where(here, slots_of_all, none)[came], none
        host_view(received.row_count)[:] = count
        tokens, ranks = np.nonzero(came)
        return numbers[came], tokens, ranks, count

    def _exchanged(self, sent: Sequence[Array], counts: Sequence[int]) -> list[Array]:
        """Send an array to each rank, and return the arrays of all ranks, which have ``counts`` rows."""
        together = np.concatenate(sent)
        result = np.empty((sum(counts), *together.shape[1:]), together.dtype)
        row_nbytes = math.prod(together.shape[1:]) * together.itemsize
        # In bytes: MPI has no type for bfloat16, and the buffer protocol refuses it.
        self._session.private.Alltoallv(
            [together.reshape(-1).view(np.uint8), [len(each) * row_nbytes for each in sent], MPI.BYTE],
            [result.reshape(-1).view(np.uint8), [count * row_nbytes for count in counts], MPI.BYTE],
        )
        return np.split(result, np.cumsum(counts)[:-1])


def quantized(x: Array) -> tuple[Array, Array]:
    """Return rows as fp8, and their scales: see experts_quantize.cu."""
    groups = x.astype(np.float32).reshape(len(x), x.shape[1] // GROUP, GROUP)
    largest = np.maximum(np.abs(groups).max(axis=2, initial=0), np.float32(_LEAST_LARGEST))
    values = groups * (np.float32(_LARGEST) / largest)[:, :, None]
    return values.reshape(x.shape).astype(covered_dtype(WIRE)), largest / np.float32(_LARGEST)
