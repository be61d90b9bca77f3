"""Calls of a communicator's collectives on any device, in every form of argument, and the check of their buffers.

The package's table tells the arguments and the shapes of buffers of a collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.host.selection import algorithms_for
from mpicomm.collectives.operations import OPERATIONS, Operation
from tests.helpers.inputs.buffers import JUNK, Blocks, Placed, one_of, values
from tests.helpers.references.reductions import OWN, Array, Groups, quantized_sum, reduced, require_same, round_trip

MPI_OPS = ("sum", "prod", "max", "min", "land", "lor", "lxor", "band", "bor", "bxor")
OPS: dict[str, MPI.Op] = {name: getattr(MPI, name.upper()) for name in MPI_OPS} | {"avg": mpicomm.AVG}
# They do not commute, although they say so. So groups of ranks that do not follow each other take them, too.
OPS |= {text: mpicomm.Op(text, commute=True) for text in OWN}

REDUCTIONS = tuple(name for name, row in OPERATIONS.items() if row.reduces)
OF_ONE_TYPE = tuple(name for name, row in OPERATIONS.items() if row.send != "typed" and not row.of_neighbors)
"""The collectives between all ranks whose buffers have one datatype each."""
MOVEMENTS = tuple(name for name in OF_ONE_TYPE if not OPERATIONS[name].reduces)
FORMS = ("plain", "any")
_MANY = ("vector", "typed")


def legal_ops(name: str) -> tuple[str, ...]:
    """Return the reductions that are defined on the element type of that name."""
    if name == "bool":
        return ("land", "lor", "lxor", "a and (not b)")
    if name.startswith("complex"):
        return ("sum", "prod", "avg", "a * 2 - b")
    if "int" in name:
        return tuple(op for op in OPS if op not in ("avg", "a and (not b)"))
    return ("sum", "prod", "max", "min", "avg", "a * 2 - b")


def algorithms(operation: str) -> tuple[str, ...]:
    """Return the algorithms for a collective that the host and GPUs both have, and that reduce in rank order."""
    row = OPERATIONS[operation]
    return tuple(name for name in algorithms_for(row) if name in names_for(row, in_rank_order=True))


def may_be_in_place(row: Operation) -> bool:
    """Return whether MPI has the collective in place. Bcast is always in place."""
    return not row.of_neighbors and row.rooted != "bcast"


@dataclass(frozen=True)
class Case:
    """One collective call, as all ranks know it. ``count`` is the count of a block; vector calls have ragged blocks."""

    operation: str
    dtype: np.dtype[Any]
    count: int
    op: str = "sum"
    """With "tree" it is a sum with ``order="tree"``."""
    root: int = 0
    form: str = "plain"
    """"plain": arrays without counts, so that blocks are equal. "any": each rank draws how it names its buffers, and
    how blocks lie in them. "arrays": counts and displacements of an Alltoallv are arrays where the buffers are."""
    in_place: bool = False
    algorithm: str = "auto"
    offset: int = 0
    """Bytes by which the buffers miss a good alignment."""
    seed: int = 0
    wild: bool = False
    """Values that show the order of a reduction, for calls whose order is promised."""
    groups: Groups | None = None
    """Ranks that are reduced first, before their results are reduced. Scan and Exscan ignore them and take the ranks in
    order.
    """
    wire: str | tuple[str, None] | None = None
    """The argument ``wire_dtype``, also as the callers of an all-reduce pass it for unquantized results."""
    derived: bool = True
    """Whether datatypes of movements may be derived ones."""
    copies: bool = False
    """Whether ranks may pass copies of buffers that the call only reads."""
    mixed: str = ""
    """With "gpu" or "host" each rank draws where its buffers lie, in a call on GPUs or on the host. To a call on GPUs
    some ranks may pass only host arrays. In a call on the host the root's second buffer may lie on its GPU."""

    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments by name, of which `Prepared.check` knows nothing."""

    @property
    def row(self) -> Operation:
        """The collective's row in the table."""
        return OPERATIONS[self.operation]


