"""Shared host memory: memfd segments of the ranks of a node, which every rank maps and views as NumPy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.handle import Descriptor, limit_hint
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.waiting import uninterrupted

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd_create(nbytes: int, name: str = "mpicomm") -> Descriptor:
    """Return a descriptor of ``nbytes`` bytes of anonymous shared memory, sealed at that size; the caller closes it.

    Raises `HandleError` if the machine has less memory left. The kernel would overcommit, and kill the process at some
    later access.
    """
    available = _available_nbytes()
    if nbytes > available:
        raise HandleError(
            f"cannot allocate {nbytes} bytes of shared host memory: {available} are available; "
            "make the array smaller or free others"
        )
    try:
        fd = Descriptor.of(os.memfd_create, name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise HandleError(f"memfd_create failed: {error.strerror}{limit_hint(error.errno)}") from error
    try:
        os.ftruncate(fd, nbytes)
        # A peer could shrink a file without seals. Every access after its new end would be a SIGBUS in this process.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        fd.close()  # the error holds this frame, and the frame holds the descriptor
        raise HandleError(f"cannot allocate {nbytes} bytes of shared host memory: {error.strerror}") from error
    return fd


def require_sealed(fd: int) -> None:
    """Raise `HandleError` unless a peer's descriptor has the seals of `memfd_create`; a peer may send anything."""
    try:
        sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file of another kind, which has no seals
        sealed = False
    if not sealed:
        raise HandleError(
            "shared memory is not sealed against shrinking: mpicomm has not made it; run one mpicomm on all ranks"
        )


class _Mapping:
    """A shared mapping, which its last view unmaps. Python's ``mmap`` would keep a descriptor open for each mapping."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        with uninterrupted():
            address = _map(None, nbytes, protection, mmap.MAP_SHARED, fd, offset)
            if address == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            # Not at exit, because threads of the user may still access the memory then.
            weakref.finalize(self, _unmap, address, nbytes).atexit = False
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


_libc = ctypes.CDLL(None, use_errno=True)
_map, _unmap = _libc.mmap, _libc.munmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_unmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


# The mappings of whole files in this process, by file. A memfd cannot be reopened by name, and a descriptor kept for
# each array would soon exceed the limit of the process. So if memory of mpicomm is registered, peers use the mappings
# of it that they have.
_mappings: weakref.WeakValueDictionary[bytes, _Mapping] = weakref.WeakValueDictionary()
_OWN_PATH = b"/memfd:mpicomm (deleted)"


def map_shared(fd: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map bytes of the shared memory ``fd``; the mapping lasts as long as the array or a view of it."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        file = os.fstat(fd)
        if file.st_size < offset + nbytes:
            # The kernel also maps bytes after the end of a file, and kills the process at the first access to them.
            raise HandleError(f"shared memory has {file.st_size} bytes, its handle promised {offset + nbytes}")
        mapping = _Mapping(fd, start, offset + nbytes - start)
    except OSError as error:
        raise HandleError(f"cannot map {nbytes} bytes of shared memory: {error.strerror}") from error
    if offset == 0:
        device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"  # as in /proc/self/maps
        _mappings[f"{device} {file.st_ino}".encode()] = mapping
    return np.asarray(mapping)[offset - start : offset + nbytes - start]


class HostSegment:
    """Shared host memory, of this process or of a peer, with the methods of `CudaSegment`.

    `close` drops the mapping. The last NumPy view unmaps it, so a view that outlives its array stays readable, where it
    would else crash the process. A segment to export has the descriptor of the file, ``fd``. `close` closes it unless
    `take_fd` has handed it over. The last reference to a segment does what `close` does. Memory of mpicomm that peers
    have mapped already has its ``file`` in place of a descriptor.
    """

    def __init__(
        self,
        content: npt.NDArray[np.uint8],
        *,
        fd: Descriptor | None = None,
        size: int = 0,
        offset: int = 0,
        file: bytes = b"",
    ) -> None:
        self.content: npt.NDArray[np.uint8] | None = content
        self.pointer = content.ctypes.data
        self.nbytes = content.nbytes
        self.size = size
        self.offset = offset
        self.file = file
        self._fd = fd

    @classmethod
    def allocate(cls, size: int) -> HostSegment:
        """Allocate ``size`` zeroed bytes, a multiple of a page."""
        fd = memfd_create(size)
        try:
            return cls(map_shared(fd, 0, size), fd=fd, size=size)
        except Exception:
            fd.close()  # the error holds this frame, and the frame holds the descriptor
            raise

    @classmethod
    def adopt(cls, array: npt.NDArray[Any]) -> HostSegment:
        """Return the memory of an array, which is not empty. Raises `InvalidUsageError` if no peer can map it."""
        fd, file, offset = _find_shared_mapping(array.ctypes.data, array.nbytes)
        content = np.lib.stride_tricks.as_strided(array.reshape(-1).view(np.uint8), (array.nbytes,))
        size = offset + array.nbytes if fd is None else os.fstat(fd).st_size
        return cls(content, fd=fd, size=size, offset=offset, file=file)

    @classmethod
    def open(cls, fd: int, offset: int, nbytes: int) -> HostSegment:
        """Map a peer's shared memory. The caller still owns the descriptor."""
        return cls(map_shared(fd, offset, nbytes))

    @classmethod
    def reopen(cls, file: bytes, offset: int, nbytes: int) -> HostSegment:
        """Return memory of a file of mpicomm that this process has mapped."""
        mapping = _mappings.get(file.rstrip(b"\0"))
        content = None if mapping is None else np.asarray(mapping)[offset : offset + nbytes]
        if content is None or content.nbytes < nbytes:
            raise HandleError(
                "it is memory of mpicomm that this rank has not mapped, or has closed: allocate it by empty() of a "
                "communicator that has all these ranks"
            )
        return cls(content)

    def take_fd(self) -> Descriptor:
        """Hand over the descriptor to the caller, which closes it; the mapping does not need it."""
        fd, self._fd = self._fd, None
        if fd is None:
            raise HandleError("shared memory was exported before: allocate another segment")
        return fd

    def close(self) -> None:
        self.content = None
        if self._fd is not None:
            self._fd.close()
            self._fd = None


