"""Messages with counts on the device between the ranks of a machine, with the arguments that the package makes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.gpu.algorithms.packets.configs import PacketConfig
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.collectives.gpu.counted_template import CountedTemplate
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import ABSENT
from mpicomm.mpi.device_counts import CountedBuffer, CountedBuffers, DeviceIndices
from tests.helpers.references.reductions import require_same
from tests.kernels.machine import Array, Place
from tests.kernels.rig import SMALL, Rig

UNTOUCHED = 0xAB


@dataclass(frozen=True)
class CountedCall:
    """The call of all ranks: rank a sends ``counts[a][b]`` elements to rank b."""

    counts: Array
    send_displs: Array | None = None
    """The displacements of each rank's blocks; None if each block follows the block before."""
    receive_displs: Array | None = None
    room: int | None = None
    """The elements of each output; None for as many as come."""
    dtype: npt.DTypeLike = np.float32
    wide: tuple[bool, bool] = (False, True)
    """Whether the counts to send, and the counts that come, have 64 bits."""
    host_displs: bool = False
    escaped: bool = False
    """Whether all words of the messages are `ABSENT`, so that every packet needs an escape."""
    tag: int = 5


class CountedRig(Rig):
    """A rig of packets, on which each rank fills its calls into the templates of their kinds."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.results: Sequence[Place] = ()
        """The outputs of the last call."""
        self._templates: dict[Hashable, CountedTemplate] = {}

    def call(
        self, call: CountedCall, rng: np.random.Generator, *, nap_us: int = 0, without: Sequence[int] = ()
    ) -> Callable[[], None]:
        """Enqueue a call on all ranks, except the ranks ``without``; return a check of its results."""
        ranks, counts = range(self.size), call.counts
        dtype = np.dtype(call.dtype)
        checks = []
        content = _absent if call.escaped else partial(_content, rng)
        blocks = [[content(int(max(0, counts[a][b])), dtype) for b in ranks] for a in ranks]
        for rank in ranks:
            starts = _starts(counts[rank]) if call.send_displs is None else call.send_displs[rank]
            size = max([0, *(int(s + max(0, n)) for s, n in zip(starts, counts[rank], strict=True))])
            data = np.zeros(size, dtype)
            for start, block in zip(starts, blocks[rank], strict=True):
                data[start : start + len(block)] = block
            coming = counts[:, rank]
            places = _starts(coming) if call.receive_displs is None else call.receive_displs[rank]
            end = max([0, *(int(s + n) for s, n in zip(places, coming, strict=True))])
            room = end if call.room is None else call.room
            output = self.machine.place(rank, np.full(room * dtype.itemsize, UNTOUCHED, np.uint8), offset=4)
            said = self.machine.allocate(rank, self.size * (8 if call.wide[1] else 4))
            buffers = CountedBuffers(
                self._buffer(rank, self.machine.place(rank, data, offset=8).address, size, dtype,
                             self._indices(rank, counts[rank], wide=call.wide[0]), call, call.send_displs),
                self._buffer(rank, output.address, room, dtype,
                             DeviceIndices(said.address, call.wide[1], said.bytes.nbytes), call, call.receive_displs),
            )  # fmt: skip
            if rank not in without:
                made = self._launch(rank, buffers, call)
                late = int(rng.integers(nap_us)) if nap_us else 0
                self.enqueue(rank, made, nap_us=late)
            expected = np.full(room * dtype.itemsize, UNTOUCHED, np.uint8).view(dtype)
            for source, start in enumerate(places if room >= end and min(places) >= 0 else ()):
                block = blocks[source][rank]
                expected[start : start + len(block)] = block
            checks.append((output, expected, said, coming))

        def check() -> None:
            for output, expected, said, coming in checks:
                require_same(output.view(np.uint8), expected.view(np.uint8))
                require_same(
                    said.view(np.int64 if call.wide[1] else np.int32).astype(np.int64), coming.astype(np.int64)
                )

        self.results = [output for output, *_ in checks]
        return check

    def _launch(self, rank: int, buffers: CountedBuffers, call: CountedCall) -> Launch:
        plain = [_plain(side) for side in (buffers.send, buffers.receive)]
        key = rank, call.dtype, call.wide, call.tag, *(type(displs) for *_, displs in plain)
        if key not in self._templates:
            loader: Any = SimpleNamespace(enqueuers=lambda steps: [lambda stream, step=step: step for step in steps])
            signature = Signature("Alltoallv", f"elements of {buffers.itemsize} bytes", call.tag)
            domain = self.domains[rank]
            config = PacketConfig.of("sentinel", domain.arena.sentinels, SMALL)
            self._templates[key] = CountedTemplate(signature, buffers, domain, loader, lambda _: config)
        template = self._templates[key]
        assert template.takes(*plain) and template.fill(*plain)
        launch: Any = template.launch
        return cast(Launch, launch(7))

    def _indices(self, rank: int, values: Array, *, wide: bool) -> DeviceIndices:
        place = self.machine.place(rank, np.asarray(values, np.int64 if wide else np.int32))
        return DeviceIndices(place.address, wide, place.bytes.nbytes)

    def _buffer(
        self,
        rank: int,
        pointer: int,
        room: int,
        dtype: np.dtype[Any],
        counts: DeviceIndices,
        call: CountedCall,
        displs: Array | None,
    ) -> CountedBuffer:
        operand = SimpleNamespace(pointer=pointer, total=room, dtype=dtype)
        known: Any = None
        if displs is not None:
            known = tuple(map(int, displs[rank])) if call.host_displs else self._indices(rank, displs[rank], wide=True)
        return CountedBuffer(cast(Any, operand), counts, known)


def _plain(side: CountedBuffer) -> tuple[Any, ...]:
    displs = side.displs.pointer if isinstance(side.displs, DeviceIndices) else side.displs
    return side.pointer, side.room, None, side.counts.pointer, displs


def _starts(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(np.maximum(counts, 0))[:-1]])


def _content(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> Array:
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype)


def _absent(count: int, dtype: np.dtype[Any]) -> Array:
    nbytes = count * dtype.itemsize
    return np.full(-(-nbytes // 4), ABSENT, np.uint32).view(np.uint8)[:nbytes].view(dtype)