class Prepared:
    """This rank's part of a case: its buffers, its arguments, and the check of its result.

    ``xp`` is NumPy, CuPy or a `ThreadDevice`. The receive buffer lies in ``memory``, or in memory of its own.
    """

    def __init__(self, case: Case, rank: int, size: int, xp: Any, memory: Any = None) -> None:
        self.case, self._rank, self._size, self._xp = case, rank, size, xp
        self._rng = np.random.default_rng([case.seed, rank])
        """Draws of this rank only."""
        self.counts = [self._ragged(peer) for peer in range(size)]
        """The ``recvcounts`` of a Reduce_scatter."""
        if case.in_place and case.row.send == "by_recvcounts" and case.algorithm == "mpi":
            # MPICH 5 ends the program when it moves a block that overlaps its result at the start; sorted, none does.
            self.counts.sort(reverse=True)
        self._derived = case.derived and not case.row.reduces and case.wire is None and case.form != "arrays"
        self._came: Any = None
        """The array into which a call with counts on the GPU writes the counts."""
        row, at_root = case.row, rank == case.root
        self._here = case.in_place and (at_root or not row.rooted)
        """Whether this rank's call is in place."""
        sends = (
            row.rooted != "bcast" and not (self._here and row.rooted != "send") and (row.rooted != "send" or at_root)
        )
        receives = not (self._here and row.rooted == "send") and (row.rooted != "receive" or at_root)
        self._send = self._lay(row.send, rank, receives=False) if sends else None
        shape = row.send if self._here and row.reduces else row.receive
        self._receive = self._lay(shape, rank, receives=shape == row.receive) if receives else None
        self._fill()
        self._arguments = self._place(memory)

    def run(self, comm: mpicomm.Communicator) -> None:
        """Call the blocking method."""
        self._call(comm, self.case.row.name)

    def start(self, comm: mpicomm.Communicator) -> MPI.Request:
        """Call the nonblocking method."""
        request: MPI.Request = self._call(comm, self.case.row.nonblocking)
        return request

    def prepare(self, comm: mpicomm.Communicator) -> MPI.Prequest:
        """Call the method that makes a persistent request."""
        request: MPI.Prequest = self._call(comm, self.case.row.methods[2])
        return request

    def arguments(self) -> list[Any]:
        """Return the arguments for the two buffers."""
        return self._arguments

    def renew(self, seed: int) -> None:
        """Put the values of another seed into the same buffers."""
        self.case = replace(self.case, seed=seed)
        self._fill()
        for blocks in (self._send, self._receive):
            if blocks is not None:
                blocks.placed.set(blocks.content)

    def result(self) -> Array | None:
        """Return this rank's result, or None if the rank receives nothing."""
        return None if self._receive is None or self._expected is None else self._receive.received(self._expected.size)

    def check(self) -> None:
        """Assert that this rank's result is right, and that nothing else in its buffers has changed."""
        try:
            self._check()
        except AssertionError as error:
            raise AssertionError(f"{self.case} on rank {self._rank} of {self._size}: {error}") from None

    def _call(self, comm: mpicomm.Communicator, method: str) -> Any:
        case = self.case
        send, receive = self._arguments
        given: dict[str, Any] = {
            "buf": receive,
            "sendbuf": send,
            "recvbuf": receive,
            "op": OPS["sum" if case.op == "tree" else case.op],
        }
        given |= {"root": case.root, "recvcounts": self.counts}
        if case.form == "plain" and not case.in_place:
            del given["recvcounts"]  # then the ranks tell each other the counts
        positional = [given.pop(name) for name in case.row.arguments if name.endswith("buf")]
        keywords = {name: given[name] for name in case.row.arguments if name in given}
        if case.algorithm != "auto":
            keywords["algorithm"] = case.algorithm
        if case.wire is not None:
            keywords["wire_dtype"] = case.wire
        if case.op == "tree":
            keywords["order"] = "tree"
        return getattr(comm, method)(*positional, **keywords, **case.more)

    def _check(self) -> None:
        case, (send, receive) = self.case, (self._send, self._receive)
        if send is not None:
            assert send.placed.get().tobytes() == send.content.tobytes(), "the send buffer has changed"
        if receive is None:
            return
        if self._came is not None:
            assert self._came.get().tolist() == receive.lengths, "the counts are wrong"
        expected = self._expected
        # MPI leaves the rest of the input of a reduce-scatter in place undefined.
        rest_is_any = self._here and case.row.reduces and case.row.send != "one"
        actual = receive.received(0 if expected is None else expected.size, rest_is_any=rest_is_any)
        if expected is None:
            return
        if not case.row.reduces and case.wire is None:
            assert actual.tobytes() == expected.tobytes(), _difference(actual, expected)
        elif case.wild or case.wire is not None:
            require_same(actual, expected)
        else:
            assert np.array_equal(actual, expected), _difference(actual, expected)

    # What the ranks send and receive.

    def _fill(self) -> None:
        """Compute the contents of the buffers, and the result."""
        case, row, rank = self.case, self.case.row, self._rank
        sent = [
            np.split(self._values(sum(lengths), peer), np.cumsum(lengths)[:-1])
            for peer, lengths in ((peer, self._lengths(row.send, peer, receives=False)) for peer in range(self._size))
        ]
        if self._send is not None:
            self._send.fill(sent[rank], self._values(self._send.room, rank, 8))
        self._expected: Array | None = None
        if self._receive is None:
            return
        before = self._values(self._receive.room, rank, 7)
        own: list[Any] | None = None
        if row.rooted == "bcast" and rank == case.root:
            own = sent[rank]
        elif self._here:
            # Its block of the output, or all of its input.
            own = sent[rank]
            if row.send == "one" and row.receive != "one":
                own = [own[0] if peer == rank else None for peer in range(self._size)]
        self._receive.fill(own, before)
        parts = self._reduced(sent) if row.reduces else self._moved(sent)
        self._expected = None if parts is None else np.concatenate(parts)

    def _moved(self, sent: list[list[Array]]) -> list[Array]:
        """Return the blocks that come to this rank."""
        case, row = self.case, self.case.row
        blocks = [each[0 if row.send == "one" else self._rank] for each in sent]
        if isinstance(case.wire, str) and self._size > 1:
            blocks = [round_trip(block, case.wire).astype(case.dtype) for block in blocks]
        return [blocks[case.root]] if row.receive == "one" else blocks

    def _reduced(self, sent: list[list[Array]]) -> list[Array] | None:
        """Return this rank's result, or None if it receives nothing."""
        case, row, rank = self.case, self.case.row, self._rank
        prefix = {"Scan": rank + 1, "Exscan": rank}.get(row.name)
        parts = [each[0 if row.send == "one" else rank] for each in sent][:prefix]
        if not parts:
            return None
        if len(parts) == 1:  # a single contribution is the result, even if x / 1 is not x
            return [parts[0].copy()]
        if case.wire is not None:
            wire, results = (case.wire, row.send == "one") if isinstance(case.wire, str) else (case.wire[0], False)
            return [quantized_sum(parts, wire, case.op, results=results)]
        return [reduced(case.op, parts, case.groups if prefix is None else None)]

    def _lengths(self, shape: str, peer: int, *, receives: bool) -> list[int]:
        """Return the elements of each block of a buffer of a rank."""
        others = range(1 if shape == "one" else self._size)
        return [self._length(other, peer) if receives else self._length(peer, other) for other in others]

    def _length(self, sender: int, receiver: int) -> int:
        case, shapes = self.case, (self.case.row.send, self.case.row.receive)
        plain = case.form == "plain"
        if not {"by_recvcounts", *_MANY} & {*shapes} or (plain and shapes == ("vector", "vector")):
            return case.count
        if shapes[0] in _MANY and shapes[1] in _MANY:
            return self._ragged(*(sorted((sender, receiver)) if case.in_place else (sender, receiver)))
        peer = receiver if shapes[1] == "one" else sender
        if plain and shapes[0] != "by_recvcounts":
            share, more = divmod(case.count, self._size)
            return share + (peer < more)
        return self.counts[peer]

    def _ragged(self, *where: int) -> int:
        n = self.case.count
        return (n, 0, n // 2, n + 6)[zlib.crc32(repr((n, where)).encode()) % 4] if n else 0

    def _values(self, count: int, *key: int) -> Array:
        case = self.case
        if case.wire is not None:  # numbers that quantization rounds most
            tame = values(case.dtype, count, case.seed, *key).astype(np.float32)
            numbers: Array = (tame * np.geomspace(1e-3, 1e3, count, dtype=np.float32)).astype(case.dtype)
            return numbers
        return values(case.dtype, count, case.seed, *key, wild=case.wild or not case.row.reduces)

    # The places and the names of the buffers.

    def _lay(self, shape: str, rank: int, *, receives: bool) -> Blocks:
        case, lengths = self.case, self._lengths(shape, rank, receives=receives)
        return Blocks(shape, lengths, case.dtype, None if case.form == "plain" else self._rng, derived=self._derived)

    def _place(self, memory: Any) -> list[Any]:
        """Bring both buffers to their places, and return the arguments that name them."""
        case, row, rng, xp = self.case, self.case.row, self._rng, self._xp
        made: list[Any] = []
        for blocks, where, given in zip((self._send, self._receive), self._where(), (None, memory), strict=True):
            if blocks is None:
                made.append(None)
                continue
            offset = case.offset
            if case.form == "any" and where is np and rng.integers(4) == 0:
                offset += 1  # elements of several bytes are unaligned, and mpi4py has no type for them
            fortran = case.form != "arrays" and rng.integers(4) == 0
            # A buffer that lies nowhere is empty.
            blocks.placed = Placed(where or np, blocks.content, offset=offset, fortran=fortran, memory=given)
            if case.form == "any":
                only_read = blocks is self._send or (row.rooted == "bcast" and self._rank == case.root)
                copies = case.copies and only_read
                made.append(
                    blocks.named(rng, where, copies=copies, derived=self._derived, mpis=case.algorithm == "mpi")
                )
            else:
                made.append(self._with_arrays(blocks) if case.form == "arrays" else blocks.plain())
        send, receive = made
        in_place = None if case.seed % 2 else MPI.IN_PLACE  # mpi4py takes both
        if case.seed % 3 == 0 and row.reduces and row.send == "one":
            in_place = receive  # the same memory given twice
        if self._here and row.send == "by_recvcounts" and not (self.counts[self._rank] or case.mixed or case.seed % 5):
            return [receive, Placed(xp, np.zeros(0, case.dtype)).array]  # it receives nothing in either way
        if self._here:
            return [send, in_place] if row.rooted == "send" else [in_place, receive]
        if case.form == "any":  # what a rank that is not the root passes for the root's buffer is ignored
            send = one_of(rng, JUNK) if row.rooted == "send" and self._send is None else send
            receive = one_of(rng, JUNK) if row.rooted == "receive" and self._receive is None else receive
        return [send, receive]

    def _with_arrays(self, blocks: Blocks) -> list[Any]:
        dtype = (np.int32, np.int64)[self.case.seed // 2 % 2]
        numbers = self._xp.asarray(blocks.lengths, dtype)
        if blocks is self._receive and self._xp is not np:
            numbers = self._came = self._xp.full(self._size, -1, dtype)
        displs = self._xp.asarray(blocks.starts) if self.case.seed % 2 else blocks.starts
        return [blocks.placed.array, (numbers, displs)]

    def _where(self) -> list[Any]:
        """Return the module that has the memory of each buffer, None for a buffer that lies nowhere."""
        case, row, xp, rng = self.case, self.case.row, self._xp, self._rng
        pair = [self._send, self._receive]
        if not case.mixed:
            return [xp, xp]
        shared = np.random.default_rng([case.seed, 7])  # the same on all ranks
        joins = self._rank in shared.permutation(self._size)[: int(shared.integers(self._size))]
        common = {"receive": pair[:1], "send": pair[1:]}.get(row.rooted, pair)
        deciding = [each for each in common if each is not None] or [each for each in pair if each is not None]
        if row.counts == "same":  # an empty recvbuf of Reduce_scatter leaves the choice to sendbuf
            deciding = [each for each in deciding if not each.is_empty] or deciding
        sure = one_of(rng, deciding)  # one of the buffers that decide lies on the GPU, or nowhere
        found: list[Any] = []
        for blocks in pair:
            is_empty = blocks is not None and blocks.is_empty
            lies = one_of(rng, ("gpu", "host", "nowhere" if is_empty else "gpu"))
            empty_of_all = row.counts == "same" and is_empty
            if case.mixed == "host":
                is_roots = row.rooted in ("send", "receive") and blocks not in common and not self._here
                lies = lies if is_roots or lies == "nowhere" else "host"
            else:
                if lies == "host" and case.algorithm != "mpi" and (blocks is sure or empty_of_all):
                    lies = "gpu"
                if lies == "gpu" and joins and not empty_of_all:
                    lies = "host"
            found.append({"gpu": xp, "host": np, "nowhere": None}[lies])
        return found


def _difference(actual: Array, expected: Array) -> str:
    where = np.flatnonzero(actual != expected)
    first = where[0] if where.size else 0
    return f"{where.size} of {actual.size} differ, first at {first}: {actual[first]!r} instead of {expected[first]!r}"


def require_works(comm: mpicomm.Communicator, xp: Any) -> None:
    """Assert that a sum works, by the default algorithm and by one_shot. Collective."""
    for algorithm in ("auto", "one_shot"):
        prepared = Prepared(
            Case("Allreduce", np.dtype(np.float32), 1001, algorithm=algorithm), comm.rank, comm.size, xp
        )
        prepared.run(comm)
        comm.check()
        prepared.check()


def compile_reductions(comm: mpicomm.Communicator, names: Sequence[str]) -> None:
    """Compile the reductions that a GPU needs for these types; the ranks share them out. Collective."""
    if comm.device == "cpu":
        return
    from mpicomm.collectives.gpu.algorithms.chunks.plan import exchange_kernel
    from mpicomm.collectives.gpu.algorithms.packets.arguments import ll_can_carry, packet_kernel
    from tests.helpers.inputs.kernel_sources import compile_kernel

    capability = comm._session.gpu("compile_reductions").info.compute_capability
    variants = []
    for pair in ((name, op) for name in names for op in legal_ops(name)):
        variants.append(exchange_kernel(pair))
        for fan_out in (False, True):
            sentinel = partial(packet_kernel, pair, comm.size, "sentinel", fan_out=fan_out)
            variants += [sentinel("one"), sentinel("few"), sentinel("laps")]
            if ll_can_carry(pair[0]):
                ll = partial(packet_kernel, pair, comm.size, "ll", fan_out=fan_out)
                variants += [ll("one"), ll("few")]
    with ThreadPoolExecutor() as pool:
        mine = variants[comm.rank :: comm.size]
        for future in [pool.submit(compile_kernel, each.source, capability, each.options) for each in mine]:
            future.result()
    comm.Barrier()
