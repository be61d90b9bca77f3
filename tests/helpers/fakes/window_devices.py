"""A double of a GPU for tests of windows: a `ThreadDevice` that carries out the kernels of windows in Python."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.host.reduction import Reducer
from mpicomm.devices.base import Launch
from mpicomm.devices.handle import Descriptor
from mpicomm.devices.host import array_at, fence
from mpicomm.devices.host_memory import HostSegment, map_shared, memfd_create
from mpicomm.kernels.packing import PackTable
from mpicomm.kernels.team import Faults
from mpicomm.kernels.variant import Variant
from mpicomm.kernels.window import (
    EXCLUSIVE_SHIFT,
    LOCK,
    LOCK_ROW,
    ROW_WORDS,
    ROWS_OF_COUNTS,
    AccumulateArguments,
    SwapArguments,
    SynchronisationArguments,
    lock_of,
)
from mpicomm.mpi import descriptors
from mpicomm.mpi.types import covered_dtype
from mpicomm.windows.buffers import kernel_types
from tests.helpers.fakes import fake_driver
from tests.helpers.fakes.message_devices import DeviceArray, ThreadDevice
from tests.helpers.references.reference_packing import runs_of

_BYTE, _WORD = np.dtype(np.uint8), np.dtype(np.uint64)


class SharedArray(DeviceArray):
    """A `DeviceArray` in memory that other ranks can open, with methods of CuPy's arrays."""

    def __init__(self, device: WindowDevice, memory: npt.NDArray[Any], fd: Descriptor) -> None:
        self._device: WindowDevice = device
        self.memory, self.dtype, self.itemsize, self.fd = memory, memory.dtype, memory.itemsize, fd
        self.__cuda_array_interface__ = fake_driver.interface(memory)
        device.shared.add(self)

    def __getitem__(self, where: slice) -> SharedArray:
        return SharedArray(self._device, self.memory[where], self.fd)

    def __setitem__(self, where: Any, value: Any) -> None:
        self._device.enqueue(0, lambda: self.memory.__setitem__(where, value))

    def __array__(self, *options: Any, **named: Any) -> npt.NDArray[Any]:
        return self.get()

    def __add__(self, other: Any) -> SharedArray:
        return FakeCupy(self._device).array(self.get() + other)

    def __mul__(self, other: Any) -> SharedArray:
        return FakeCupy(self._device).array(self.get() * other)

    def __iadd__(self, other: Any) -> SharedArray:
        self._device.enqueue(0, lambda: np.add(self.memory, other, out=self.memory))
        return self


descriptors._readers[SharedArray] = descriptors._readers[DeviceArray]


def combine_pairs(op: str, now: Any, values: Any) -> None:
    """Replace each pair of ``now`` by the pair with the smaller or larger value; of equal values the smaller index."""
    wins = values["value"] < now["value"] if op == "minloc" else values["value"] > now["value"]
    wins |= (values["value"] == now["value"]) & (values["index"] < now["index"])
    now[wins] = values[wins]


class FakeCupy:
    """Makes arrays of a device as CuPy does."""

    def __init__(self, device: WindowDevice) -> None:
        self._device = device

    def array(self, values: Any, dtype: Any = None) -> SharedArray:
        content = np.array(values, dtype)
        fd = memfd_create(max(content.nbytes, 1))
        memory = map_shared(fd, 0, max(content.nbytes, 1))
        array = SharedArray(self._device, memory[: content.nbytes].view(content.dtype), fd)
        array.memory[:] = content
        self._device.own(memory)
        fake_driver.own(memory)
        return array

    asarray = array

    def __getattr__(self, name: str) -> Callable[..., SharedArray]:
        """Return `zeros`, `ones`, `full` or `arange`."""
        return lambda *arguments, **named: self.array(getattr(np, name)(*arguments, **named))


