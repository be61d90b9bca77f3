"""The kernels of packets.cu and device_counts_step.cu: arguments, variants, bytes and threads."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

from mpicomm.collectives.packed import MOST_STRIDES
from mpicomm.kernels.packing import LOOPS
from mpicomm.kernels.reductions import HOST_SLOTS, options_for
from mpicomm.kernels.team import MAX_RANKS, LLInboxes, Team
from mpicomm.kernels.variant import Variant, u32, u64

_SOURCE = Path(__file__).with_name("packets.cu")

# Constants and structures of packet_worker.cuh; a test compares them.
OVERSEERS = 32
SLOT_NBYTES = 16
FENCES_NBYTES = 3072  # for each block: see fences.cuh
QUANTIZED_OF_PACKET = 16
"""The quantized elements that a packet carries: ``kPartElements`` in wire_quantization.cuh."""
STAGES = 2
"""The inboxes for one source and parity of calls with fan-out. Others need one."""
UNIT_NBYTES = {"ll": 8, "sentinel": 16}
"""The bytes of data in a packet of each protocol: see packet_protocols.cuh."""
_PROTOCOLS = {"ll": (), "sentinel": ("-DMPICOMM_SENTINEL",)}
_STEPS = {
    "one": ("-DMPICOMM_ONE_STEP",),
    "few": (),
    "laps": ("-DMPICOMM_LAPS",),
    "paced": ("-DMPICOMM_LAPS", "-DMPICOMM_PACED"),
}
FEWEST_LAPS = 6
"""The fewest steps that an inbox must hold if a message has more steps; with rows one more: see packets.cu."""

Protocol = Literal["ll", "sentinel"]
"""The kind of packets. "ll": LL packets, which carry flags. "sentinel": packets without flags. See
packet_protocols.cuh."""
Steps = Literal["one", "few", "laps", "paced"]
"""The steps of a launch. "one": one step. "few": no more steps than inboxes hold. "laps": more steps. "paced": more
steps, and two ranks send each other different lengths. See packets.cu."""


class PacketArguments(ctypes.Structure):
    """The host's copy of ``Packets`` in packet_worker.cuh."""

    _fields_ = [
        ("team", Team),
        ("sends", ctypes.c_uint64 * MAX_RANKS),
        ("receives", ctypes.c_uint64 * MAX_RANKS),
        ("send_nbytes", ctypes.c_uint64 * MAX_RANKS),
        ("receive_nbytes", ctypes.c_uint64 * MAX_RANKS),
        *u64("own", "output", "output_nbytes"),
        *u32("steps", "laps", "sources", "targets", "paced", "stages"),
        ("inboxes", ctypes.c_uint64 * MAX_RANKS),
        *u64("inbox_nbytes"),
        ("ll", LLInboxes),
        *u64("fences"),
    ]


class DeviceCountsSideArguments(ctypes.Structure):
    """The host's copy of ``DeviceCountsSide`` in device_counts.cuh."""

    _fields_ = [
        *u64("buffer", "room", "counts", "displs"),
        ("known", ctypes.c_int64 * MAX_RANKS),
        *u32("wide_counts", "wide_displs", "follows", "unused"),
    ]


class DeviceCountsArguments(ctypes.Structure):
    """The host's copy of ``DeviceCounts`` in device_counts.cuh."""

    _fields_ = [("send", DeviceCountsSideArguments), ("receive", DeviceCountsSideArguments), *u64("itemsize")]


class DeviceCountsPacketArguments(PacketArguments):
    """The host's copy of ``Packets`` in a kernel that reads counts on the device."""

    _fields_ = [("device_counts", DeviceCountsArguments)]


class StrideArguments(ctypes.Structure):
    """The host's copy of ``Strides`` in strided.cuh."""

    _fields_ = [
        *u32("nbytes", "run_nbytes"),
        ("counts", ctypes.c_uint32 * LOOPS),
        ("offset", ctypes.c_int64),
        ("strides", ctypes.c_int64 * LOOPS),
    ]


class GapArguments(ctypes.Structure):
    """The host's copy of ``Gaps`` in strided.cuh."""

    _fields_ = [*u32("first", "grain")]


class StridedPacketArguments(PacketArguments):
    """The host's copy of ``Packets`` in a kernel for messages with gaps."""

    _fields_ = [
        ("send_gaps", GapArguments * MAX_RANKS),
        ("receive_gaps", GapArguments * MAX_RANKS),
        ("strides", StrideArguments * MOST_STRIDES),
    ]


