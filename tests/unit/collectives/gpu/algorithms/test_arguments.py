from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-bindings and NVRTC")

from mpicomm.collectives import packed
from mpicomm.collectives.gpu.algorithms import memory
from mpicomm.collectives.gpu.algorithms.chain import plan as chain
from mpicomm.collectives.gpu.algorithms.chunks import plan as chunks
from mpicomm.collectives.gpu.algorithms.copies import plan as copies
from mpicomm.collectives.gpu.algorithms.direct import plan as direct
from mpicomm.collectives.gpu.algorithms.packets import arguments as packets
from mpicomm.collectives.gpu.algorithms.packets.configs import most_groups
from mpicomm.collectives.gpu.algorithms.sendrecv import plan as sendrecv
from mpicomm.collectives.wire import BLOCK
from mpicomm.kernels import epilogue, experts, message, packing, reductions, team, window
from mpicomm.kernels.reductions import OPTIONS, REDUCTIONS, cpp_name, options_for
from mpicomm.p2p import __main__ as p2p
from tests.helpers.inputs.kernel_sources import INCLUDES, SOURCES, compile_kernel
from tests.helpers.references.reductions import SENTINELS

# For a device newer than NVRTC the result is PTX. The compiler has checked all assertions by then.
WITHOUT_ASSEMBLER = (99, 0)
# The oldest that NVRTC compiles for. tests/kernels/test_compiled.py compiles kernels for newer ones.
OLDEST = (7, 5)
# Enough to see that a kernel compiles, and in half the time. tests/kernels/test_compiled.py looks at registers.
HARDLY_OPTIMIZED = "--Ofast-compile=max"


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


_ALGORITHMS, _KERNELS = (chain, chunks, copies, direct, packets, sendrecv), (packing, reductions, team, window)
COPIES: dict[str, dict[str, type[ctypes.Structure]]] = defaultdict(dict)
"""The host's copies of structures by the file of the structure, as their docstrings say."""
for _module in (*_ALGORITHMS, *_KERNELS, epilogue, experts, message, p2p):
    for _copy in vars(_module).values():
        _said = re.match(r"The host's copy of ``(\w+)`` in ([\w.]+\.cuh?)", getattr(_copy, "__doc__", None) or "")
        if _said:
            COPIES[_said[2]][f"mpicomm::{_said[1]}{'<mpicomm::u8>' * (_said[1] == 'TwoArrays')}"] = _copy


def same(module: ModuleType, names: str) -> dict[str, int]:
    """Return constants of a module by their names in kernels: ``MAX_RANKS`` is ``kMaxRanks``."""
    return {"k" + "".join(map(str.capitalize, name.split("_"))): getattr(module, name) for name in names.split()}


