"""Dispatch and combine of arrays in host memory, by MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpicomm.cluster.agreement import require_same
from mpicomm.errors import InvalidUsageError
from mpicomm.experts.arrays import WIRE, ExpertsConfig, Received, host_view
from mpicomm.kernels.experts import GROUP
from mpicomm.mpi.types import covered_dtype
from mpicomm.session import Session

Array = npt.NDArray[Any]
_LARGEST, _MIN_LARGEST = 448, 1e-4  # as in experts_quantize.cu


class DispatchArrays(NamedTuple):
    """The arrays of a dispatch: the arguments as `Experts` reads them, and the result."""

    received: Received
    x: Any
    ids: Any
    weights: Any = None
    scales: Any = None
    """The scales of ``x``; None if the call quantizes ``x``, or sends no scales."""


class CombineArrays(NamedTuple):
    """The arrays of a combine, as above. The sums go into ``output``, which is the memory of ``result``."""

    received: Received
    rows: Any
    result: Any
    output: Any
    values: Any = None
    slot_values: Any = None


class HostExperts:
    """Dispatch and combine between all ranks, also of several nodes. All methods are collective and block.

    All tokens go to all ranks, and each rank lays its rows out by NumPy. Before data goes, the ranks agree that no rank
    has bad arguments: an error of one rank is an error of all ranks, and they can go on.
    """

    def __init__(self, session: Session, config: ExpertsConfig) -> None:
        self._session = session
        self._config = config
        self._rank = session.group.rank

    def dispatch(self, read_arguments: Callable[[], DispatchArrays]) -> Received:
        """Return the rows of this rank's experts. ``read_arguments`` raises for bad arguments."""
        config, made = self._config, list[DispatchArrays]()

        def routes() -> tuple[Array, Array]:
            made.append(given := read_arguments())
            ids = given.ids.astype(np.int64)
            wrong = np.argwhere((ids < -1) | (ids >= config.num_experts))
            if len(wrong):
                token, slot = wrong[0]
                raise InvalidUsageError(
                    f"Experts.dispatch: topk_ids of rank {self._rank} has the id {ids[token, slot]} at token {token}: "
                    f"pass 0 to {config.num_experts - 1}, or -1 for none"
                )
            return ids, np.ones(ids.shape, np.float32) if given.weights is None else given.weights

        all_ids, all_weights = zip(*self._session.group.allgather("Experts.dispatch", routes), strict=True)
        ids, weights, num_tokens = _stack(all_ids), _stack(all_weights), list(map(len, all_ids))
        for rank, count in enumerate(num_tokens):
            ids[count:, rank] = -1
        owners = np.searchsorted(config.firsts, ids, side="right") - 1  # the rank of each slot's expert, or -1
        counts = np.bincount(ids[ids >= 0], minlength=config.num_experts)
        # Every rank computes the rows of all ranks, so all ranks raise the same error.
        for rank in range(config.size):
            came = (owners == rank).any(axis=2)
            num_rows = np.count_nonzero(came) if config.by_token else self._offsets(counts, rank)[-1]
            if num_rows > config.capacity:
                raise InvalidUsageError(
                    f"Experts.dispatch: rank {rank} gets {num_rows} rows, more than capacity={config.capacity} of the "
                    "Experts: create it with a larger capacity",
                    ranks=[rank],
                )
        given, received = made[0], made[0].received
        host_view(received.tokens)[:] = num_tokens
        numbers, tokens, ranks, end = self._lay_out(received, ids, weights, owners, counts)
        if given.scales is not None:
            rows: tuple[Array, ...] = given.x.view(covered_dtype(WIRE)), given.scales
        else:
            rows = _quantize(given.x) if config.scales else (given.x,)
        # By MPI itself, because the agreement above has a time limit, which long rows may exceed.
        all_rows = zip(*self._session.private.allgather(rows), strict=True)
        for arrays, target in zip(all_rows, (received.x, received.scales), strict=False):
            view = host_view(target)
            view[:end] = 0
            view[numbers] = _stack(arrays)[tokens, ranks]
        return received

    def combine(self, read_arguments: Callable[[], CombineArrays], *, weighted: bool) -> CombineArrays:
        """Fill the arrays of a combine. ``read_arguments`` raises for bad arguments."""
        config, made = self._config, list[CombineArrays]()

        def values_text() -> str:
            made.append(read_arguments())
            return "None" if made[0].values is None else "an array"

        require_same("Experts.combine: values", self._session.group.allgather("Experts.combine", values_text))
        given, received = made[0], made[0].received
        weights = host_view(received.weights) if weighted and not config.by_token else None
        outgoing = []
        for rank, count in enumerate(host_view(received.tokens)):
            places = rows = host_view(received.places)[rank, :count]
            if config.by_token:
                rows = host_view(received.token_rows)[rank, :count, None]
            values = None
            if given.values is not None:
                values = given.values[rows[:, 0] if config.by_token else rows]
                values = np.where(places >= 0, values, np.float32(0))
            outgoing.append((self._sum(given.rows, rows, weights), values))
        total = np.zeros((received.num_tokens, config.hidden), np.float32)
        slot_values = np.zeros((received.num_tokens, config.top_k), np.float32)
        for sums, values in self._session.private.alltoall(outgoing):
            total += sums.astype(np.float32)
            slot_values += 0 if values is None else values
        given.output[...] = total.astype(given.output.dtype)
        if given.slot_values is not None:
            host_view(given.slot_values)[...] = slot_values
        return given

    def _sum(self, rows: Array, indices: Array, weights: Array | None) -> Array:
        """Return for each token the sum of its ``rows``, whose ``indices`` are in the order of slots, or -1."""
        sums = np.zeros((len(indices), self._config.hidden), np.float32)
        for slot in range(indices.shape[1]):
            here = np.flatnonzero(indices[:, slot] >= 0)
            taken = indices[here, slot]
            terms = rows[taken].astype(np.float32)
            sums[here] += terms if weights is None else weights[taken, None] * terms
        return sums.astype(self._config.dtype)

    def _offsets(self, counts: Array, rank: int) -> Array:
        """Return the first place of each expert of a rank, then the end. ``counts`` are the pairs of all experts."""
        first, end = self._config.firsts[rank : rank + 2]
        aligned = -(-counts[first:end] // self._config.alignment) * self._config.alignment
        return np.concatenate([[0], np.cumsum(aligned)])

    def _lay_out(
        self, received: Received, ids: Array, weights: Array, owners: Array, counts: Array
    ) -> tuple[Array, Array, Array, int]:
        """Fill the arrays that describe the rows. Return the number, token and rank of each row, and the end of all.

        ``ids``, ``weights`` and ``owners`` have the shape ``[tokens, ranks, slots]``.
        """
        config = self._config
        first, last = config.firsts[self._rank : self._rank + 2]
        offsets = self._offsets(counts, self._rank)
        host_view(received.counts)[:], host_view(received.offsets)[:] = counts[first:last], offsets
        sources, place_weights, places = map(host_view, (received.sources, received.weights, received.places))
        sources[:], place_weights[:], places[:] = -1, 0, -1
        for expert in range(first, last):
            tokens, ranks, slots = np.nonzero(ids == expert)  # in the order of tokens, then ranks, then slots
            of_expert = offsets[expert - first] + np.arange(len(tokens))
            sources[of_expert] = np.stack([ranks, tokens, slots], axis=1)
            place_weights[of_expert] = weights[tokens, ranks, slots]
            places[ranks, tokens, slots] = of_expert
        own = owners[: received.num_tokens, self._rank]
        targets = host_view(received.targets)[: len(own)]
        targets[:, 0] = (own[:, :, None] == np.arange(config.size)).any(axis=1) @ (1 << np.arange(config.size))
        targets[:, 1] = (own >= 0) @ (1 << np.arange(config.top_k))
        used = np.flatnonzero(sources[:, 0] >= 0)
        ranks, tokens, _ = sources[used].T
        if not config.by_token:
            return used, tokens, ranks, int(offsets[-1])
        here = owners == self._rank
        came = here.any(axis=2)
        numbers = np.where(came, np.cumsum(came).reshape(came.shape) - 1, -1)
        place_rows, token_rows = host_view(received.rows), host_view(received.token_rows)
        place_rows[:], token_rows[:] = -1, -1
        place_rows[used] = numbers[tokens, ranks]
        token_rows[:, : len(came)] = numbers.T
        num_rows = int(np.count_nonzero(came))
        for target, values, fill in ((received.topk_ids, ids - first, -1), (received.topk_weights, weights, 0)):
            view = host_view(target)
            view[:num_rows], view[num_rows:] = np.where(here, values, fill)[came], fill
        host_view(received.row_count)[:] = num_rows
        tokens, ranks = np.nonzero(came)
        return np.arange(num_rows), tokens, ranks, num_rows


def _stack(arrays: Sequence[Array]) -> Array:
    """Return the arrays of all ranks as one, ``[tokens, ranks, ...]``, with zeros for tokens that a rank lacks."""
    stacked = np.zeros((max(map(len, arrays)), len(arrays), *arrays[0].shape[1:]), arrays[0].dtype)
    for rank, array in enumerate(arrays):
        stacked[: len(array), rank] = array
    return stacked


def _quantize(x: Array) -> tuple[Array, Array]:
    """Return rows as fp8, and their scales: see experts_quantize.cu."""
    groups = x.astype(np.float32).reshape(len(x), x.shape[1] // GROUP, GROUP)
    largest = np.maximum(np.abs(groups).max(axis=2, initial=0), np.float32(_MIN_LARGEST))
    values = groups * (np.float32(_LARGEST) / largest)[:, :, None]
    return values.reshape(x.shape).astype(covered_dtype(WIRE)), largest / np.float32(_LARGEST)
