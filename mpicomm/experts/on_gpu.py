"""Dispatch and combine on GPUs, by kernels on memory that all ranks map."""

from __future__ import annotations

import zlib

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.experts.arrays import DTYPES, ExpertsConfig
from mpicomm.kernels import experts as kernels
from mpicomm.kernels.team import ARENA_HEADER_NBYTES, LINE_NBYTES, MAX_BLOCKS, MAX_RANKS, PACKET_NBYTES, Team
from mpicomm.kernels.variant import Launch
from mpicomm.session import Session
from mpicomm.sharing.segments import SharedMemory

_WORD_NBYTES = 8


BlocksByMode = dict[str, tuple[int, int]]
"""The blocks that send and that receive, of "dispatch", "combine", and of both with " of few" tokens."""


def blocks_by_mode(config: ExpertsConfig, most: int) -> BlocksByMode:
    """Return the blocks of launches of at most ``most`` blocks, which is 2 or more.

    More of the blocks receive in the layout by expert, because receivers store a token several times. More receive
    packets, too, because a warp waits for one part after the other.
    """

    def cut(senders: int, receivers: int) -> tuple[int, int]:
        total = senders + receivers
        if total > most:
            senders = min(max(1, senders * most // total), most - 1)
            receivers = most - senders
        return senders, receivers

    return {
        "dispatch of few": cut(76, 156) if config.in_packets else cut(76, 56) if config.by_token else cut(44, 88),
        "dispatch": cut(78, 178),
        "combine of few": cut(128, 128),
        "combine": cut(88, 168),
    }


class ExpertsMemory:
    """The layout of an arena: see experts.cuh."""

    def __init__(self, config: ExpertsConfig) -> None:
        self.config = config
        recv_slots = (config.size - 1) * config.recv_slots
        packets = config.size * (config.recv_slots * config.top_k + kernels.HEADERS)
        row_parts, sum_parts = (_parts_of(nbytes)[0] for nbytes in (config.row_nbytes, config.sum_nbytes))
        end = ARENA_HEADER_NBYTES
        self.offsets: dict[str, int] = {}
        """The offset of each part, by its name in `ExpertsArguments`."""
        for name, nbytes in (
            ("routes", packets * PACKET_NBYTES),
            ("row_flags", recv_slots * row_parts * _WORD_NBYTES),
            ("sum_flags", recv_slots * sum_parts * _WORD_NBYTES),
            ("histogram_flags", (MAX_BLOCKS + 3) * _WORD_NBYTES),
            ("histograms", MAX_BLOCKS * (config.num_experts + config.size) * 4),
            ("values", config.recv_slots * config.top_k * 4),
            ("rows", recv_slots * config.row_nbytes),
            ("sums", recv_slots * config.sum_nbytes),
        ):
            self.offsets[name] = end
            end = _round_up(end + nbytes, LINE_NBYTES)
        self.quantized = end
        """Private memory for the tokens of this rank as they travel, if they are quantized."""
        self.nbytes = end + (config.max_tokens * config.row_nbytes if config.wire else 0)
        self.absent = (self.offsets["rows"], end) if config.in_packets else (0, 0)
        """The begin and the end of the slots of packets, which hold `ABSENT` at first. All other memory is zero."""

    def arguments(self, team: Team, row_nbytes: int) -> kernels.ExpertsArguments:
        """Return the part of the argument that dispatch and combine share, without the number of senders."""
        parts, part_nbytes = _parts_of(row_nbytes)
        config = self.config
        arguments = kernels.ExpertsArguments(
            team=team,
            **self.offsets,
            row_nbytes=row_nbytes,
            part_nbytes=part_nbytes,
            parts=parts,
            max_tokens=config.max_tokens,
            few_tokens=config.few_tokens,
            recv_slots=config.recv_slots,
            top_k=config.top_k,
        )
        arguments.first_experts[: config.size + 1] = config.firsts
        return arguments


def _parts_of(row_nbytes: int) -> tuple[int, int]:
    """Return in how many parts a row travels, and the bytes of a part, in whole packets. The last may be shorter."""
    parts = -(-row_nbytes // kernels.PART_NBYTES)
    return parts, _round_up(-(-row_nbytes // parts), PACKET_NBYTES)


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class ExpertsLaunches:
    """Makes the launches of one rank. It reaches the arenas through ``team``."""

    def __init__(self, config: ExpertsConfig, team: Team, blocks: BlocksByMode, multiprocessors: int = 1) -> None:
        self._config = config
        self._multiprocessors = multiprocessors
        self._quantizes = kernels.quantize_experts_kernel(config.dtype.name)
        self.blocks = blocks
        self._memory = memory = ExpertsMemory(config)
        self._quantized = team.arenas[team.rank] + memory.quantized
        self._dispatch = kernels.DispatchArguments(
            experts=memory.arguments(team, config.row_nbytes),
            capacity=config.capacity,
            all_places=config.places,
            alignment=config.alignment,
        )
        for each in (self._dispatch.x, self._dispatch.rows):
            each.first_nbytes, each.second_nbytes = config.hidden * config.row_dtype.itemsize, 4 * config.scales
        self._combine = kernels.CombineExpertsArguments(experts=memory.arguments(team, config.sum_nbytes))
        self._kernel = kernels.DISPATCH_FEW_KERNEL if config.in_packets else kernels.DISPATCH_KERNEL
        dtype, layout = config.dtype.name, {"by_token": config.by_token, "in_packets": config.in_packets}
        self._combines = {result: kernels.combine_experts_kernel(dtype, result, **layout) for result in DTYPES}
        self.kernels = [self._kernel, *self._combines.values(), *([self._quantizes] if config.scales else [])]
        """The kernels of the launches."""
        for arguments, text in ((self._dispatch, "dispatch"), (self._combine, "combine")):
            arguments.experts.team.tags[:] = [zlib.crc32(text.encode())] * MAX_RANKS

    def dispatch(
        self, x: tuple[int, int], ids: int, weights: int, pointers: dict[str, int], tokens: int, *, wide_ids: bool
    ) -> Launch:
        """Return the launch. The next call changes its argument.

        ``x`` are the addresses of the rows and of their scales, and ``pointers`` those of `Received`.
        """
        arguments, blocks = self._dispatch, self._blocks_for("dispatch", tokens)
        arguments.experts.senders, _ = blocks
        arguments.x.first, arguments.x.second = x
        arguments.ids, arguments.weights = ids, weights
        arguments.rows.first, arguments.rows.second = pointers["x"], pointers["scales"]
        arguments.place_weights = pointers["weights"]
        arguments.counts, arguments.offsets = pointers["counts"], pointers["offsets"]
        arguments.sources, arguments.places = pointers["sources"], pointers["places"]
        arguments.targets, arguments.tokens = pointers["targets"], pointers["tokens"]
        arguments.token_rows, arguments.place_rows = pointers["token_rows"], pointers["rows"]
        arguments.slot_ids, arguments.slot_weights = pointers["topk_ids"], pointers["topk_weights"]
        arguments.row_count = pointers["row_count"]
        arguments.num_tokens, arguments.wide_ids = tokens, wide_ids
        return Launch(self._kernel, arguments, sum(blocks), kernels.DISPATCH_THREADS)

    def quantize(self, x: int, tokens: int) -> tuple[Launch, tuple[int, int]]:
        """Return the launch that quantizes tokens, and the addresses of the rows and of their scales."""
        config = self._config
        addresses = self._quantized, self._quantized + config.max_tokens * config.hidden
        groups = tokens * config.scales
        blocks = kernels.quantize_blocks(groups, self._multiprocessors)
        arguments = kernels.QuantizeArguments(x, *addresses, groups)
        return Launch(self._quantizes, arguments, blocks, kernels.QUANTIZE_THREADS), addresses

    def combine(
        self,
        rows: int,
        pointers: dict[str, int],
        tokens: int,
        output: int,
        dtype: str,
        values: tuple[int, int] = (0, 0),
        *,
        weighted: bool,
    ) -> Launch:
        """Return the launch, as `dispatch`. ``values`` are the addresses of the values of rows and of slots."""
        arguments, blocks = self._combine, self._blocks_for("combine", tokens)
        arguments.experts.senders, _ = blocks
        arguments.rows, arguments.output = rows, output
        arguments.values, arguments.slot_values = values
        arguments.row_weights = pointers["weights"] if weighted else 0
        arguments.places, arguments.targets = pointers["places"], pointers["targets"]
        arguments.token_rows = pointers["token_rows"]
        arguments.tokens, arguments.num_tokens = pointers["tokens"], tokens
        return Launch(self._combines[dtype], arguments, sum(blocks), kernels.SUM_THREADS)

    def _blocks_for(self, what: str, tokens: int) -> tuple[int, int]:
        return self.blocks[f"{what} of few" if tokens <= self._config.max_few else what]


def open_on_gpus(session: Session, config: ExpertsConfig, backend: GpuBackend) -> tuple[SharedMemory, ExpertsLaunches]:
    """Return the arenas, which all ranks open for each other, and the launches of this rank.

    Collective; a failure raises the same error on all ranks. Raises `InvalidUsageError` unless all ranks map each
    other's GPU memory.
    """
    domain, placement = session.domain, session.placement
    if domain.size != session.group.size:
        raise InvalidUsageError(
            f"Experts: the communicator has {session.group.size} ranks of {len(placement.nodes)} nodes, and kernels "
            f"serve up to {MAX_RANKS} ranks of one node: create the Experts on "
            "comm.Split_type(MPI.COMM_TYPE_SHARED), or send tokens to other nodes by comm.Alltoallv with counts in "
            "host memory"
        )
    # Not above, because it loads CUDA's bindings.
    from mpicomm.collectives.gpu.call_memory import device_facts, multiprocessors_of, share_filled, team_of

    memory = ExpertsMemory(config)
    segments = share_filled(domain, backend, session.kind, "Experts", memory.nbytes, memory.absent)
    arena = session.keep(SharedMemory("experts", session.kind, segments))
    devices = domain.allgather("Experts: devices", lambda: device_facts(backend))
    multiprocessors, _ = multiprocessors_of(devices, placement.max_ranks_per_device)
    most = min(MAX_BLOCKS, kernels.BLOCKS_OF_A_MULTIPROCESSOR * multiprocessors, config.blocks or MAX_BLOCKS)
    team = team_of(backend, domain, arena.pointers)
    launches = ExpertsLaunches(config, team, blocks_by_mode(config, most), multiprocessors)
    # Loading may wait for a device on which a kernel waits, so it comes before all launches.
    for kernel in launches.kernels:
        backend.load(kernel)
    return arena, launches