_TEAM = "LANES MAX_RANKS MAX_BLOCKS LINE_NBYTES PACKET_NBYTES ARENA_HEADER_NBYTES "
_TEAM += "EXCHANGE MISMATCH MESSAGE COUNTS RECEIVE_OVERFLOW"
_WINDOW = "RANKS WINDOW_THREADS ROW_WORDS ROWS_OF_COUNTS LOCK_ROW EXCLUSIVE_SHIFT COMES_FIRST FENCE START WAIT LOCK"
_DISPATCH = "DISPATCH_THREADS MAX_EXPERTS MAX_TOP_K FEW_TOKENS HEADERS PART_PACKETS DISPATCH COMBINE ROUTES ROOM"
_SENDRECV = "SENDRECV_THREADS SENDRECV_BLOCKS SENDRECV_SLOTS SENDRECV_PART_NBYTES"
_SENDRECV += " SENDRECV_CHUNK_SLOTS SENDRECV_CHUNK_NBYTES"
_SENTINELS = {"SentinelProtocol::kAbsent": team.ABSENT, "SentinelProtocol::kEscaped": SENTINELS[1]}
CONSTANTS = {
    "team.cuh": same(team, _TEAM),
    "exchange.cu": {**same(chunks, "THREADS"), "kSlots": memory.CHUNK_SLOTS},
    "packets.cu": same(packets, "OVERSEERS SLOT_NBYTES FENCES_NBYTES") | _SENTINELS,
    "direct.cu": same(direct, "DIRECT_THREADS"),
    "local_reduction.cu": same(copies, "REDUCTION_THREADS"),
    "combine.cu": same(reductions, "COMBINE_THREADS"),
    "pack.cu": same(packing, "PACK_THREADS LOOPS"),
    "message.cu": same(message, "MESSAGE_THREADS"),
    "window.cu": same(window, f"WINDOW_{_WINDOW}"),
    "experts_dispatch.cu": same(experts, _DISPATCH),
    "experts_combine.cu": same(experts, "SUM_THREADS"),
    "experts_quantize.cu": same(experts, "GROUP QUANTIZE_THREADS"),
    "chain.cu": same(chain, "CHAIN_THREADS CHAIN_SLOTS BATCH_NBYTES"),
    "sendrecv.cu": same(sendrecv, _SENDRECV),
    "p2p.cu": same(p2p, "COPY_THREADS"),
    "accumulate.cu": same(window, "ACCUMULATE_THREADS"),
    "epilogue.cu": same(epilogue, "MOST_OPERANDS EPILOGUE_THREADS"),
    "norm.cu": same(epilogue, "NORM_THREADS"),
    "device_counts.cuh": same(team, "OF_RECEIVE"),
    "strided.cuh": {"kStrideLoops": packing.LOOPS, "kMostStrides": packed.MOST_STRIDES},
}
WITH_EPILOGUE, WITH_NORM = epilogue.epilogue_options("v", "float32"), epilogue.norm_options("float32", "float32")
DEVICE_COUNTS, STRIDED = (("-DMPICOMM_SENTINEL", f"-DMPICOMM_{name}") for name in ("DEVICE_COUNTS", "STRIDED"))
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "accumulate.cu": window.accumulate_kernel(("float32", "sum"), 4).options,
    **dict.fromkeys(("epilogue.cu", "epilogue.cuh", "finish.cuh"), WITH_EPILOGUE),
    **dict.fromkeys(("norm.cu", "norm.cuh"), WITH_NORM),
    "device_counts_step.cu": packets.device_counts_step_kernel(4).options,
    "device_counts.cuh": DEVICE_COUNTS,
    "strided.cuh": STRIDED,
}
PACKETS: dict[str, tuple[type[ctypes.Structure], tuple[str, ...], dict[str, int]]] = {
    "epilogue": (packets.finished_packet_arguments(epilogue.PacketEpilogue), WITH_EPILOGUE, {}),
    "norm": (
        packets.finished_packet_arguments(epilogue.NormArguments),
        ("-DMPICOMM_SENTINEL", *WITH_NORM),
        {"kGroups": most_groups(4, fan_out=False)},
    ),
    "device counts": (packets.DeviceCountsPacketArguments, DEVICE_COUNTS, {}),
    "strided": (packets.StridedPacketArguments, STRIDED, {}),
}
"""The arguments of packets.cu in kernels with more fields."""


@pytest.mark.parametrize("name", sorted({*SOURCES, *COPIES, *CONSTANTS}))
def test_every_kernel_compiles_and_agrees_with_the_host_on_structures_and_constants(name: str, tmp_path: Path) -> None:
    assert SENTINELS[0] == team.ABSENT
    image = require_agreement(name, COPIES[name], CONSTANTS.get(name, {}), tmp_path, OPTIONS_OF.get(name, ()))
    if name in SOURCES:
        names = re.findall(r"MPICOMM_KERNEL\s+void\s+(\w+)\(", SOURCES[name].read_text())
        assert names and image.startswith(b"\x7fELF")
        assert [name for name in names if name.encode() not in image] == []


@pytest.mark.parametrize("name", PACKETS)
def test_host_and_kernel_agree_on_the_arguments_of_packets(name: str, tmp_path: Path) -> None:
    arguments, options, constants = PACKETS[name]
    require_agreement("packet_worker.cuh", {"mpicomm::Packets": arguments}, constants, tmp_path, options)


def require_agreement(
    name: str,
    structures: Mapping[str, type[ctypes.Structure]],
    constants: Mapping[str, int],
    tmp_path: Path,
    options: tuple[str, ...] = (),
) -> bytes:
    """Return the compiled source or header."""
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
    capability = OLDEST if name in SOURCES else WITHOUT_ASSEMBLER
    return compile_kernel(source, capability, (*reduction, *options, *INCLUDES, HARDLY_OPTIMIZED))


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
    wire = packets.wire_options("int8", moves=False, quantizes_result=True)
    dtype = "float32" if fan_out else "bfloat16"
    variant = packets.packet_kernel((dtype, "sum"), size, "sentinel", steps, fan_out=fan_out, wire=wire)
    constants = {
        "kWorkers": packets.most_workers(size, fan_out=fan_out, one_step=steps == "one", quantized=True),
        "kParts": packets.parts_of(size, one_step=steps == "one"),
        "kPartElements": packets.QUANTIZED_OF_PACKET,
        "kBlockElements": BLOCK,
    }
    lines = [f"static_assert(mpicomm::{name} == {value});" for name, value in constants.items()]
    source.write_text("\n".join(['#include "packet_worker.cuh"', *lines]))
    compile_kernel(source, WITHOUT_ASSEMBLER, (*variant.options, *INCLUDES))