class WindowDevice(ThreadDevice):
    """Its kernels check what the kernels of a GPU need: alignment, memory of the device, kernels that are loaded."""

    multiprocessors = 4
    info = SimpleNamespace(compute_capability=(9, 0))

    def __init__(self, rank: int, timeout_s: float) -> None:
        super().__init__(rank, timeout_s)
        self.timeout_ns = int(timeout_s * 1e9)
        self.faults = Faults(0, 0)
        self.loaded: set[Variant] = set()
        self.launchers: list[Variant] = []
        self.graphs = 0
        self.shared: weakref.WeakSet[SharedArray] = weakref.WeakSet()
        self._tables: dict[int, PackTable] = {}

    def pack(self, table: PackTable, memory: int, packed: int, stream: int, *, unpacks: bool) -> None:
        self.load_packing(table)  # windows may load late: their kernels wait for no call that has yet to load
        super().pack(table, memory, packed, stream, unpacks=unpacks)

    def load(self, variant: Variant) -> object:
        self.loaded.add(variant)
        return variant

    def asarray(self, array: Any, name: str = "array") -> Any:
        assert isinstance(array, DeviceArray), name
        return array.memory

    def adopt(self, array: npt.NDArray[Any]) -> HostSegment:
        """Take the memory of a `SharedArray`, or a part of it."""
        found = next(each for each in self.shared if np.may_share_memory(each.memory, array))
        return HostSegment(array.view(np.uint8), fd=Descriptor.of(os.dup, found.fd))

    def view(self, segment: HostSegment, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        assert segment.content is not None
        return segment.content[: shape[0] * dtype.itemsize].view(dtype)

    def pointer_table(self, pointers: list[int]) -> Any:
        table = self.scratch(8 * len(pointers))
        array_at(table, len(pointers), _WORD)[:] = pointers
        return SimpleNamespace(data=SimpleNamespace(ptr=table))

    def pack_table(self, table: PackTable) -> int:
        self._tables[id(table)] = table
        return id(table)

    def launch(self, variant: Variant, arguments: ctypes.Structure, stream: int, *, blocks: int, threads: int) -> None:
        assert blocks > 0 and threads > 0
        given = type(arguments).from_buffer_copy(arguments)
        carriers: dict[str, Callable[[Any, Variant], None]] = {
            "mpicomm_window_synchronise": self._meet,
            "mpicomm_window_lock": self._lock,
            "mpicomm_accumulate": self._accumulate,
            "mpicomm_compare_and_swap": self._swap,
        }
        carry = carriers[variant.entry]
        if variant.entry.startswith("mpicomm_window"):
            assert variant in self.loaded, "a kernel that waits is loaded beforehand"

        def act() -> None:
            if self.missed is None:
                carry(given, variant)

        self.enqueue(stream, act)

    def launcher(self, variant: Variant, arguments: ctypes.Structure) -> Launch:
        self.load(variant)
        self.launchers.append(variant)
        return lambda stream, blocks, threads: self.launch(variant, arguments, stream, blocks=blocks, threads=threads)

    def graph_of(self, enqueue: Callable[[int], object]) -> Callable[[int], object]:
        self.graphs += 1

        def launch(stream: int) -> None:
            assert not self.capturing, "a graph in a capture"
            enqueue(stream)

        return launch

    def _meet(self, x: SynchronisationArguments, _: Variant) -> None:
        inbox, sent, expected = self._rows(x, x.rank)
        fence()
        for peer in _ranks(x.signals):
            sent[peer] += np.uint64(1)
            self._rows(x, peer)[0][x.rank] = sent[peer]
        for peer in _ranks(x.waits):
            target = int(expected[peer]) + 1
            if not self._wait(lambda: int(inbox[peer]) >= target):  # noqa: B023
                self.missed = f"operation {x.operation}: number {target} from rank {peer} did not come", peer
                return
            expected[peer] = target
        fence()

    def _lock(self, x: SynchronisationArguments, _: Variant) -> None:
        assert x.operation == LOCK
        mine = (x.rank + 1) << EXCLUSIVE_SHIFT if x.exclusive else 1 << x.rank
        for owner in _ranks(x.signals):
            with _alone():
                lock = lock_of(self._board_at(x, owner))
                assert lock.holders & mine, "gave up a lock that it did not hold"
                lock.holders &= ~mine
        for owner in _ranks(x.waits):
            lock = lock_of(self._board_at(x, owner))

            def take() -> bool:
                with _alone():
                    if (lock.holders if x.exclusive else lock.holders >> EXCLUSIVE_SHIFT) != 0:  # noqa: B023
                        return False
                    lock.holders |= mine  # noqa: B023
                    return True

            if not self._wait(take):
                self.missed = "operation 8: the lock is held", (lock.holders >> EXCLUSIVE_SHIFT) - 1
                return

    def _accumulate(self, x: AccumulateArguments, variant: Variant) -> None:
        named = dict(option[2:].split("=", 1) for option in variant.options if "=" in option and "-D" in option)
        name, op = named["MPICOMM_DTYPE"], named["MPICOMM_OP"]
        pairs = {name: dtype for dtype, name in kernel_types().items()}
        dtype = pairs[name] if name in pairs else covered_dtype(name.replace("boolean", "bool"))
        walk = x.walk
        one = [(int(walk.first.memory), 0, int(walk.first.run_nbytes))]
        runs = list(runs_of(self._tables[walk.regions])) if walk.regions else one
        assert walk.regions or walk.num_regions == 1
        with _alone():
            for start, packed, nbytes in runs:
                count = nbytes // dtype.itemsize
                assert count * dtype.itemsize == nbytes
                now = self._elements(walk.memory + start, count, dtype)
                if x.result:
                    self._elements(x.result + packed, count, dtype)[:] = now
                if op == "no_op":
                    continue
                values = self._elements(walk.packed + packed, count, dtype)
                if op == "replace":
                    now[:] = values
                elif name in pairs:
                    combine_pairs(op, now, values)
                else:
                    Reducer(op, dtype).reduce([now.copy(), values], now)

    def _swap(self, x: SwapArguments, variant: Variant) -> None:
        name = next(option for option in variant.options if "DTYPE" in option).split("=")[1]
        places = (x.target, x.value, x.compare, x.result)
        with _alone():
            now, value, compare, result = (self._elements(place, 1, np.dtype(name)) for place in places)
            result[:] = now
            if now[0] == compare[0]:
                now[:] = value

    def _elements(self, pointer: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        assert pointer % min(dtype.itemsize, 16) == 0, "misaligned"
        assert self.owns(pointer) or count == 0, "a kernel accesses memory of the host"
        return array_at(pointer, count, dtype)

    def _board(self, x: SynchronisationArguments, owner: int) -> npt.NDArray[np.uint64]:
        return array_at(self._board_at(x, owner), LOCK_ROW * ROW_WORDS, _WORD).reshape(LOCK_ROW, ROW_WORDS)

    def _board_at(self, x: SynchronisationArguments, owner: int) -> int:
        return int(array_at(x.boards, owner + 1, _WORD)[owner])

    def _rows(self, x: SynchronisationArguments, owner: int) -> npt.NDArray[np.uint64]:
        return self._board(x, owner)[x.kind * ROWS_OF_COUNTS : (x.kind + 1) * ROWS_OF_COUNTS]

    def _wait(self, ready: Any) -> bool:
        end = time.monotonic() + self.timeout_s
        while not ready():
            if time.monotonic() > end:
                return False
            time.sleep(1e-4)
        return True


def _ranks(ranks: int) -> list[int]:
    return [rank for rank in range(64) if ranks >> rank & 1]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let no other rank into such a block: all ranks are children of one process."""
    with (Path(tempfile.gettempdir()) / f"window-devices-{os.getppid()}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