def _find_shared_mapping(pointer: int, nbytes: int) -> tuple[Descriptor | None, bytes, int]:
    """Return a descriptor of the file at an address, which the caller closes, the file's key, and the offset in it.

    Memory of mpicomm has a key and no descriptor, other files have a descriptor and no key. Raises `InvalidUsageError`
    for memory that no peer can map.
    """
    # In bytes, because file names need not be text.
    with Path("/proc/self/maps").open("rb") as maps:
        for line in maps:
            fields = line.rstrip(b"\n").split(maxsplit=5)
            start, end = (int(bound, 16) for bound in fields[0].split(b"-"))
            if not start <= pointer < end:
                continue
            path = fields[5] if len(fields) > 5 else b""
            permissions = fields[1].decode()
            if permissions[3] == "s" and permissions[1] == "w" and pointer + nbytes <= end:
                offset = int(fields[2], 16) + pointer - start
                if path == _OWN_PATH:
                    return None, b" ".join(fields[3:5]), offset
                with contextlib.suppress(OSError):
                    fd = Descriptor.of(os.open, path, os.O_RDWR | os.O_CLOEXEC)
                    if os.fstat(fd).st_ino == int(fields[4]):
                        return fd, b"", offset
                    fd.close()
                raise InvalidUsageError(
                    f"array lies in a shared mapping of {os.fsdecode(path) or 'anonymous memory'}, which cannot be "
                    "opened again by name; allocate with comm.empty(), or register before the name is removed"
                )
            break
    raise InvalidUsageError(
        "array lies in private memory of this process, which no peer can open; allocate it with comm.empty(), or place "
        "it in multiprocessing.shared_memory or a writable numpy.memmap"
    )


def _available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise HandleError("/proc/meminfo has no MemAvailable line: Linux 3.14 or newer is needed")
