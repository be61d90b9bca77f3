from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-bindings and NVRTC")

from mpicomm.collectives.gpu.algorithms import memory
from mpicomm.collectives.gpu.algorithms.chain import plan as chain
from mpicomm.collectives.gpu.algorithms.chain.plan import ChainArguments, HopArguments
from mpicomm.collectives.gpu.algorithms.chunks import plan as exchange
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChunkLink, ExchangeArguments
from mpicomm.collectives.gpu.algorithms.copies import plan as local_reduction
from mpicomm.collectives.gpu.algorithms.copies.plan import LocalReductionArguments
from mpicomm.collectives.gpu.algorithms.direct import plan as direct
from mpicomm.collectives.gpu.algorithms.direct.plan import Cut, DirectArguments
from mpicomm.collectives.gpu.algorithms.packets import arguments as packets
from mpicomm.collectives.gpu.algorithms.packets.arguments import PacketArguments
from mpicomm.collectives.gpu.algorithms.packets.configs import most_groups
from mpicomm.collectives.gpu.algorithms.sendrecv import plan as sendrecv
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvArguments, SendrecvSide
from mpicomm.collectives.wire import BLOCK
from mpicomm.devices.cuda.load import compile_kernel
from mpicomm.kernels import epilogue, experts, message, packing, team, window
from mpicomm.kernels import reductions as combine
from mpicomm.kernels import window as accumulate
from mpicomm.kernels.reductions import OPTIONS, REDUCTIONS, cpp_name, options_for
from mpicomm.kernels.team import ABSENT, Faults, FlaggedInboxes, Team
from mpicomm.p2p import gpu as p2p
from tests.helpers.inputs.kernel_sources import INCLUDES
from tests.helpers.references.reductions import SENTINELS

# For a device newer than NVRTC the result is PTX. The compiler has checked all assertions by then.
WITHOUT_ASSEMBLER = (99, 0)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Types differ only between devices below 8.0, below 9.0, and newer ones.
@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0)], ids="sm_{0[0]}{0[1]}".format)
def test_every_reduction_compiles(tmp_path: Path, capability: tuple[int, int]) -> None:
    kernels = [
        f'extern "C" __global__ void {dtype}_{op}(const dtype::{cpp}* in, dtype::{cpp}* out) {{\n'
        f"  using Op = op::{op}<dtype::{cpp}>;\n"
        "  out[0] = Op::last(next_of<Op>(Op::first(in[0]), in[1], 1), 2);\n}"
        for dtype, ops in REDUCTIONS.items()
        for cpp in [cpp_name(dtype)]
        for op in ops
    ]
    source = tmp_path / "all.cu"
    source.write_text("\n".join(['#include "reduce.cuh"', "using namespace mpicomm;", *kernels]))
    image = compile_kernel(source, capability, OPTIONS)
    assert all(f"{dtype}_{op}".encode() in image for dtype, ops in REDUCTIONS.items() for op in ops)


