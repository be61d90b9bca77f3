"""Virtual memory of the CUDA driver in memory of the host: reserved addresses, allocations, mappings, descriptors."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from tests.helpers.fakes.fake_cuda import FakeCuda

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NOTHING, _FIXED = 0, 0x10  # PROT_NONE, MAP_FIXED
_POISON = b"\xdb"


class VirtualCuda(FakeCuda):
    """A `FakeCuda` whose virtual memory is real. An allocation is a memfd. An access to unmapped memory is a fault."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.free_nbytes = 1 << 40
        self.mapped: dict[int, tuple[int, int]] = {}
        """The mappings: address, then size and descriptor of the allocation."""
        self.reserved: dict[int, int] = {}
        self._handles: dict[int, int] = {}  # to the size

    def _status(self, name: str = "CUDA_SUCCESS") -> Any:
        return getattr(self._bindings.CUresult, name)

    def cuGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return self._status(), b"no memory"

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, int]:
        if size > self.free_nbytes:
            return self._status("CUDA_ERROR_OUT_OF_MEMORY"), 0
        self.free_nbytes -= size
        fd = os.memfd_create("allocation", os.MFD_CLOEXEC)
        os.pwrite(fd, _POISON * size, 0)
        self._handles[fd] = size
        return self._status(), fd

    def cuMemRelease(self, handle: int) -> tuple[Any]:
        del self._handles[handle]
        os.close(handle)
        return (self._status(),)

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[Any, int]:
        size, fd = self.mapped[address]
        retained = os.dup(fd)
        self._handles[retained] = size
        return self._status(), retained

    def cuMemExportToShareableHandle(self, allocation: int, kind: Any, flags: int) -> tuple[Any, int]:
        assert allocation in self._handles
        return self._status(), os.dup(allocation)

    def cuMemImportFromShareableHandle(self, name: Any, kind: Any) -> tuple[Any, int]:
        imported = os.dup(int(name))
        self._handles[imported] = os.fstat(imported).st_size
        return self._status(), imported

    def cuMemGetAllocationGranularity(self, properties: Any, flags: Any) -> tuple[Any, int]:
        return self._status(), mmap.PAGESIZE

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, int]:
        found = _libc.mmap(None, size, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.reserved[found] = size
        return self._status(), found

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any]:
        assert self.reserved.pop(address) == size
        assert not any(address <= at < address + size for at in self.mapped), "memory is still mapped"
        _libc.munmap(address, size)
        return (self._status(),)

    def cuMemMap(self, address: int, size: int, offset: int, allocation: int, flags: int) -> tuple[Any]:
        assert self._handles[allocation] == size and address not in self.mapped
        assert any(begin <= address and address + size <= begin + room for begin, room in self.reserved.items())
        fd = os.dup(allocation)
        self.mapped[address] = size, fd
        access = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mmap(address, size, access, mmap.MAP_SHARED | _FIXED, fd, 0) == address
        return (self._status(),)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any]:
        mapped = [at for at in self.mapped if address <= at < address + size]
        assert mapped, "nothing is mapped"
        for at in mapped:
            each, fd = self.mapped.pop(at)
            os.close(fd)
            self.free_nbytes += each
            _libc.mmap(at, each, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
        return (self._status(),)
