"""The kernel of pack.cu: its arguments and its table of regions."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import KERNEL_DIR, Variant, u32, u64

# Constants and structures of pack.cu; a test compares them.
PACK_THREADS = 256
LOOPS = 4


class RegionEntry(ctypes.Structure):
    """The host's copy of ``Region`` in pack.cu."""

    _fields_ = [
        *u64("memory", "packed", "first_unit", "list"),
        *u32("run_nbytes", "run_units", "listed", "element_units"),
        ("counts", ctypes.c_uint32 * LOOPS),
        ("strides", ctypes.c_int64 * LOOPS),
        ("packed_strides", ctypes.c_uint64 * LOOPS),
    ]


ENTRY = struct.Struct(f"=4Q4I{LOOPS}I{LOOPS}q{LOOPS}Q")
"""Packs a `RegionEntry`, much faster than ctypes fills the structure."""
ENTRY_NBYTES = ctypes.sizeof(RegionEntry)


class PackArguments(ctypes.Structure):
    """The host's copy of ``Packing`` in pack.cu."""

    _fields_ = [
        *u64("regions", "memory", "packed", "failed", "units"),
        *u32("num_regions", "unpacks", "structures", "unused"),
        ("first", RegionEntry),
    ]


@dataclass(frozen=True)
class PackTable:
    """Regions in the form that the kernel reads: ``content`` is an array of `RegionEntry`, and the lists after it."""

    content: bytes
    num_regions: int
    units: int
    structures: int
    """The number of arrays of structures and of other regions. A field of such an array is a region."""

    def arguments(self, regions: int, memory: int, packed: int, failed: int, *, unpacks: bool) -> PackArguments:
        """Return the argument of a launch. The table lies at ``regions``, the regions lie from ``memory`` on, and their
        packed memory from ``packed`` on. If the word at ``failed`` is not 0, the launch unpacks nothing."""
        first = RegionEntry.from_buffer_copy(self.content) if self.num_regions else RegionEntry()
        numbers = self.units, self.num_regions, unpacks, self.structures, 0
        return PackArguments(regions, memory, packed, failed, *numbers, first)


PACK_KERNEL = Variant(KERNEL_DIR / "pack.cu", "mpicomm_pack", options_for(None))


def blocks_for(units: int, multiprocessors: int) -> int:
    """Return the number of blocks of a launch that moves or updates ``units``, at least one unit for each thread.

    Eight blocks fill a multiprocessor. A launch of fewer blocks would wait for memory most of the time.
    """
    return max(1, min(8 * multiprocessors, -(-units // PACK_THREADS)))
