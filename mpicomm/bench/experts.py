"""``python -m mpicomm.bench experts``: times and checks dispatch and combine of a mixture of experts."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.compare import OWN, open_libraries
from mpicomm.bench.libraries import TorchNccl
from mpicomm.bench.measure import Call, CheckedCall, Machine, Measured, Measuring, Trial, machine_of
from mpicomm.bench.report import Report, ResultRow
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.experts.arrays import BY_EXPERT, DTYPES, LAYOUTS, Received
from mpicomm.experts.experts import Experts
from mpicomm.mpi.types import covered_dtype
from mpicomm.symmetric.array import SymmetricArray

NAME = "experts"
_PEERS = {"nccl": TorchNccl}  # through PyTorch
_CAPACITY_FACTOR = 2
"""The capacity of a rank, in multiples of the rows that come if all experts get the same."""
_ROUNDS = 7
_PLACES = ("dispatch", "combine", "even")
COPY = "copy"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.command_parser(
        "bench experts",
        "Time dispatch and combine of a mixture of experts, and check every row. On GPUs -n calls make a "
        "CUDA graph. Each token has --top-k different experts, which are drawn at random.",
        peers=_PEERS,
    )
    add, count = result.add_argument, arguments.count_from
    add("experts", choices=[NAME], help=argparse.SUPPRESS)
    tokens = "of a rank; also the max_tokens of the Experts object; default: 128,4096, on the cpu 16,128"
    add("--tokens", type=arguments.list_of(count(1)), metavar="N,...", help=tokens)
    hidden = "elements of a token; default: 7168, on the cpu 1024"
    add("--hidden", type=count(1), metavar="N", help=hidden)
    add("--experts", dest="num_experts", type=count(1), default=64, metavar="N", help="default: 64")
    add("--top-k", type=count(1), default=8, metavar="N", help="experts of a token; default: 8")
    add("-d", "--datatype", choices=DTYPES, help="default: bfloat16, on the cpu float32")
    layouts = arguments.names_from(LAYOUTS, "layout")
    add("--layouts", type=layouts, default=LAYOUTS, metavar="NAME,...", help="experts, tokens")
    add("--blocks", type=count(2), metavar="N", help="the most blocks of a launch")
    add("-n", "--iters", type=count(1), default=10, metavar="N", help="timed iterations; default: 10")
    return result


def main() -> int:
    """Run the command line on this rank. Collective."""
    run = command_line.Run(parser())
    options, comm = run.options, run.comm
    machine = machine_of(comm)
    on_host = machine.stream is None
    tokens, hidden, dtype = ([16, 128], 1024, "float32") if on_host else ([128, 4096], 7168, "bfloat16")
    options.tokens, options.hidden = options.tokens or tokens, options.hidden or hidden
    options.datatype = options.datatype or dtype
    measuring = Measuring(comm, machine, iterations=options.iters, warmups=2, rounds=_ROUNDS, graphs=not on_host)
    with machine.current():
        opened, absent = open_libraries(comm, machine, _PEERS, options.compare)
        parts = [] if on_host else [COPY]
        report = Report([("tokens", "", 8), ("layout", "", 9)], _PLACES, [*opened], ["crossing"], parts=parts)
        lines = [
            measuring.how,
            f"hidden {options.hidden} of {options.datatype}, top {options.top_k} of {options.num_experts} experts",
            "crossing: the bytes that cross the links of a GPU, each way; copy: as many bytes by a copy engine",
            "even: an even Alltoall of as many rows to each rank",
        ]
        rows = [*itertools.product(options.tokens, options.layouts)]

        def measure(row: tuple[int, str]) -> ResultRow:
            return _measure(options, measuring, *row, opened.get("nccl"))

        return report.make(run, f"bench {NAME}", lines, rows, measure, [*opened.values()], absent)


def _measure(
    options: argparse.Namespace, measuring: Measuring, tokens: int, layout: str, nccl: TorchNccl | None
) -> ResultRow:
    comm, machine = measuring.comm, measuring.machine
    dtype, top_k, experts = covered_dtype(options.datatype), options.top_k, options.num_experts
    routes = Routes(machine, comm.rank, comm.size, (tokens, options.hidden), top_k, experts, dtype)
    capacity = min(comm.size * tokens * top_k, _CAPACITY_FACTOR * tokens * top_k + 64) if layout == BY_EXPERT else None
    numbers = experts, options.hidden, tokens, top_k, dtype
    row_nbytes = options.hidden * dtype.itemsize
    crossing = max(comm.allgather(routes.crossing)) * row_nbytes
    shape = (comm.size * tokens, row_nbytes)
    with (
        Experts(comm, *numbers, capacity=capacity, blocks=options.blocks, layout=layout) as made,
        comm.zeros(shape, "u1") as sent,
        comm.zeros(shape, "u1") as taken,
    ):
        received = made.dispatch(routes.x, routes.ids, routes.weights)
        sums = made.combine(received.x, received)
        calls: dict[str, tuple[Call, Callable[[], int] | None]] = {
            "dispatch": (
                lambda: made.dispatch(routes.x, routes.ids, routes.weights, out=received),
                lambda: routes.count_wrong_rows(received),
            ),
            "combine": (
                lambda: made.combine(received.x, received, out=sums),
                lambda: routes.count_wrong_sums(sums, weighted=layout == BY_EXPERT),
            ),
            "even": (lambda: comm.Alltoall(sent.local, taken.local), None),
        }
        theirs: dict[str, Call] = {}
        if nccl is not None:
            counts = [int(routes.goes_to(rank).sum()) for rank in range(comm.size)]
            theirs = nccl.calls(counts, tokens, options.hidden)
        places: dict[str, Measured] = {}
        for place, (call, count_wrong) in calls.items():
            checks = [] if count_wrong is None else [CheckedCall(lambda: None, call, count_wrong)]
            trials = [Trial(OWN, call, checks)]
            if place == "dispatch" and machine.stream is not None and comm.size > 1:
                trials.append(Trial(COPY, _copies(comm, sent, taken, crossing)))
            if place in theirs:
                # The host waits within the other calls, so no graph can have them.
                trials.append(Trial("nccl", theirs[place], own=False, capturable=place == "even"))
            places[place] = measuring.run(trials)
    nbytes = {"dispatch": crossing, "combine": crossing, "even": tokens * (comm.size - 1) * row_nbytes}
    facts = {"tokens": tokens, "layout": layout, "crossing_nbytes": crossing}
    return ResultRow(facts, places, lambda place, time_us: {"crossing": nbytes[place] / time_us * 1e-3})


def _copies(comm: Communicator, sent: SymmetricArray, taken: SymmetricArray, nbytes: int) -> Call:
    """Return a call that moves ``nbytes`` by copy engines, both ways at once."""
    following = (comm.rank + 1) % comm.size
    source = sent.local.reshape(-1)[: nbytes // (comm.size - 1)]

    def copy() -> None:
        for _ in range(comm.size - 1):
            taken.put(source, following)

    return copy


class Routes:
    """Tokens with ``top_k`` different experts each, drawn alike on all ranks."""

    def __init__(
        self, machine: Machine, rank: int, size: int, shape: tuple[int, int], top_k: int, experts: int, dtype: Any
    ) -> None:
        self._xp = machine.xp
        self._rank, self._size = rank, size
        self.tokens, self.hidden = shape
        rng = np.random.default_rng(shape)
        self._ids = np.argsort(rng.random((size, self.tokens, experts)), axis=2)[:, :, :top_k]
        """The experts of each token of each rank."""
        self._owner = np.repeat(np.arange(size), [len(part) for part in np.array_split(np.arange(experts), size)])
        """The rank of each expert."""
        self._owners = self._owner[self._ids]
        self.ids = self._xp.asarray(self._ids[rank])
        self.weights = self._xp.asarray(np.random.default_rng(rank).random((self.tokens, top_k), np.float32))
        self._dtype = dtype
        self.x = self._rows_of(rank, self._xp.arange(self.tokens, dtype=np.int32))

    @property
    def crossing(self) -> int:
        """The number of tokens that this rank sends to other ranks; a token counts once for each rank."""
        return int(sum(np.count_nonzero(self.goes_to(rank)) for rank in range(self._size) if rank != self._rank))

    def goes_to(self, rank: int) -> Any:
        """Return for each token of this rank whether it goes to ``rank``."""
        return (self._owners[self._rank] == rank).any(axis=1)

    def _rows_of(self, ranks: Any, tokens: Any) -> Any:
        """Return these tokens of the ranks: small whole numbers, which all types have."""
        begin, columns = tokens * 31 + ranks * 17, self._xp.arange(self.hidden, dtype=np.int32)
        return ((begin[:, None] + columns * 7) % 127 - 63).astype(self._dtype)

    def count_wrong_rows(self, received: Received) -> int:
        """Return the number of wrong rows of a dispatch on this rank, with rows that are missing."""
        xp = self._xp
        expected, used = int(np.count_nonzero(self._owners == self._rank)), int(received.offsets[-1])
        sources = received.sources[:used]
        wrong = abs(expected - used)
        experts = xp.asarray(self._ids)[sources[:, 0], sources[:, 1], sources[:, 2]]
        counts = received.counts.get() if hasattr(received.counts, "get") else received.counts
        if counts.sum() != used:
            return max(wrong, 1)
        in_order = np.repeat(np.flatnonzero(self._owner == self._rank), counts)
        wrong += int(xp.count_nonzero(experts != xp.asarray(in_order)))
        if received.rows is not None:
            # Each row has a place, so the places check all rows.
            wrong += abs(int(received.row_count[0]) - len(xp.unique(received.rows[:used])))
        for begin in range(0, used, 4096):
            places = slice(begin, min(begin + 4096, used))
            found = received.x[places if received.rows is None else received.rows[places]]
            wanted = self._rows_of(sources[places, 0], sources[places, 1])
            wrong += int(xp.count_nonzero((found != wanted).any(axis=1)))
        return wrong

    def count_wrong_sums(self, sums: Any, *, weighted: bool) -> int:
        """Return the number of wrong sums of a combine of the dispatched rows themselves.

        With ``weighted`` each slot counts by its weight. Otherwise each rank with experts of a token counts once.
        """
        xp = self._xp
        total = xp.zeros((self.tokens, self.hidden), xp.float32)
        x, owners = self.x.astype(xp.float32), xp.asarray(self._owners[self._rank])
        for rank in range(self._size):
            there = owners == rank
            if not weighted:
                total += xp.where(there.any(axis=1)[:, None], x, xp.float32(0))
                continue
            partial, factors = xp.zeros_like(total), xp.where(there, self.weights, xp.float32(0))
            for slot in range(factors.shape[1]):
                partial += factors[:, slot, None] * x
            total += partial.astype(self._dtype).astype(xp.float32)
        return int(xp.count_nonzero((total.astype(self._dtype) != sums).any(axis=1)))