@cache
def finished_packet_arguments(finish: type[ctypes.Structure]) -> type[PacketArguments]:
    """Return the host's copy of ``Packets`` in a kernel with an epilogue. ``finish`` is the type of its arguments."""
    return type("FinishedPacketArguments", (PacketArguments,), {"_fields_": [("finish", finish)]})


def parts_of(size: int, *, one_step: bool) -> int:
    """Return the packets of a quantized unit between ``size`` ranks: ``kParts`` in units.cuh."""
    return 1 if one_step or size > 2 else 2


def most_workers(size: int, *, fan_out: bool, one_step: bool, quantized: bool = False) -> int:
    """Return the most worker threads of a block between ``size`` ranks: ``kWorkers`` in packet_worker.cuh.

    ``quantized`` is whether packets carry quantized elements.
    """
    if one_step:
        threads = 512 if size > 4 else 768
    elif quantized:
        threads = 256 if size > 4 else 384 if size > 2 or fan_out else 512
    else:
        threads = 256 if size > 4 else 512 if fan_out else 640 if size > 2 else 768
    return threads - OVERSEERS


def packet_kernel(
    reduction: tuple[str, str] | None,
    size: int,
    protocol: Protocol,
    steps: Steps,
    *,
    fan_out: bool,
    host_slots: bool = False,
    epilogue: tuple[str, ...] = (),
    wire: tuple[str, ...] = (),
    device_counts: bool = False,
    strided: bool = False,
) -> Variant:
    """Return the kernel for ``size`` ranks and ``(dtype, op)``, or the kernel that does not reduce.

    ``epilogue`` are the options of an epilogue. With them the kernel takes `finished_packet_arguments`. ``host_slots``
    is whether inboxes lie in host memory. Then a kernel that reuses slots within a launch is another variant. ``wire``
    are the options of `wire_options`. With ``device_counts`` it reads counts on the device, and takes
    `DeviceCountsPacketArguments`. A ``strided`` kernel carries messages with gaps, and takes `StridedPacketArguments`.
    Raises as `options_for`.
    """
    fans = ("-DMPICOMM_FAN_OUT",) if fan_out else ()
    fences = HOST_SLOTS if host_slots and steps in ("laps", "paced") else ()
    ways = (*_PROTOCOLS[protocol], *_STEPS[steps], *fans, *fences)
    more = (*("-DMPICOMM_DEVICE_COUNTS",) * device_counts, *("-DMPICOMM_STRIDED",) * strided)
    options = (*options_for(reduction), f"-DMPICOMM_RANKS={size}", *ways, *epilogue, *wire, *more)
    return Variant(_SOURCE, "mpicomm_packets", options)


def device_counts_step_kernel(size: int) -> Variant:
    """Return the kernel between ``size`` ranks for counts on the device, if the buffers hold no more than a step.

    It takes `DeviceCountsPacketArguments`.
    """
    options = ("-DMPICOMM_DEVICE_COUNTS", f"-DMPICOMM_RANKS={size}", *_PROTOCOLS["sentinel"], *_STEPS["one"])
    return Variant(_SOURCE.with_name("device_counts_step.cu"), "mpicomm_device_counts_step", options)


def wire_options(wire: str, *, moves: bool, quantizes_result: bool, same_to_all: bool = False) -> tuple[str, ...]:
    """Return the options of a kernel whose packets have elements quantized as ``wire``: see units.cuh.

    The kernel only ``moves`` data, or it reduces. ``quantizes_result`` is whether the result travels quantized, too.
    ``same_to_all`` is whether the rank sends all ranks the same elements, which are also its contribution to a
    reduction.
    """
    flags = {"MOVES": moves, "QUANTIZES_RESULT": quantizes_result, "SAME_TO_ALL": same_to_all}
    return (f"-DMPICOMM_WIRE={wire}", *(f"-DMPICOMM_{name}" for name, wanted in flags.items() if wanted))


def ll_can_carry(dtype: str) -> bool:
    """Return whether an element fits into a packet of the LL protocol."""
    return dtype != "complex128"


def carried_nbytes(inbox_nbytes: int, protocol: Protocol) -> int:
    """Return how many bytes of one message an inbox holds."""
    return inbox_nbytes // SLOT_NBYTES * UNIT_NBYTES[protocol]