STRUCTURES: dict[str, dict[str, type[ctypes.Structure]]] = {
    "team.cuh": {"mpicomm::Team": Team, "mpicomm::Faults": Faults},
    "exchange.cu": {"mpicomm::Link": ChunkLink, "mpicomm::Exchange": ExchangeArguments},
    "packets.cu": {"mpicomm::Packets": PacketArguments, "mpicomm::FlaggedInboxes": FlaggedInboxes},
    "direct.cu": {"mpicomm::Direct": DirectArguments, "mpicomm::Cut": Cut},
    "local_reduction.cu": {"mpicomm::LocalReduction": LocalReductionArguments},
    "combine.cu": {"mpicomm::Combination": combine.CombineArguments},
    "pack.cu": {"mpicomm::Region": packing.RegionEntry, "mpicomm::Packing": packing.PackArguments},
    "message.cu": {"mpicomm::MessageStep": message.MessageStep},
    "window.cu": {"mpicomm::Synchronisation": window.SynchronisationArguments, "mpicomm::Lock": window.LockWords},
    "experts_dispatch.cu": {
        "mpicomm::Experts": experts.ExpertsArguments,
        "mpicomm::Dispatch": experts.DispatchArguments,
        "mpicomm::TwoArrays<mpicomm::u8>": experts.TwoArrays,
    },
    "experts_combine.cu": {"mpicomm::Combine": experts.CombineExpertsArguments},
    "experts_quantize.cu": {"mpicomm::Quantize": experts.QuantizeArguments},
    "chain.cu": {"mpicomm::Hop": HopArguments, "mpicomm::Chain": ChainArguments},
    "sendrecv.cu": {"mpicomm::Side": SendrecvSide, "mpicomm::Sendrecv": SendrecvArguments},
    "p2p.cu": {
        "mpicomm::Gate": p2p.Gate,
        "mpicomm::Copying": p2p.Copying,
        "mpicomm::PointerChase": p2p.PointerChase,
    },
}
CONSTANTS = {
    "team.cuh": {
        "kLanes": team.LANES,
        "kMaxRanks": team.MAX_RANKS,
        "kMaxBlocks": team.MAX_BLOCKS,
        "kLineNbytes": team.LINE_NBYTES,
        "kHeadNbytes": team.HEAD_NBYTES,
        "kExchange": team.EXCHANGE,
        "kMismatch": team.MISMATCH,
        "kMessage": team.MESSAGE,
        "kCounts": team.COUNTS,
        "kCountedRoom": team.COUNTED_ROOM,
    },
    "exchange.cu": {
        "kThreads": exchange.THREADS,
        "kSlots": memory.CHUNK_SLOTS,
        "kPacketNbytes": exchange.PACKET_NBYTES,
    },
    "packets.cu": {
        "kOverseers": packets.OVERSEERS,
        "kStages": packets.STAGES,
        "kSlotNbytes": packets.SLOT_NBYTES,
        "kFencesNbytes": packets.FENCES_NBYTES,
        "SentinelProtocol::kAbsent": ABSENT,
        "SentinelProtocol::kEscaped": SENTINELS[1],
    },
    "direct.cu": {"kDirectThreads": direct.DIRECT_THREADS},
    "local_reduction.cu": {"kReductionThreads": local_reduction.REDUCTION_THREADS},
    "combine.cu": {"kCombineThreads": combine.COMBINE_THREADS},
    "pack.cu": {
        "kPackThreads": packing.PACK_THREADS,
        "kLoops": packing.LOOPS,
        "kPacketNbytes": packing.UNIT_NBYTES,
    },
    "message.cu": {"kMessageThreads": message.MESSAGE_THREADS},
    "window.cu": {
        "kWindowRanks": window.WINDOW_RANKS,
        "kWindowThreads": window.WINDOW_THREADS,
        "kRowWords": window.ROW_WORDS,
        "kRowsOfCounts": window.ROWS_OF_COUNTS,
        "kLockRow": window.LOCK_ROW,
        "kExclusiveShift": window.EXCLUSIVE_SHIFT,
        "kComesFirst": window.COMES_FIRST,
        "kFence": window.FENCE,
        "kStart": window.START,
        "kWait": window.WAIT,
        "kLock": window.LOCK,
    },
    "experts_dispatch.cu": {
        "kDispatchThreads": experts.DISPATCH_THREADS,
        "kMostExperts": experts.MOST_EXPERTS,
        "kMostTopK": experts.MOST_TOP_K,
        "kFewTokens": experts.FEW_TOKENS,
        "kHeads": experts.HEADS,
        "kPartPackets": experts.PART_PACKETS,
        "kDispatch": experts.DISPATCH,
        "kCombine": experts.COMBINE,
        "kRoutes": experts.ROUTES,
        "kRoom": experts.ROOM,
    },
    "experts_combine.cu": {"kPacketNbytes": experts.PACKET_NBYTES, "kSumThreads": experts.SUM_THREADS},
    "experts_quantize.cu": {"kGroup": experts.GROUP, "kQuantizeThreads": experts.QUANTIZE_THREADS},
    "chain.cu": {
        "kChainThreads": chain.CHAIN_THREADS,
        "kChainSlots": chain.CHAIN_SLOTS,
        "kBatchNbytes": chain.BATCH_NBYTES,
    },
    "p2p.cu": {"kCopyThreads": p2p.COPY_THREADS},
    "sendrecv.cu": {
        "kSendrecvThreads": sendrecv.SENDRECV_THREADS,
        "kSendrecvBlocks": sendrecv.SENDRECV_BLOCKS,
        "kSendrecvSlots": sendrecv.SENDRECV_SLOTS,
        "kSendrecvSlotNbytes": sendrecv.SENDRECV_SLOT_NBYTES,
    },
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_host_and_kernel_agree_on_structures_and_constants(name: str, tmp_path: Path) -> None:
    assert SENTINELS[0] == ABSENT
    require_agreement(name, STRUCTURES[name], CONSTANTS[name], tmp_path)


def test_host_and_kernel_agree_on_accumulates(tmp_path: Path) -> None:
    structures = {"mpicomm::Accumulation": accumulate.AccumulateArguments, "mpicomm::Swap": accumulate.SwapArguments}
    options = accumulate.accumulate_kernel(("float32", "sum"), 4).options
    constants = {"kAccumulateThreads": accumulate.ACCUMULATE_THREADS}
    require_agreement("accumulate.cu", structures, constants, tmp_path, options)


def test_host_and_kernel_agree_on_epilogues(tmp_path: Path) -> None:
    structures = {"mpicomm::Epilogue": epilogue.EpilogueArguments, "mpicomm::Operands": epilogue.EpilogueOperands}
    constants = {"kMostOperands": epilogue.MOST_OPERANDS, "kEpilogueThreads": epilogue.EPILOGUE_THREADS}
    options = epilogue.epilogue_options("v", "float32")
    require_agreement("epilogue.cu", structures, constants, tmp_path, options)
    norm = {"mpicomm::NormKernel": epilogue.NormKernelArguments, "mpicomm::Norm": epilogue.NormArguments}
    threads, norm_options = {"kNormThreads": epilogue.NORM_THREADS}, epilogue.norm_options("float32", "float32")
    require_agreement("norm.cu", norm, threads, tmp_path, norm_options)
    with_finish = {"mpicomm::Packets": packets.finished_packet_arguments(epilogue.PacketEpilogue)}
    require_agreement(
        "packet_worker.cuh", {**with_finish, "mpicomm::Finish": epilogue.PacketEpilogue}, {}, tmp_path, options
    )
    with_norm = {"mpicomm::Packets": packets.finished_packet_arguments(epilogue.NormArguments)}
    sentinel = ("-DMPICOMM_SENTINEL", *norm_options)
    require_agreement("packet_worker.cuh", with_norm, {"kGroups": most_groups(4, fan_out=False)}, tmp_path, sentinel)


def test_host_and_kernel_agree_on_counts_on_the_device(tmp_path: Path) -> None:
    structures = {
        "mpicomm::Packets": packets.CountedPacketArguments,
        "mpicomm::Counted": packets.CountedArguments,
        "mpicomm::CountedSide": packets.CountedSideArguments,
    }
    options = ("-DMPICOMM_SENTINEL", "-DMPICOMM_COUNTED")
    require_agreement("packet_worker.cuh", structures, {"kOfReceive": team.OF_RECEIVE}, tmp_path, options)


def test_host_and_kernel_agree_on_strides(tmp_path: Path) -> None:
    structures = {"mpicomm::Packets": packets.StridedPacketArguments, "mpicomm::Strides": packets.StrideArguments}
    options = ("-DMPICOMM_SENTINEL", "-DMPICOMM_STRIDED")
    require_agreement("packet_worker.cuh", structures, {"kStrideLoops": packing.LOOPS}, tmp_path, options)


def require_agreement(
    name: str,
    structures: Mapping[str, type[ctypes.Structure]],
    constants: Mapping[str, int],
    tmp_path: Path,
    options: tuple[str, ...] = (),
) -> None:
    lines = [f'#include "{name}"']
    lines += [f"static_assert(mpicomm::{constant} == {value});" for constant, value in constants.items()]
    # NVRTC brings no header that defines offsetof; its compiler turns offsetof into this expression.
    for cpp, structure in structures.items():
        lines.append(f"static_assert(sizeof({cpp}) == {ctypes.sizeof(structure)});")
        for field in structure._fields_:
            offset = getattr(structure, field[0]).offset
            lines.append(f"static_assert(__INTADDR__(&static_cast<{cpp}*>(nullptr)->{field[0]}) == {offset});")
    source = tmp_path / "check.cu"
    source.write_text("\n".join(lines))
    reduction = (
        *options_for(("float32", "sum")),
        "-DMPICOMM_RANKS=4",
        "-DMPICOMM_RESULT=float32",
        "-DMPICOMM_BY_TOKEN=true",
        "-DMPICOMM_IN_PACKETS=true",
    )
    compile_kernel(source, WITHOUT_ASSEMBLER, (*reduction, *options, *INCLUDES))


@pytest.mark.parametrize("steps", ["one", "laps"])
@pytest.mark.parametrize("fan_out", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5])  # more are as many as 5
def test_host_and_kernel_agree_on_the_threads_of_a_block(
    tmp_path: Path, size: int, fan_out: bool, steps: packets.Steps
) -> None:
    workers = packets.most_workers(size, fan_out=fan_out, one_step=steps == "one")
    variant = packets.packet_kernel(("int32", "sum"), size, "sentinel", steps, fan_out=fan_out)
    source = tmp_path / "check.cu"
    # Without the kernel of packets.cu, because the compiler takes long for it.
    source.write_text(f'#include "packet_worker.cuh"\nstatic_assert(mpicomm::kWorkers == {workers});')
    compile_kernel(source, WITHOUT_ASSEMBLER, (*variant.options, *INCLUDES))
    for dtype in ("bfloat16", "float32"):
        wire = packets.wire_options("int8", moves=False, codes_result=True)
        variant = packets.packet_kernel((dtype, "sum"), size, "sentinel", steps, fan_out=fan_out, wire=wire)
        workers = packets.most_workers(size, fan_out=fan_out, one_step=steps == "one", coded=True)
        constants = {
            "kWorkers": workers,
            "kParts": packets.parts_of(size, one_step=steps == "one"),
            "kPartElements": packets.CODES_OF_PACKET,
            "kBlockElements": BLOCK,
        }
        lines = [f"static_assert(mpicomm::{name} == {value});" for name, value in constants.items()]
        source.write_text("\n".join(['#include "packet_worker.cuh"', *lines]))
        compile_kernel(source, WITHOUT_ASSEMBLER, (*variant.options, *INCLUDES))
