"""Placement: the node and the device of each rank of a communicator."""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from mpi4py import MPI

from mpicomm import environment
from mpicomm.activity.layout import ranks_of_text
from mpicomm.activity.page import Member, RowHeader
from mpicomm.cluster.agreement import Group, require_same
from mpicomm.cluster.process import group_by_node, node_key, process_number
from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.host import NO_DEVICE, HostBackend
from mpicomm.errors import BackendUnavailableError, InvalidUsageError
from mpicomm.kernels.team import MAX_RANKS
from mpicomm.log import logger

SECRET_NBYTES = 32

_assigned: list[bytes] = []
"""UUID of the GPU that "auto" has assigned to this process, if it has. A rank keeps this GPU in all its communicators,
because its arrays are there."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, and the device and the handle kind that it uses: first the requested, then the chosen ones.

    ``devices`` are the GPUs that are visible to the rank. ``device`` is an ordinal among them, or "cpu", or "auto"
    until the choice. ``handle`` is a handle kind, or "auto" until the choice. ``rejected`` has the reason against each
    better kind.
    """

    host: str
    pid: int
    node_key: str
    devices: tuple[DeviceInfo, ...]
    no_device_reason: str
    device: int | str
    handle: str
    timeout_s: float
    rejected: dict[str, str] = field(default_factory=dict)
    token: bytes = field(default=b"", repr=False)
    """The part of this rank in the secret of each of its communicators."""
    assigned: bytes = b""
    """UUID of the GPU that "auto" assigned to this process before, else empty."""
    local_id: int = 0
    memory_limit_nbytes: int | None = None
    process_number: int = 0
    completes: bool = False
    """Whether blocking calls on device memory are complete on return, for every stream, as in a CUDA-aware MPI."""
    reductions: str = "auto"
    leaves: int = 64
    """The leaves of the tree in which sums with ``order="tree"`` go."""

    @property
    def sends_headers(self) -> bool:
        """Whether MPI carries a header in place of a long device array, because peers open the outbox by IPC."""
        return self.handle == "ipc" and isinstance(self.device, int)

    @property
    def outbox_limit_nbytes(self) -> int | None:
        """The part of `memory_limit_nbytes` for the outbox.

        It is fixed, because each rank grows its outbox without the others, and all ranks must agree on the rest.
        """
        if self.memory_limit_nbytes is None:
            return None
        return self.memory_limit_nbytes // 4 if self.handle == "ipc" else 0

    @property
    def shared_limit_nbytes(self) -> int | None:
        """The part of `memory_limit_nbytes` for memory that is shared collectively."""
        return None if self.memory_limit_nbytes is None else self.memory_limit_nbytes - (self.outbox_limit_nbytes or 0)

    @property
    def device_uuid(self) -> bytes:
        """UUID of the device, zeros on the cpu."""
        return self.devices[self.device].uuid if isinstance(self.device, int) else NO_DEVICE


