"""Calls of a communicator's collectives on any device, in every form of argument, and the check of their buffers.

The package's table tells the arguments and the shapes of buffers of a collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.gpu.algorithms.registry import names_for
from mpicomm.collectives.host.selection import algorithms_for
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.mpi import types
from tests.helpers.inputs.buffers import Placed, values
from tests.helpers.references.coded import coded_sum, through_codes
from tests.helpers.references.reductions import OWN, Array, Groups, reduced, require_same

_MPI_OPS = ("sum", "prod", "max", "min", "land", "lor", "lxor", "band", "bor", "bxor")
OPS: dict[str, MPI.Op] = {name: getattr(MPI, name.upper()) for name in _MPI_OPS} | {"avg": mpicomm.AVG}
# They do not commute, although they say so. So groups of ranks that do not follow each other take them, too.
OPS |= {text: mpicomm.Op(text, commute=True) for text in OWN}

REDUCTIONS = tuple(name for name, row in OPERATIONS.items() if row.reduces)
OF_ONE_TYPE = tuple(name for name, row in OPERATIONS.items() if row.send != "typed" and not row.of_neighbors)
"""The collectives between all ranks whose buffers have one datatype each."""
MOVEMENTS = tuple(name for name in OF_ONE_TYPE if not OPERATIONS[name].reduces)
FORMS = ("plain", "counted", "typed", "displaced", "four", "fortran")


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


@dataclass(frozen=True)
class Case:
    """One collective call, as all ranks know it. ``count`` is the count of a block; vector calls have ragged blocks."""

    operation: str
    dtype: np.dtype[Any]
    count: int
    op: str = "sum"
    root: int = 0
    form: str = "plain"
    """One of `FORMS`; or "arrays" for an Alltoallv whose counts and displacements are arrays where the buffers are."""
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
    wire: str | None = None
    """The codes as which elements travel."""

    @property
    def row(self) -> Operation:
        """The collective's row in the table."""
        return OPERATIONS[self.operation]


Argument = int | list[tuple[int, int]] | MPI.InPlaceType | None
"""An argument: a buffer with this count, or with blocks in these places, or none."""


