"""Collectives whose ranks name their buffers in different forms, and the same calls of plain mpi4py on host arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.rigs.call_forms import complete, method_name

Array = npt.NDArray[Any]

NAMES = tuple(name for name, row in OPERATIONS.items() if not row.of_neighbors)
_INT = np.dtype(np.int32)
_MOST = 5


@dataclass(frozen=True)
class Gpu:
    """How a test makes and reads arrays on the GPU of a rank."""

    make: Callable[[Array], Any]
    read: Callable[[Any], Array]
    address: Callable[[Any], int]


class Buffer:
    """A buffer of one rank: its content, and the places of its blocks, in elements."""

    def __init__(
        self, content: Array, counts: Sequence[int] | None = None, places: Sequence[int] | None = None
    ) -> None:
        self.content = content
        self.counts, self.places = counts, places
        self.count = content.size
        """Elements of one block, in forms of equal blocks."""
        self.reduces = False
        """Whether the elements are reduced: then MPI takes only predefined types."""
        self.types: Sequence[Any] = ("i", "i4", MPI.INT32_T, MPI.INT)
        self.array: Any = None
        self.datatypes: list[MPI.Datatype] = []

    @property
    def is_empty(self) -> bool:
        """Whether no element is sent or received."""
        return not (sum(self.counts) if self.counts is not None else self.content.size)

    def plain(self, *, typed: bool) -> Any:
        """The argument for plain mpi4py, and the array in it."""
        array = self.content.copy()
        if self.counts is None or self.places is None:
            return array, [array, self.count, MPI.INT32_T]
        if typed:
            return array, [array, self.counts, [4 * n for n in self.places], [MPI.INT32_T] * len(self.counts)]
        return array, [array, self.counts, self.places, MPI.INT32_T]

    def drawn(self, rng: np.random.Generator, gpu: Gpu | None, *, typed: bool) -> Any:
        """An argument in any form, on a GPU, or on the host if ``gpu`` is None."""
        self.array = self.content.copy() if gpu is None else gpu.make(self.content)
        memory = self.array
        if rng.integers(3) == 0:
            address = self.array.ctypes.data if gpu is None else gpu.address(self.array)
            # Libraries name the address, or the address and the length.
            memory = MPI.memory.fromaddress(address, self.content.nbytes)
        return self._spec(rng, memory, typed=typed)

    def nowhere(self, rng: np.random.Generator, *, typed: bool) -> Any:
        """An argument that names no memory."""
        return self._spec(rng, None if rng.integers(2) else MPI.memory.fromaddress(0, 0), typed=typed)

    def received(self, gpu: Gpu | None) -> Array:
        """The content after the call."""
        if self.array is None:
            return self.content
        return self.array if gpu is None or isinstance(self.array, np.ndarray) else gpu.read(self.array)

    def _spec(self, rng: np.random.Generator, memory: Any, *, typed: bool) -> Any:
        if typed:
            return self._typed(rng, memory)
        datatype: Any = self.types[int(rng.integers(len(self.types)))]
        if not self.reduces and rng.integers(4) == 0:
            datatype = self._made(MPI.INT32_T.Dup())
        if not self.reduces and rng.integers(5) == 0:
            return self._bytes(memory)
        named = memory is None or isinstance(memory, MPI.buffer)
        if self.counts is not None and self.places is not None:
            counts: Any = self.counts if rng.integers(2) else tuple(self.counts)
            forms = [[memory, counts, self.places, datatype], [memory, (self.counts, self.places), datatype]]
            if not named:
                forms.append([memory, (self.counts, self.places)])
            return forms[int(rng.integers(len(forms)))]
        forms = [[memory, self.count, datatype], [memory, (self.count, 0), datatype]]
        if self.count and not self.reduces:
            forms.append([memory, 1, self._made(MPI.INT32_T.Create_contiguous(self.count))])
        if not named:
            forms += [memory, [memory, datatype], [memory, self.count]]
        return forms[int(rng.integers(len(forms)))]

    def _bytes(self, memory: Any) -> Any:
        """The argument as bytes, which is another type for the same elements."""
        if self.counts is not None and self.places is not None:
            return [memory, [4 * n for n in self.counts], [4 * n for n in self.places], MPI.BYTE]
        return [memory, 4 * self.count, MPI.BYTE]

    def _typed(self, rng: np.random.Generator, memory: Any) -> Any:
        assert self.counts is not None and self.places is not None
        counts, types = [], []
        for n in self.counts:
            if n and rng.integers(2):
                counts.append(1)
                spread = [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [1]
                whole = rng.integers(2)
                made = MPI.INT32_T.Create_contiguous(n) if whole else MPI.INT32_T.Create_darray(1, 0, [n], *spread)
                types.append(self._made(made))
            else:
                counts.append(n)
                types.append(MPI.INT32_T if n else (MPI.DOUBLE, MPI.INT, MPI.SHORT_INT)[int(rng.integers(3))])
        return [memory, (counts, [4 * place for place in self.places]), types]

    def _made(self, datatype: MPI.Datatype) -> MPI.Datatype:
        self.datatypes.append(datatype.Commit())
        return datatype


class Call:
    """One rank's part of a call that ``seed`` draws. All but the forms of the buffers is the same on all ranks.

    If MPI carries out the call, some ranks may pass only host arrays.
    """

    def __init__(self, name: str, form: str, seed: int, rank: int, size: int, gpu: Gpu, *, by_mpi: bool) -> None:
        self._row = OPERATIONS[name]
        self.method = method_name(form, name)
        self._plain_name = name
        self._by_mpi = by_mpi
        self._rank, self._size, self._gpu = rank, size, gpu
        self._rng = np.random.default_rng([seed, rank])  # draws of this rank only
        shared = np.random.default_rng(seed)
        self._n = [int(shared.integers(1, _MOST)) * int(shared.integers(3) > 0) for _ in range(size)]
        self._table = shared.integers(0, _MOST, (size, size)) * (shared.integers(0, 3, (size, size)) > 0)
        self._table[shared.integers(size)] *= int(shared.integers(2))
        self._same = int(shared.integers(0, _MOST))
        self._root = int(shared.integers(size))
        self._gap = int(shared.integers(3))
        self._content = np.random.default_rng([seed, rank, 1])
        self.send, self.receive = self._buffers()
        for buffer in (self.send, self.receive):
            if buffer is not None:
                buffer.reduces = self._row.reduces
                if by_mpi and buffer.reduces:  # mpi4py takes only one type of MPI in both buffers of a reduction
                    buffer.types = ("i", MPI.INT)

    def expected(self, comm: MPI.Intracomm) -> Array | None:
        """Return the content of this rank's receive buffer after the call of plain mpi4py. Collective."""
        typed = self._row.send == "typed"
        sent = None if self.send is None else self.send.plain(typed=typed)[1]
        array, received = (None, None) if self.receive is None else self.receive.plain(typed=typed)
        getattr(comm, self._plain_name)(*self._arguments(sent, received))
        return array

    def run(self, comm: Any) -> Array | None:
        """Make the call; return the content of the receive buffer after it. Collective."""
        arguments = self._arguments(*self._drawn())
        complete(getattr(comm, self.method)(*arguments, algorithm="mpi" if self._by_mpi else "auto"))
        for buffer in (self.send, self.receive):
            for datatype in buffer.datatypes if buffer is not None else ():
                datatype.Free()
        return None if self.receive is None else self.receive.received(self._gpu)

    def _arguments(self, send: Any, receive: Any) -> list[Any]:
        row = self._row
        buffers = [receive] if row.rooted == "bcast" else [send, receive]
        return [
            *buffers,
            *([self._n] if row.send == "counted" else []),
            *([MPI.SUM] if row.reduces else []),
            *([self._root] if row.rooted else []),
        ]

    def _drawn(self) -> list[Any]:
        """Draw the form and the memory of each buffer. Without MPI, this rank's buffers put the call on GPUs."""
        typed = self._row.send == "typed"
        pair = [self.send, self.receive]
        common = {"receive": [self.send], "send": [self.receive]}.get(self._row.rooted, pair)
        deciding = [each for each in common if each is not None]
        if self._row.counts == "same":  # an empty recvbuf of Reduce_scatter leaves the choice to sendbuf
            deciding = [each for each in deciding if not each.is_empty] or deciding
        # One of the buffers that decide lies on the GPU, or one of them nowhere.
        sure = deciding[int(self._rng.integers(len(deciding)))]
        made: list[Any] = []
        for buffer in pair:
            if buffer is None:
                made.append(None)
                continue
            lies = ("gpu", "host", "nowhere" if buffer.is_empty else "gpu")[int(self._rng.integers(3))]
            empty_of_all = self._row.counts == "same" and buffer.is_empty
            if lies == "host" and not self._by_mpi and (buffer is sure or empty_of_all):
                lies = "gpu"
            if lies == "nowhere":
                made.append(buffer.nowhere(self._rng, typed=typed))
            else:
                made.append(buffer.drawn(self._rng, self._gpu if lies == "gpu" else None, typed=typed))
        return made

    def _buffers(self) -> tuple[Buffer | None, Buffer | None]:
        row, rank, size, at_root = self._row, self._rank, self._size, self._rank == self._root
        n, same = self._n, self._same
        if row.send in ("vector", "typed") and row.receive in ("vector", "typed"):
            return self._blocks(self._table[rank].tolist()), self._blocks(self._table[:, rank].tolist())
        if row.send == "counted":
            return Buffer(self._values(sum(n))), Buffer(self._values(n[rank]))
        if "vector" in (row.send, row.receive):
            whole, one = self._blocks(n), Buffer(self._values(n[rank]))
            if row.rooted == "send":
                return whole if at_root else None, one
            return one, whole if at_root or not row.rooted else None
        buffers = []
        for shape, alone in ((row.send, row.rooted == "send"), (row.receive, row.rooted == "receive")):
            buffer = Buffer(self._values(same * (size if shape == "blocks" else 1)))
            buffer.count = same
            buffers.append(None if alone and not at_root else buffer)
        return (None, buffers[1]) if row.rooted == "bcast" else (buffers[0], buffers[1])

    def _values(self, count: int) -> Array:
        return self._content.integers(-99, 99, count).astype(_INT)

    def _blocks(self, counts: Sequence[int]) -> Buffer:
        places, end = [], 0
        for count in counts:
            places.append(end)
            end += count + self._gap
        empty = not sum(counts)
        return Buffer(self._values(0 if empty else end), list(counts), [0] * len(counts) if empty else places)