class Placement:
    """The place of each rank. It is the same on all ranks, except for ``rank``."""

    def __init__(self, places: Sequence[RankPlace], rank: int) -> None:
        self.places = tuple(places)
        self.rank = rank
        self.here = self.places[rank]
        """This rank's place."""
        self.nodes = group_by_node([place.node_key for place in places])
        self.node_index, self.node_ranks = next(
            (index, ranks) for index, ranks in enumerate(self.nodes) if rank in ranks
        )
        self.local_rank = self.node_ranks.index(rank)

    @cached_property
    def row_header(self) -> RowHeader:
        """This rank's part of the page of the doctor that all communicators of this placement have in common."""
        processes = [Member(place.host, place.pid, place.process_number) for place in self.places]
        return RowHeader(self.rank, processes, self.here.device)

    @cached_property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each peer domain: the ranks of a node, in several domains if kernels do not serve so many."""
        on_gpus = isinstance(self.here.device, int)
        return tuple(
            tuple(part) for ranks in self.nodes for part in split_evenly(ranks, MAX_RANKS if on_gpus else len(ranks))
        )

    @property
    def domain_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's peer domain."""
        return next(ranks for ranks in self.domains if self.rank in ranks)

    @property
    def max_ranks_per_device(self) -> int:
        """The largest number of ranks that share a GPU, even if they count as several nodes; 1 without GPUs."""
        gpus = Counter(place.device_uuid for place in self.places if place.device != "cpu")
        return max(gpus.values(), default=1)

    @property
    def secret(self) -> bytes:
        """`SECRET_NBYTES` bytes that only the ranks of a communicator of these ranks, in this order, know."""
        return hashlib.blake2b(b"".join(place.token for place in self.places), digest_size=SECRET_NBYTES).digest()

    def node_index_of(self, rank: int) -> int:
        """Return the index of ``rank`` in the node; raises `InvalidUsageError` for a rank that is not on this node."""
        size = len(self.places)
        try:
            rank = operator.index(rank)
        except TypeError:
            raise InvalidUsageError(f"peer={rank!r} is no rank: use 0 to {size - 1}") from None
        if not 0 <= rank < size:
            nobody = "; MPI.PROC_NULL: leave the call out" if rank == MPI.PROC_NULL else ""
            raise InvalidUsageError(f"peer={rank} is no rank of this communicator: use 0 to {size - 1}{nobody}")
        if rank not in self.node_ranks:
            raise InvalidUsageError(
                f"peer={rank} is on another node ({self.places[rank].host}): only the ranks {self.node_ranks} of this "
                "node reach each other's memory; use MPI's calls for the others"
            )
        return self.node_ranks.index(rank)

    def domain_index_of(self, rank: int) -> int:
        """Return the index of ``rank`` in the peer domain. Raises `InvalidUsageError` for other ranks."""
        self.node_index_of(rank)
        if rank not in self.domain_ranks:
            raise InvalidUsageError(
                f"peer={rank} is in another group of this node: kernels reach the ranks {list(self.domain_ranks)}; use "
                "MPI's calls for the others"
            )
        return self.domain_ranks.index(rank)

    def subset(self, ranks: Sequence[int]) -> Placement:
        """Return the placement of a communicator of some of these ranks, among them this rank; local."""
        numbers = tuple(ranks)
        if numbers == tuple(range(len(self.places))):
            return self
        return Placement([self.places[rank] for rank in numbers], numbers.index(self.rank))

    def create_backend(self) -> HostBackend | GpuBackend:
        """Open this rank's device and return it; local. Raises `BackendUnavailableError` or `HandleError`."""
        place = self.here
        if isinstance(place.device, str):
            return HostBackend(place.timeout_s)
        from mpicomm.devices.cuda.backend import CudaBackend

        return CudaBackend(place.device, place.timeout_s, completes=place.completes)


def find_placement(
    group: Group,
    device: int | str,
    handle: str,
    completes: Callable[[], bool] = lambda: False,
    reductions: str = "auto",
    leaves: int = 64,
) -> Placement:
    """Find the nodes and assign a device to each rank. Collective; all ranks raise the same error for bad arguments.

    ``completes`` returns `RankPlace.completes`, or raises.
    """

    def describe_this_rank() -> RankPlace:
        # They raise for a bad value. Here a bad value on one rank is an error on all ranks.
        environment.bind_cpu()
        environment.internode()
        if not isinstance(leaves, int) or leaves not in [1 << bits for bits in range(11)]:
            raise InvalidUsageError(f"leaves={leaves!r}: pass a power of two from 1 to 1024")
        request = environment.device(device)
        devices: tuple[DeviceInfo, ...] = ()
        reason = "the cpu was asked for"
        if request != "cpu":
            from mpicomm.devices.cuda.driver import visible_devices

            try:
                devices = tuple(visible_devices())
            except BackendUnavailableError as error:
                reason = str(error)
        return RankPlace(
            socket.gethostname(),
            os.getpid(),
            node_key(),
            devices,
            reason,
            request,
            environment.handle(handle),
            group.timeout_s,
            token=secrets.token_bytes(SECRET_NBYTES),
            assigned=_assigned[0] if _assigned else b"",
            local_id=environment.local_id(),
            memory_limit_nbytes=environment.memory_limit_nbytes(),
            process_number=process_number(),
            completes=completes(),
            reductions=environment.reductions(reductions),
            leaves=leaves,
        )

    places = group.allgather("Communicator: find devices", describe_this_rank)
    for argument in ("handle", "timeout_s", "reductions", "leaves"):
        require_same(argument, [getattr(place, argument) for place in places])
    require_same("MPICOMM_MEMORY", [place.memory_limit_nbytes for place in places])
    requests = [place.device for place in places]
    kinds = ["ordinal" if isinstance(request, int) else request for request in requests]
    require_same("device", kinds)
    if kinds[0] == "auto":
        requests = _choose_devices(places)
    for rank, (place, request) in enumerate(zip(places, requests, strict=True)):
        if isinstance(request, int) and not place.devices:
            raise BackendUnavailableError(f"device={request} on rank {rank}: {place.no_device_reason}", ranks=[rank])
        if isinstance(request, int) and request >= len(place.devices):
            raise InvalidUsageError(
                f"device={request} on rank {rank}: it sees the devices 0 to {len(place.devices) - 1}; "
                "CUDA_VISIBLE_DEVICES decides which",
                ranks=[rank],
            )
    places = [replace(place, device=request) for place, request in zip(places, requests, strict=True)]
    placement = Placement(places, group.rank)
    if kinds[0] == "auto" and requests[group.rank] != "cpu":
        _assigned[:] = [placement.here.device_uuid]
    _log_choice(placement, automatic=kinds[0] == "auto")
    if environment.bind_cpu():
        _bind_cpu(placement.here)
    return placement


