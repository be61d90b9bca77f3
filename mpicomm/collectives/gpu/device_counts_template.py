"""DeviceCountsTemplate: the calls of one kind with counts on the device."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from mpicomm.collectives.gpu.algorithms.base import AlgorithmChoice, Filled, KernelTemplate, Step
from mpicomm.collectives.gpu.algorithms.memory import Domain
from mpicomm.collectives.gpu.algorithms.packets import arguments as kernels
from mpicomm.collectives.gpu.algorithms.packets.configs import PacketConfig, any_length_config
from mpicomm.collectives.gpu.call_templates import CallTemplate
from mpicomm.collectives.gpu.decision import NO_END, enqueuers_of
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import MAX_RANKS
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.buffers import ArrayMemory
from mpicomm.mpi.device_counts import DeviceCounts, is_wide

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.plan import StepLoader

_AT = [
    kernels.DeviceCountsPacketArguments.device_counts.offset + side.offset
    for side in (kernels.DeviceCountsArguments.send, kernels.DeviceCountsArguments.receive)
]
_write_side = struct.Struct("=4Q").pack_into


class DeviceCountsTemplate(CallTemplate, KernelTemplate):
    """The calls whose buffers, counts and displacements are of the same kinds as ``buffers``. One launch carries each.

    The host knows no lengths, but it knows how much the buffers of this rank hold. So the kernel of this rank may
    differ from the kernels of its peers: see device_counts_step.cu. ``signature`` and ``config``, by default
    `any_length_config`, are the same on all ranks.
    """

    choice = AlgorithmChoice("one_shot", "the counts are on the GPU")

    def __init__(
        self,
        signature: Signature,
        buffers: DeviceCounts,
        domain: Domain,
        loader: StepLoader,
        config: PacketConfig | None = None,
    ) -> None:
        self.text_format = str(signature)
        layout, own = domain.arena.layout, domain.team.arenas[domain.rank]
        inboxes, fences = layout.ll_inboxes(own), own + layout.fences
        self.arguments = arguments = kernels.DeviceCountsPacketArguments(team=domain.team, ll=inboxes, fences=fences)
        self.early = domain.early
        arguments.team.tags[:] = [signature.hash32] * MAX_RANKS
        counts = arguments.device_counts
        counts.itemsize = self._itemsize = buffers.itemsize
        self._sides = counts.send, counts.receive
        for side, buffer in zip(self._sides, (buffers.send, buffers.receive), strict=True):
            side.wide_counts, side.follows = is_wide(buffer.counts), buffer.displs is None
            side.wide_displs = isinstance(buffer.displs, ArrayMemory) and is_wide(buffer.displs)
        self._follow = all(side.follows for side in self._sides)
        self._size, self._host_slots = domain.size, domain.host_slots
        config = config or any_length_config(domain)
        arguments.laps, arguments.stages = config.laps, config.inboxes.stages
        arguments.inbox_nbytes = config.inboxes.nbytes
        arguments.inboxes[: self._size] = config.inboxes.pointers
        self._shape = config.blocks, config.workers + kernels.OVERSEERS
        self._most_of_step = config.step_nbytes // self._itemsize if self._follow else -1
        """The most elements of a buffer for the kernel of one step; -1 if no call takes it."""
        self._most = NO_END if is_wide(buffers.receive.counts) else (1 << 31) - 1
        send, receive = ([each.nbytes for each in side.indices()] for side in (buffers.send, buffers.receive))
        self._nbytes = send[0], send[-1], receive[0], receive[-1]
        """The bytes of counts and of displacements to send, and of those to receive."""
        self._enqueue_of = enqueuers_of(self, loader)

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        return type(sent[3]) is type(received[3]) is int

    def fill(self, sent: Any, received: Any) -> bool:
        send, room, _, counts, displs = sent
        receive, most, _, coming, places = received
        if most > self._most:
            return False
        of_counts, of_displs, of_coming, of_places = self._nbytes
        nbytes, end, last = room * self._itemsize, receive + most * self._itemsize, coming + of_coming
        read = [(send, nbytes), (counts, of_counts)]
        if type(displs) is int:
            read.append((displs, of_displs))
        if type(places) is int:
            read.append((places, of_places))
        for begin, length in read:
            if (begin < end and receive < begin + length) or (begin < last and coming < begin + length):
                return False  # the call would write into an array that it reads
        if receive < last and coming < end:
            return False
        self.launch = self.enqueue = self._enqueue_of(self._write(sent, received))
        return True

    def read(self, buffers: DeviceCounts) -> list[Step]:
        """Return the steps of a read call, which later calls do not overwrite."""
        sides = []
        for side in (buffers.send, buffers.receive):
            displs = side.displs.pointer if isinstance(side.displs, ArrayMemory) else side.displs
            sides.append((side.operand.pointer, side.operand.total, None, side.counts.pointer, displs))
        return self.steps_of(self._write(*sides))

    def _write(self, sent: Any, received: Any) -> Filled:
        """Write a call into `arguments`. Does not look at the types of the buffers."""
        for (pointer, room, _, counts, displs), at, side in zip((sent, received), _AT, self._sides, strict=True):
            if type(displs) is tuple:
                side.known[: self._size], displs = displs, None
            _write_side(self.arguments, at, pointer, room, counts, displs or 0)
        return (sent[1] <= self._most_of_step and received[1] <= self._most_of_step, *self._shape)

    def variant(self, kernel: bool) -> Variant:
        """Return the source and options of a kernel: the kernel of one step, or the kernel of any steps."""
        if kernel:
            return kernels.device_counts_step_kernel(self._size)
        return kernels.packet_kernel(
            None, self._size, "sentinel", "paced", fan_out=False, host_slots=self._host_slots, device_counts=True
        )
