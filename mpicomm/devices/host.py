"""The host as a device: its backend, its events, and arrays over addresses."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.base import Link
from mpicomm.devices.handle import Exported, Kind, MemoryHandle, MemoryUse
from mpicomm.devices.host_memory import HostSegment
from mpicomm.errors import CollectiveTimeoutError, HandleError, InvalidUsageError, equal_error
from mpicomm.waiting import wait_until

NO_DEVICE = bytes(16)
_BYTE = np.dtype(np.uint8)


class HostEvent:
    """A `CudaEvent` of the host. Calls on host memory block, so recorded work has happened. Both methods are fences."""

    def export(self) -> bytes:
        """Return an empty key, because a peer needs no key to open the event."""
        return b""

    def record(self, stream: int) -> None:
        """Order the earlier writes of this rank before its later writes, such as the message that tells a peer."""
        fence()

    def wait(self, stream: int) -> None:
        """Order the later reads of this rank after the writes of the peer. A message has told this rank of them."""
        fence()

    def close(self) -> None: ...


class HostBackend:
    """Host memory, with the methods of `CudaBackend` that need no GPU.

    Every call blocks, so it has no streams, and 0 stands for the stream. There is no context to make current, and
    nothing to release.
    """

    device: int | str = "cpu"
    kinds: tuple[Kind, ...] = ("memfd",)

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._error: CollectiveTimeoutError | None = None

    def make_current(self) -> None: ...
    def prepare_thread(self) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...

    def allocate(self, kind: Kind, nbytes: int) -> HostSegment:
        """Allocate zeroed shared memory in whole pages."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        return HostSegment.allocate(size)

    def adopt(self, array: Any) -> HostSegment:
        """Return the shared mapping of an array: memory of mpicomm, or of a file that has a name."""
        if array.nbytes == 0:
            return self.allocate("memfd", 0)  # an empty array has no memory, but peers map a handle
        return HostSegment.adopt(array)

    def export(self, segment: Any) -> Exported:
        """Return one part, with a descriptor that the caller closes. Each segment can be exported once."""
        handle = MemoryHandle("memfd", NO_DEVICE, segment.file, segment.size, segment.offset, segment.nbytes)
        return ((handle, segment.take_fd() if handle.has_descriptor else None),)

    def open(self, parts: Exported) -> HostSegment:
        ((handle, fd),) = parts
        if handle.kind != "memfd" or (handle.has_descriptor and fd is None):
            raise HandleError(
                f"a cpu communicator cannot open a handle of kind {handle.kind}: pass the same device= on all ranks"
            )
        if fd is None:
            return HostSegment.reopen(handle.key, handle.offset, handle.nbytes)
        return HostSegment.open(fd, handle.offset, handle.nbytes)

    def asarray(self, array: Any, name: str = "array") -> npt.NDArray[Any]:
        if hasattr(array, "__cuda_array_interface__"):
            raise InvalidUsageError(
                f"{name} is a {type(array).__module__}.{type(array).__name__} on a GPU, but this communicator is on "
                'the cpu: create it with device="auto" or a device ordinal'
            )
        try:
            if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
                return np.from_dlpack(array)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise InvalidUsageError(
                f"{name} is a {type(array).__name__} that DLPack cannot hand over: {error}; pass a NumPy array"
            ) from error
        try:
            return np.asarray(array, copy=False)
        except (TypeError, ValueError) as error:
            raise InvalidUsageError(
                f"{name} is a {type(array).__name__}, which offers neither the buffer protocol nor DLPack: pass a "
                "NumPy array"
            ) from error

    def view(self, segment: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        count = int(np.prod(shape, dtype=object))
        flat: npt.NDArray[Any] = segment.content[: count * dtype.itemsize].view(dtype)
        return flat.reshape(shape)

    def pointer_table(self, pointers: list[int]) -> npt.NDArray[np.uint64]:
        return np.array(pointers, np.uint64)

    def stream(self, stream: Any, array: Any = None) -> int:
        """Accept only ``None``, because host calls block."""
        if stream is not None:
            raise InvalidUsageError(f"stream={stream!r}: a cpu communicator has no streams; leave stream out")
        return 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        np.copyto(_bytes_at(target, nbytes), _bytes_at(source, nbytes))

    def zero(self, pointer: int, nbytes: int) -> None:
        _bytes_at(pointer, nbytes)[:] = 0

    def synchronize(self, stream: int | None = None) -> None:
        """Order the earlier writes of this rank before its later writes."""
        fence()

    def signal(self, sent: int, inbox: int, stream: int) -> None:
        own, remote = _word_at(sent), _word_at(inbox)
        own[0] += np.uint64(1)
        # A release: it pairs with the fence in wait_signal. Without it, a weakly ordered CPU may let the peer see the
        # counter before the data that this rank has written before it.
        fence()
        remote[0] = own[0]

    def wait_signal(self, expected: int, inbox: int, peer: int, stream: int) -> None:
        count, received = _word_at(expected), _word_at(inbox)
        target = int(count[0]) + 1
        if not wait_until(lambda: int(received[0]) >= target, self.timeout_s):
            self._error = CollectiveTimeoutError(
                f"wait_signal: number {target} from rank {peer} did not come within {self.timeout_s:g} s; the "
                "communicator is unusable: create another",
                ranks=[peer],
            )
            self.check()
        count[0] = target
        # An acquire: it pairs with the fence in signal. This rank reads the peer's data after the counter that
        # publishes the data.
        fence()

    def check(self) -> None:
        if self._error is not None:
            raise equal_error(self._error)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return host memory. All host memory is this device's."""
        return np.empty(nbytes, np.uint8)

    def create_event(self) -> HostEvent:
        return HostEvent()

    def open_event(self, exported: bytes) -> HostEvent:
        return HostEvent()

    def link(self, device: bytes, kind: Kind) -> Link:
        return Link("host memory", access=True)

    def memory_use(self) -> Iterable[MemoryUse]:
        return ()


def fence() -> None:
    """Order this thread's earlier reads and writes before its later ones, in the view of other processes.

    Python has no fence. One critical section of a lock is not a fence, because accesses may move into it from both
    sides. Two sections, one after the other, are a fence. No access moves down past the first release, or up past the
    second acquire, and that acquire cannot pass the release of the same lock.
    """
    # A new lock for each call: a Ctrl-C could leave a lasting lock acquired, and every later fence would hang.
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def _bytes_at(pointer: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return array_at(pointer, nbytes, _BYTE)


def _word_at(pointer: int) -> npt.NDArray[np.uint64]:
    return array_at(pointer, 1, np.dtype(np.uint64))


class _Memory:
    """An address in NumPy's array interface: NumPy documents it for memory that no Python object owns."""

    def __init__(self, pointer: int, count: int, dtype: np.dtype[Any], owner: Any) -> None:
        self._owner = owner
        self.__array_interface__ = {"version": 3, "data": (pointer, False), "shape": (count,), "typestr": dtype.str}


def array_at(pointer: int, count: int, dtype: np.dtype[Any], owner: Any = None) -> npt.NDArray[Any]:
    """Return a NumPy array over memory at an address. It keeps ``owner`` alive; else the caller keeps the memory."""
    if count == 0:
        return np.empty(0, dtype)
    if dtype.isbuiltin == 1:
        return np.asarray(_Memory(pointer, count, dtype, owner))
    # The array interface has no names for the types of ml_dtypes, and forgets the fields of a structure.
    return np.asarray(_Memory(pointer, count * dtype.itemsize, _BYTE, owner)).view(dtype)