def _choose_devices(places: Sequence[RankPlace]) -> list[int | str]:
    chosen: list[int | str] = ["cpu"] * len(places)
    if not all(place.devices for place in places):
        return chosen
    for ranks in group_by_node([place.node_key for place in places]):
        visible = [[device.uuid for device in places[rank].devices] for rank in ranks]
        assigned = [places[rank].assigned for rank in ranks]
        local_ids = [places[rank].local_id for rank in ranks]
        for rank, ordinal in zip(ranks, assign_devices(visible, assigned, local_ids), strict=True):
            chosen[rank] = ordinal
    return chosen


def assign_devices(
    visible: Sequence[Sequence[bytes]], assigned: Sequence[bytes], local_ids: Sequence[int]
) -> list[int]:
    """Assign to each rank of a node the device that the fewest other ranks have; return an ordinal for each rank.

    ``visible`` holds the UUIDs that each rank sees, in its order, and ordinals count in this order. First, ranks keep
    the devices that are ``assigned`` to them in other communicators. One rule covers the rest:

    * Ranks that see all devices get one device each, in order.
    * Ranks that see one device each (CUDA_VISIBLE_DEVICES set per rank) get that device.
    * If there are more ranks than devices, ranks are spread evenly over the devices.

    If all ranks see the same devices, the search of a rank begins at its entry in ``local_ids``, its number among all
    processes of the job on the machine. So two halves of the job that each make a communicator take different devices.
    """
    users = Counter(uuid for uuid, uuids in zip(assigned, visible, strict=True) if uuid in uuids)
    same_view = len({tuple(uuids) for uuids in visible}) == 1
    ordinals = []
    for uuids, kept, local_id in zip(visible, assigned, local_ids, strict=True):
        if kept in uuids:
            ordinals.append(uuids.index(kept))
            continue
        begin = local_id if same_view else 0
        ordinal = min(range(len(uuids)), key=lambda index: (users[uuids[index]], (index - begin) % len(uuids)))
        users[uuids[ordinal]] += 1
        ordinals.append(ordinal)
    return ordinals


def split_evenly(ranks: Sequence[int], max_size: int) -> list[list[int]]:
    """Split ranks in order into as few parts as possible, with at most ``max_size`` ranks and about equally many."""
    count = -(-len(ranks) // max_size)
    bounds = [len(ranks) * part // count for part in range(count + 1)]
    return [list(ranks[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _log_choice(placement: Placement, *, automatic: bool) -> None:
    """Log the choice once, at WARN if another choice would be faster."""
    places = placement.places
    if automatic and placement.rank == 0 and places[0].device == "cpu":
        rank = next(rank for rank, place in enumerate(places) if not place.devices)
        # A GPU that mpicomm cannot use is worth a warning; a machine without a GPU is not.
        has_gpu = any(place.devices for place in places) or Path("/dev/nvidiactl").exists()
        log: Callable[..., None] = logger.warning if has_gpu else logger.info
        log("using the cpu: rank %d has no device: %s", rank, places[rank].no_device_reason)
    if placement.local_rank == 0:
        users: dict[bytes, list[int]] = {}
        for rank in placement.node_ranks:
            if places[rank].device != "cpu":
                users.setdefault(places[rank].device_uuid, []).append(rank)
        shared = [ranks for ranks in users.values() if len(ranks) > 1]
        if shared and environment.multi_process_service():
            logger.info("ranks share a GPU, side by side by NVIDIA's multi-process service: %s", shared)
        elif shared:
            logger.warning(
                "ranks share a GPU and take turns on it, which is slow: %s; start one rank for each GPU, or let "
                "NVIDIA's multi-process service run them side by side: nvidia-cuda-mps-control -d",
                shared,
            )


def _bind_cpu(place: RankPlace) -> None:
    if not isinstance(place.device, int):
        return
    node = place.devices[place.device].numa_node
    cpulist = Path(f"/sys/devices/system/node/node{node}/cpulist")
    if node < 0 or not cpulist.exists():
        logger.info("MPICOMM_BIND_CPU: the NUMA node of device %d is unknown; nothing bound", place.device)
        return
    cores = set(ranks_of_text(cpulist.read_text().strip())) & os.sched_getaffinity(0)
    if not cores:
        logger.warning("MPICOMM_BIND_CPU: this process may use no core of NUMA node %d; nothing bound", node)
        return
    os.sched_setaffinity(0, cores)
    logger.info("bound to cores %s of NUMA node %d", sorted(cores), node)