class Prepared:
    """This rank's part of a case: its buffers, its arguments, and the check of its result.

    Its receive buffer lies in ``memory``, or in memory of its own.
    """

    def __init__(self, case: Case, rank: int, size: int, xp: Any, memory: Any = None) -> None:
        self._rank, self._size, self._xp = rank, size, xp
        self._came: Any = None
        """The array into which a call with counts on the GPU writes the counts."""
        self._plan(case)
        self._buffers = [
            None
            if content is None
            else Placed(xp, content, offset=case.offset, fortran=case.form == "fortran", memory=place)
            for content, place in zip(self._contents, (None, memory), strict=True)
        ]

    def run(self, comm: mpicomm.Communicator) -> None:
        """Call the blocking method."""
        self._call(comm, self.case.operation)

    def start(self, comm: mpicomm.Communicator) -> MPI.Request:
        """Call the nonblocking method."""
        request: MPI.Request = self._call(comm, "I" + self.case.operation.lower())
        return request

    def prepare(self, comm: mpicomm.Communicator) -> MPI.Prequest:
        """Call the method that makes a persistent request."""
        request: MPI.Prequest = self._call(comm, self.case.operation + "_init")
        return request

    def arguments(self) -> list[Any]:
        """Return the arguments for the two buffers."""
        return [self._argument(*each) for each in zip(self._arguments, self._buffers, strict=True)]

    def renew(self, seed: int) -> None:
        """Put the values of another seed into the same buffers."""
        self._plan(replace(self.case, seed=seed))
        for buffer, content in zip(self._buffers, self._contents, strict=True):
            if buffer is not None and content is not None:
                buffer.set(content)

    def result(self) -> Array | None:
        """Return this rank's result, or None if the rank receives nothing."""
        buffer, expected = self._buffers[1], self._expected
        return None if buffer is None or expected is None else buffer.get()[self._pad : self._pad + expected.size]

    def check(self) -> None:
        """Assert that this rank's result is right, and that nothing else in its buffers has changed."""
        try:
            self._check()
        except AssertionError as error:
            raise AssertionError(f"{self.case} on rank {self._rank} of {self._size}: {error}") from None

    def _call(self, comm: mpicomm.Communicator, method: str) -> Any:
        case = self.case
        send, receive = self.arguments()
        given: dict[str, Any] = {"buf": receive, "sendbuf": send, "recvbuf": receive, "op": OPS[case.op]}
        given |= {"root": case.root, "recvcounts": self._counts}
        if case.form == "plain" and not case.in_place:
            del given["recvcounts"]  # then the ranks tell each other the counts
        positional = [given.pop(name) for name in case.row.arguments if name.endswith("buf")]
        keywords = {name: given[name] for name in case.row.arguments if name in given}
        if case.algorithm != "auto":
            keywords["algorithm"] = case.algorithm
        if case.wire is not None:
            keywords["wire_dtype"] = case.wire
        return getattr(comm, method)(*positional, **keywords)

    def _argument(self, argument: Argument, buffer: Placed | None) -> Any:
        if argument is MPI.IN_PLACE and self.case.seed % 2:
            return None  # as in mpi4py
        if argument is None or buffer is None:
            return argument
        form, array = self.case.form, buffer.array
        dtype: Any = types.mpi_datatype(self.case.dtype) or self.case.dtype.name
        if form == "typed":
            return [array, dtype]
        if form in ("plain", "fortran"):
            return array
        count: Any = argument
        displ: Any = self._pad
        if isinstance(argument, list):
            count, displ = [n for n, _ in argument], [start + self._pad for _, start in argument]
        if form == "arrays":
            dtype = (np.int32, np.int64)[self.case.seed // 2 % 2]
            numbers = self._xp.asarray(count, dtype)
            if buffer is self._buffers[1] and self._xp is not np:
                numbers = self._came = self._xp.full(self._size, -1, dtype)
            return [array, (numbers, self._xp.asarray(displ) if self.case.seed % 2 else displ)]
        if form == "counted":
            return [array, (count, displ)] if isinstance(argument, list) else [array, count]
        return [array, (count, displ), dtype] if form == "displaced" else (array, count, displ, dtype)

    def _check(self) -> None:
        case, (sent, before), (send, receive) = self.case, self._contents, self._buffers
        if send is not None and sent is not None:
            assert send.get().tobytes() == sent.tobytes(), "the send buffer has changed"
        if receive is None or before is None:
            return
        if self._came is not None:
            places: Any = self._arguments[1]
            assert self._came.get().tolist() == [count for count, _ in places], "the counts are wrong"
        after, pad = receive.get(), self._pad
        assert after[:pad].tobytes() == before[:pad].tobytes(), "elements before the displacement have changed"
        expected = before[pad : before.size - pad] if self._expected is None else self._expected
        # MPI leaves the rest of the input of a reduce-scatter in place undefined.
        if not (case.in_place and case.row.reduces and case.row.send != "one"):
            stop = pad + expected.size
            assert after[stop:].tobytes() == before[stop:].tobytes(), "elements after the count have changed"
        actual = after[pad : pad + expected.size]
        if not case.row.reduces and case.wire is None:
            assert actual.tobytes() == expected.tobytes(), _difference(actual, expected)
        elif case.wild or case.wire is not None:
            require_same(actual, expected)
        else:
            assert np.array_equal(actual, expected), _difference(actual, expected)

    def _plan(self, case: Case) -> None:
        """Compute the contents of the buffers, the arguments and the result. The form decides whether blocks differ."""
        self.case = case
        self._even = case.form in ("plain", "typed", "fortran")  # these forms have no counts, so blocks are equal
        self._pad = 3 if case.form in ("displaced", "four") else 0
        self._counts = [self._ragged(rank) for rank in range(self._size)]
        if case.in_place and case.row.send == "counted" and case.algorithm == "mpi":
            # MPICH 5 ends the program when it moves a block that overlaps its result at the start; sorted, none does.
            self._counts.sort(reverse=True)
        self._expected: Array | None
        self._arguments: tuple[Argument, Argument]
        shapes = (case.row.send, case.row.receive)
        if shapes == ("vector", "vector"):
            send, receive = self._plan_alltoallv()
        elif "vector" in shapes:
            send, receive = self._plan_vector()
        else:
            send, receive = self._plan_plain()
        self._contents = (self._padded(send, 98), self._padded(receive, 99))

    def _plan_plain(self) -> tuple[Array | None, Array | None]:
        case, rank, size, n = self.case, self._rank, self._size, self.case.count
        row, at_root = case.row, self._rank == self.case.root
        sends = receives = n  # the counts of the two buffers, in forms that have a count: the counts of a block
        total, room = n * size if row.send == "blocks" else n, n * size if row.receive == "blocks" else n
        if row.send == "counted":
            sends = total = sum(self._counts)
            receives = room = self._counts[rank]
        sent = [self._values(total, peer) for peer in range(size)]
        before = self._values(room, rank, 7)
        self._expected = self._received(sent, before)
        if row.rooted == "bcast":
            self._arguments = (None, n)
            return None, sent[rank]
        if row.rooted and not at_root:
            gives = row.rooted == "receive"
            self._arguments = (n, None) if gives else (None, n)
            return (sent[rank], None) if gives else (None, before)
        if not case.in_place:
            self._arguments = (sends, receives)
            return sent[rank], before
        if row.rooted == "send":
            self._expected = None
            self._arguments = (n, MPI.IN_PLACE)
            return sent[rank], None
        self._arguments = (MPI.IN_PLACE, sends)
        if row.send == "one" and row.receive == "blocks":
            before[rank * n : (rank + 1) * n] = sent[rank]
            return None, before
        return None, sent[rank]

    def _received(self, sent: list[Array], before: Array) -> Array | None:
        """Return this rank's result, in a buffer that holds ``before``, or None if it receives nothing."""
        case, rank, size, root = self.case, self._rank, self._size, self.case.root
        if case.row.reduces and {"Scan": rank + 1, "Exscan": rank}.get(case.operation, size) == 1:
            alone: Array = sent[0].copy()  # a single contribution is the result, even if x / 1 is not x
            return alone
        if case.wire is not None and size > 1:
            return self._coded(sent, case.wire)
        result: dict[str, Callable[[], Array | None]] = {
            "Allreduce": lambda: reduced(case.op, sent, case.groups),
            "Reduce": lambda: reduced(case.op, sent, case.groups) if rank == root else None,
            "Reduce_scatter": lambda: np.split(reduced(case.op, sent, case.groups), np.cumsum(self._counts)[:-1])[rank],
            "Reduce_scatter_block": lambda: np.split(reduced(case.op, sent, case.groups), size)[rank],
            "Scan": lambda: reduced(case.op, sent[: rank + 1]),
            "Exscan": lambda: reduced(case.op, sent[:rank]) if rank else sent[0] if case.in_place else before.copy(),
            "Allgather": lambda: np.concatenate(sent),
            "Alltoall": lambda: np.concatenate([np.split(each, size)[rank] for each in sent]),
            "Bcast": lambda: sent[root],
            "Gather": lambda: np.concatenate(sent) if rank == root else None,
            "Scatter": lambda: np.split(sent[root], size)[rank],
        }
        return result[case.operation]()

    def _coded(self, sent: list[Array], codes: str) -> Array:
        """Return this rank's result if elements travel as codes."""
        case, rank, n = self.case, self._rank, self.case.count
        if case.operation == "Allgather":
            return np.concatenate([through_codes(part, codes).astype(case.dtype) for part in sent])
        if case.operation == "Allreduce":
            return coded_sum(sent, codes, case.op)
        return coded_sum([part[rank * n : (rank + 1) * n] for part in sent], codes, case.op, again=False)

    def _plan_vector(self) -> tuple[Array | None, Array | None]:
        case, rank, size, root = self.case, self._rank, self._size, self.case.root
        at_root = rank == root
        share, more = divmod(case.count, size)
        each = [share + (peer < more) for peer in range(size)] if self._even else self._counts
        places = self._places(each)
        extent = _extent(places)
        if case.row.rooted == "send":
            whole = self._values(extent, root)
            in_place = case.in_place and at_root
            self._expected = None if in_place else _taken(whole, places[rank])
            self._arguments = (places if at_root else None, MPI.IN_PLACE if in_place else each[rank])
            return whole if at_root else None, None if in_place else self._values(each[rank], rank, 7)
        sent = [self._values(each[peer], peer) for peer in range(size)]
        takes = at_root or not case.row.rooted
        before = self._values(extent, size, 7)
        self._expected = _put(sent, places, before) if takes else None
        if case.in_place and takes:
            self._arguments = (MPI.IN_PLACE, places)
            return None, _put([sent[rank]], [places[rank]], before)
        self._arguments = (each[rank], places if takes else None)
        return sent[rank], before if takes else None

    def _plan_alltoallv(self) -> tuple[Array | None, Array | None]:
        case, rank, everyone = self.case, self._rank, range(self._size)

        def count(sender: int, receiver: int) -> int:
            if self._even:
                return case.count
            return self._ragged(*(sorted((sender, receiver)) if case.in_place else (sender, receiver)))

        incoming = [self._places([count(a, b) for a in everyone]) for b in everyone]
        outgoing = incoming if case.in_place else [self._places([count(a, b) for b in everyone]) for a in everyone]
        sent = [self._values(_extent(outgoing[a]), a) for a in everyone]
        before = sent if case.in_place else [self._values(_extent(incoming[b]), b, 7) for b in everyone]
        blocks = [_taken(sent[sender], outgoing[sender][rank]) for sender in everyone]
        self._expected = _put(blocks, incoming[rank], before[rank])
        self._arguments = (MPI.IN_PLACE if case.in_place else outgoing[rank], incoming[rank])
        return None if case.in_place else sent[rank], before[rank]

    def _values(self, count: int, *key: int) -> Array:
        case = self.case
        if case.wire is not None:  # numbers of which codes round most
            tame = values(case.dtype, count, case.seed, *key).astype(np.float32)
            numbers: Array = (tame * np.geomspace(1e-3, 1e3, count, dtype=np.float32)).astype(case.dtype)
            return numbers
        return values(case.dtype, count, case.seed, *key, wild=case.wild or not case.row.reduces)

    def _ragged(self, *where: int) -> int:
        n = self.case.count
        return (n, 0, n // 2, n + 3)[zlib.crc32(repr((n, where)).encode()) % 4] if n else 0

    def _places(self, counts: list[int]) -> list[tuple[int, int]]:
        """Return the places of blocks: packed if the form has no counts, else in reverse order and with gaps."""
        places: list[tuple[int, int]] = []
        start = 0
        for count in counts if self._even else reversed(counts):
            places.append((count, start))
            start += count + (0 if self._even else 2)
        return places if self._even else places[::-1]

    def _padded(self, content: Array | None, key: int) -> Array | None:
        if content is None or not self._pad:
            return content
        ends = self._values(2 * self._pad, key)
        return np.concatenate((ends[: self._pad], content, ends[self._pad :]))


def _taken(array: Array, place: tuple[int, int]) -> Array:
    count, start = place
    taken: Array = array[start : start + count].copy()
    return taken


def _put(blocks: Sequence[Array], places: Sequence[tuple[int, int]], old: Array) -> Array:
    """Return a copy of ``old`` with the blocks in these places."""
    new: Array = old.copy()
    for block, (count, start) in zip(blocks, places, strict=True):
        assert block.size == count, f"{block.size} elements in a place for {count}"
        new[start : start + count] = block
    return new


def _extent(places: list[tuple[int, int]]) -> int:
    return max((start + count for count, start in places), default=0)


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
    from mpicomm.collectives.gpu.algorithms.packets.arguments import flags_can_carry, packet_kernel
    from mpicomm.devices.cuda.compile import compile_kernel

    capability = comm._session.gpu("compile_reductions").info.compute_capability
    variants = []
    for pair in ((name, op) for name in names for op in legal_ops(name)):
        variants.append(exchange_kernel(pair))
        for fan_out in (False, True):
            sentinel = partial(packet_kernel, pair, comm.size, "sentinel", fan_out=fan_out)
            variants += [sentinel("one"), sentinel("few"), sentinel("laps")]
            if flags_can_carry(pair[0]):
                flagged = partial(packet_kernel, pair, comm.size, "flagged", fan_out=fan_out)
                variants += [flagged("one"), flagged("few")]
    with ThreadPoolExecutor() as pool:
        mine = variants[comm.rank :: comm.size]
        for future in [pool.submit(compile_kernel, each.source, capability, each.options) for each in mine]:
            future.result()
    comm.Barrier()
