"""The kernels of a mixture of experts: their arguments. Imports no CUDA package."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.reductions import cpp_name, options_for
from mpicomm.kernels.team import LANES, MAX_RANKS, PACKET_NBYTES, Team
from mpicomm.kernels.variant import KERNEL_DIR, Variant, u32, u64

# Constants of the kernels and of faults.cuh; a test compares them.
DISPATCH_THREADS = 384
SUM_THREADS = 256
QUANTIZE_THREADS = 384
MAX_EXPERTS = 512
MAX_TOP_K = 32
DISPATCH, COMBINE, ROUTES, ROOM = 9, 10, 11, 12  # of ``enum Operation``

BLOCKS_OF_A_MULTIPROCESSOR = 2  # of __launch_bounds__ of both kernels
FEW_TOKENS = 256
"""Up to so many tokens of a rank a launch is in the mode of low latency."""
HEADERS = 2 * FEW_TOKENS // LANES
"""The headers of a source, for even and for odd launches."""
GROUP = 128
"""The number of elements that share a scale."""
_LANES_OF_A_GROUP = 16
PART_PACKETS = 4
PART_NBYTES = PART_PACKETS * LANES * PACKET_NBYTES
"""The most bytes of a row that a warp moves at once."""


class ExpertsArguments(ctypes.Structure):
    """The host's copy of ``Experts`` in experts.cuh."""

    _fields_ = [
        ("team", Team),
        *u64("routes", "row_flags", "rows", "sum_flags", "sums"),
        *u64("values", "histogram_flags", "histograms", "row_nbytes", "part_nbytes"),
        *u32("parts", "max_tokens", "few_tokens", "recv_slots", "top_k", "senders", "unused"),
        ("first_experts", ctypes.c_uint32 * (MAX_RANKS + 1)),
    ]


class TwoArrays(ctypes.Structure):
    """The host's copy of ``TwoArrays`` in experts_dispatch.cu."""

    _fields_ = [*u64("first", "second", "first_nbytes", "second_nbytes")]


class DispatchArguments(ctypes.Structure):
    """The host's copy of ``Dispatch`` in experts_dispatch.cu."""

    _fields_ = [
        ("experts", ExpertsArguments),
        ("x", TwoArrays),
        ("rows", TwoArrays),
        *u64("ids", "weights", "counts", "offsets", "sources", "place_weights"),
        *u64("places", "targets", "tokens", "token_rows", "place_rows", "slot_ids"),
        *u64("slot_weights", "row_count", "capacity", "all_places"),
        *u32("num_tokens", "alignment", "wide_ids", "unused"),
    ]


class CombineExpertsArguments(ctypes.Structure):
    """The host's copy of ``Combine`` in experts_combine.cu."""

    _fields_ = [
        ("experts", ExpertsArguments),
        *u64("rows", "row_weights", "places", "token_rows", "targets", "tokens", "values", "output", "slot_values"),
        *u32("num_tokens", "unused"),
    ]


class QuantizeArguments(ctypes.Structure):
    """The host's copy of ``Quantize`` in experts_quantize.cu."""

    _fields_ = [*u64("x", "values", "scales", "groups")]


DISPATCH_KERNEL = Variant(KERNEL_DIR / "experts_dispatch.cu", "mpicomm_experts_dispatch", options_for(None))
DISPATCH_FEW_KERNEL = Variant(KERNEL_DIR / "experts_dispatch_few.cu", "mpicomm_experts_dispatch_few", options_for(None))


def combine_experts_kernel(dtype: str, result: str, *, by_token: bool, in_packets: bool) -> Variant:
    """Return the kernel that adds rows of ``dtype`` and rounds the sums to ``result``, for a layout.

    ``in_packets`` is for sums that travel as packets, in the layout by token: see `ExpertsConfig.in_packets`.
    """
    ways = {"BY_TOKEN": by_token, "IN_PACKETS": in_packets}
    named = (f"-DMPICOMM_{name}={str(value).lower()}" for name, value in ways.items())
    options = (*options_for((dtype, "sum")), f"-DMPICOMM_RESULT={cpp_name(result)}", *named)
    return Variant(KERNEL_DIR / "experts_combine.cu", "mpicomm_experts_combine", options)


def quantize_experts_kernel(dtype: str) -> Variant:
    """Return the kernel that quantises elements of ``dtype``."""
    return Variant(KERNEL_DIR / "experts_quantize.cu", "mpicomm_experts_quantize", options_for((dtype, "sum")))


def quantize_blocks(groups: int, multiprocessors: int) -> int:
    """Return the number of blocks of a launch that quantises so many groups."""
    return max(1, min(4 * multiprocessors, -(-groups * _LANES_OF_A_GROUP // QUANTIZE_THREADS)))
