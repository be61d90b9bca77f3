"""NVRTC compiles the kernels for GPUs that are not here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

import mpicomm
from mpicomm.collectives.gpu.algorithms.chain.plan import CHAIN_THREADS, chain_kernel
from mpicomm.collectives.gpu.algorithms.chunks.plan import THREADS, exchange_kernel
from mpicomm.collectives.gpu.algorithms.copies.plan import REDUCTION_THREADS, local_reduction_kernel
from mpicomm.collectives.gpu.algorithms.direct.plan import BARRIER_KERNEL, DIRECT_KERNEL, DIRECT_THREADS
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    OVERSEERS,
    Steps,
    counted_step_kernel,
    most_workers,
    packet_kernel,
    wire_options,
)
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SENDRECV_KERNEL, SENDRECV_THREADS
from mpicomm.devices.cuda.load import compile_kernel
from mpicomm.kernels.epilogue import (
    EPILOGUE_THREADS,
    NORM_THREADS,
    epilogue_kernel,
    epilogue_options,
    norm_kernel,
    norm_options,
)
from mpicomm.kernels.experts import (
    DISPATCH_FEW_KERNEL,
    DISPATCH_KERNEL,
    DISPATCH_THREADS,
    QUANTIZE_THREADS,
    SUM_THREADS,
    combine_experts_kernel,
    quantize_experts_kernel,
)
from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_THREADS
from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS
from mpicomm.kernels.reductions import (
    COMBINE_THREADS,
    REDUCTIONS,
    combine_kernel,
)
from mpicomm.kernels.variant import Variant
from mpicomm.kernels.window import (
    LOCATING,
    LOCK_KERNEL,
    MEET_KERNEL,
    MOVING,
    SWAPPED_SIZES,
    accumulate_kernel,
    swap_kernel,
)
from mpicomm.p2p.gpu import COPY, COPY_THREADS
from tests.helpers.inputs.kernel_sources import INCLUDES
from tests.helpers.jobs.mpiexec import ROOT

WANTED = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SUPPORTED = nvrtc.nvrtcGetSupportedArchs()[1]
CAPABILITIES = [(major, minor) for major, minor in WANTED if 10 * major + minor in SUPPORTED]

# Kernels ask only whether a device is at least of 8.0 or of 9.0, so these three compile all lines.
OF_EACH_KIND = [each for each in CAPABILITIES if each in ((7, 5), (8, 9), (12, 0))]

# Each type once, with operations and architectures in turns; unit tests compile all operations, without a kernel.
_UPDATES = [
    accumulate_kernel((dtype, ops[number % len(ops)]), 0) for number, (dtype, ops) in enumerate(REDUCTIONS.items())
]
_UPDATES += [accumulate_kernel((f"pair_{of}", op), 0) for of in ("f4", "f8", "i8", "i4", "i2") for op in LOCATING]
_UPDATES += [accumulate_kernel(("any", op), nbytes) for op in MOVING for nbytes in (1, 2, 4, 8, 16)]
_UPDATES += [*map(swap_kernel, SWAPPED_SIZES), MEET_KERNEL, LOCK_KERNEL]
UPDATES = [(variant, CAPABILITIES[number % len(CAPABILITIES)]) for number, variant in enumerate(_UPDATES)]
WIDEST = ("complex128", "prod")
LAPS_AND_FEWER: list[tuple[Steps, int, bool]] = [
    *(("laps", 2, False), ("laps", 4, False), ("laps", 4, True), ("laps", 8, True)),
    *(("few", 4, True), ("few", 8, True), ("one", 4, False), ("one", 8, True)),
]
# Large messages go through these. Of each kind those are here that need the most registers: the widest type, a type
# whose elements are converted, and the numbers of ranks at which a thread may have more registers.
BANDWIDTH = [exchange_kernel(reduction) for reduction in (("bfloat16", "avg"), ("float8_e4m3fn", "sum"), WIDEST)]
BANDWIDTH += [
    packet_kernel(WIDEST, size, "sentinel", steps, fan_out=fan_out) for steps, size, fan_out in LAPS_AND_FEWER
]
BANDWIDTH += [packet_kernel(("bfloat16", "avg"), 4, "sentinel", "laps", fan_out=False)]
BANDWIDTH += [
    packet_kernel(reduction, size, "sentinel", "paced", fan_out=False)
    for reduction, size in ((None, 4), (None, 8), (WIDEST, 2), (WIDEST, 8))
]
BANDWIDTH += [packet_kernel(None, size, "sentinel", "paced", fan_out=False, counted=True) for size in (1, 4, 8)]
OF_GAPS: list[tuple[Steps, int]] = [("paced", 2), ("paced", 4), ("paced", 8), ("laps", 2), ("few", 8), ("one", 8)]
BANDWIDTH += [packet_kernel(None, size, "sentinel", steps, fan_out=False, strided=True) for steps, size in OF_GAPS]
BANDWIDTH += [counted_step_kernel(size) for size in (4, 8)]
BANDWIDTH += [
    packet_kernel(
        (dtype, "sum"),
        size,
        "sentinel",
        "laps",
        fan_out=way == "two_shot",
        wire=wire_options(codes, moves=way == "moves", codes_result=way != "moves", alike=way != "two_shot"),
    )
    for way, size, codes, dtype in (
        ("two_shot", 2, "float8_e4m3fn", "bfloat16"),
        ("one_shot", 4, "int8", "float32"),
        *((way, 8, "int8", "bfloat16") for way in ("one_shot", "two_shot", "moves")),
    )
]
BANDWIDTH += [chain_kernel(reduction) for reduction in (("int8", "sum"), WIDEST)]
BANDWIDTH += [DIRECT_KERNEL, PACK_KERNEL, COPY]
# The loads of a type, not the stores, need the registers.
BANDWIDTH += [
    combine_experts_kernel(dtype, result, by_token=by_token, in_packets=in_packets)
    for dtype, result, by_token, in_packets in (
        ("float32", "float16", True, True),
        ("float16", "bfloat16", False, False),
        ("float16", "bfloat16", True, True),
        ("bfloat16", "float32", True, False),
        ("bfloat16", "float32", True, True),
    )
]
BANDWIDTH += [DISPATCH_FEW_KERNEL, quantize_experts_kernel("bfloat16"), combine_kernel(WIDEST, WIDEST[0])]
BANDWIDTH += [local_reduction_kernel(reduction) for reduction in (("float8_e4m3fn", "sum"), WIDEST)]
# The state of a tree has several sums.
BANDWIDTH += [kernel(("float32", "tree")) for kernel in (exchange_kernel, local_reduction_kernel)]
BANDWIDTH += [
    packet_kernel((dtype, "tree"), size, "sentinel", "laps", fan_out=fan_out)
    for dtype, size, fan_out in (("float32", 2, True), ("complex128", 4, False), ("complex128", 8, True))
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ptxas_says(text: str, options: Sequence[str]) -> str:
    """Return the assembler's messages about a source on sm_90."""
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    assert int(status) == 0
    arguments = ["-arch=sm_90", "-std=c++17", *INCLUDES, "--ptxas-options=-v", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [argument.encode() for argument in arguments])
    assert int(status) == 0
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return log.decode(errors="replace")


def spills(log: str, entry: str) -> list[int]:
    """Return the bytes that a kernel stores and loads because it lacks registers."""
    properties = re.search(
        rf"Function properties for {entry}\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    assert properties, log
    return [int(number) for number in properties.groups()]


@pytest.mark.parametrize(
    ("variant", "capability"), UPDATES, ids=lambda value: " ".join(getattr(value, "options", ())[1:])
)
def test_updates_of_every_type_compile(variant: Variant, capability: tuple[int, int]) -> None:
    assert variant.entry.encode() in compile_kernel(variant.source, capability, variant.options)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint64"])
def test_sums_whose_results_no_code_uses_do_not_wait(dtype: str) -> None:
    variant = accumulate_kernel((dtype, "sum"), 0)
    ptx = compile_kernel(variant.source, (99, 0), variant.options).decode(errors="replace")
    assert "red.relaxed.sys.global.add" in ptx


@pytest.mark.parametrize("capability", CAPABILITIES[:: len(CAPABILITIES) - 1], ids="sm_{0[0]}{0[1]}".format)
@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float64", "min(ceil(a), floor(b)) + exp(a) ** 0.5 - log(abs(b)) * sqrt(a) / tanh(b) + 0.1"),
        ("bfloat16", "max(a, exp(b), log(a), sqrt(b), tanh(a) ** b, 2.5 / abs(a), -ceil(a), floor(b) ** -3)"),
        ("int64", "a // b % 3 + (a << b) - (a >> 2) ** 5 if a < b <= abs(a) or not a else ~a & b | a ^ -b"),
        ("uint8", "where(a >= b and a > 2, max(a, b, 7), 255) * (a == b) + (a != b)"),
        ("complex64", "a * 2 - conj(b) ** 3 + (a == b) if a else -b"),
        ("bool", "(a & b | a ^ b) if a < b else True and not b"),
    ],
)
def test_expressions_compile(dtype: str, text: str, capability: tuple[int, int]) -> None:
    variant = combine_kernel((dtype, text), dtype)
    assert compile_kernel(variant.source, capability, variant.options).startswith(b"\x7fELF")


FINISH = "fn::add(fn::multiply(v,fn::number<State>(w.real(0))),fn::element<State>(w.array<dtype::float16>(1),i))"
PLAIN, TO_FP8, TO_DOUBLE = (epilogue_options(FINISH, result) for result in (None, "float8_e4m3fn", "float64"))
FINISHES = [
    packet_kernel(("float32", "sum"), 4, "sentinel", "few", fan_out=True, epilogue=PLAIN),
    packet_kernel(("bfloat16", "sum"), 8, "flagged", "one", fan_out=False, epilogue=PLAIN),
    packet_kernel(("bfloat16", "sum"), 2, "flagged", "one", fan_out=False, epilogue=TO_FP8),
    packet_kernel(("bfloat16", "sum"), 8, "sentinel", "laps", fan_out=True, epilogue=TO_DOUBLE),
    packet_kernel(("bfloat16", "sum"), 8, "sentinel", "few", fan_out=True, epilogue=TO_DOUBLE),
    epilogue_kernel("bfloat16", "float8_e4m3fn", FINISH),
]
OF_ROWS: list[tuple[Steps, str, str, str, int]] = [
    ("laps", "float64", "float32", "float64", 2),
    ("laps", "float8_e5m2", "float64", "float16", 8),
    ("one", "bfloat16", "bfloat16", "bfloat16", 2),
    ("one", "float16", "float8_e4m3fn", "float32", 8),
]
FINISHES += [
    packet_kernel((dtype, "sum"), size, "sentinel", steps, fan_out=False, epilogue=norm_options(result, weight))
    for steps, dtype, result, weight, size in OF_ROWS
]
LAYER_NORM = norm_options(
    "float8_e4m3fn",
    "bfloat16",
    centred=True,
    bias=True,
    linear_bias=True,
    codes="float8_e4m3fn",
    scales=("float32", 0),
)
ALIGNED_NORM = norm_options("bfloat16", "bfloat16", aligned=True)
NVFP4 = norm_options("uint8", "bfloat16", codes="float4_e2m1fn", scales=("float8_e4m3fn", 16))
OF_SHARDS: list[tuple[Steps, int, tuple[str, ...]]]
OF_SHARDS = [("laps", 4, LAYER_NORM), ("laps", 4, (*NVFP4, *ALIGNED_NORM[2:]))]
OF_SHARDS += [("few", 4, ALIGNED_NORM), ("laps", 2, ALIGNED_NORM)]
SOME_STEPS: list[tuple[Steps, int, tuple[str, ...]]]
SOME_STEPS = [("few", 8, NVFP4), ("laps", 4, LAYER_NORM)]
FINISHES += [
    packet_kernel(("bfloat16", "sum"), size, "sentinel", steps, fan_out=False, epilogue=options)
    for steps, size, options in SOME_STEPS
]
# Between more than 4 ranks a thread that ends rows of all shards lacks registers. Its turns are long then.
FINISHES += [
    packet_kernel(("bfloat16", "sum"), size, "sentinel", steps, fan_out=True, epilogue=options)
    for steps, size, options in OF_SHARDS
]
FINISHES += [
    norm_kernel("bfloat16", norm_options("bfloat16", "float32")),
    norm_kernel("float64", norm_options("float32", "float64", centred=True, bias=True, linear_bias=True)),
]


@pytest.mark.parametrize("variant", FINISHES, ids=lambda variant: " ".join(variant.options[1:]).replace(FINISH, ""))
def test_kernels_with_epilogues_have_the_registers_they_need(variant: Variant) -> None:
    assert spills(ptxas_says(variant.source.read_text(), variant.options), variant.entry) == [0, 0]


@pytest.mark.parametrize("variant", BANDWIDTH, ids=lambda variant: " ".join(variant.options[1:]) or "copies")
def test_kernel_for_bandwidth_has_the_registers_it_needs(variant: Variant) -> None:
    assert spills(ptxas_says(variant.source.read_text(), variant.options), variant.entry) == [0, 0]


def test_kernel_without_enough_registers_is_found() -> None:
    variant = exchange_kernel(("float32", "sum"))
    text = (variant.source).read_text()
    bounds = "__launch_bounds__(mpicomm::kThreads)"
    assert text.count(bounds) == 1
    # As many blocks on one multiprocessor leave each thread 32 registers.
    text = text.replace(bounds, "__launch_bounds__(mpicomm::kThreads, 4)")
    stored, loaded = spills(ptxas_says(text, variant.options), variant.entry)
    assert stored > 0 and loaded > 0


# Each kernel, and the most threads of a block of its launches.
LARGEST_BLOCKS = [
    (exchange_kernel(("float32", "sum")), THREADS),
    (
        packet_kernel(None, 2, "sentinel", "one", fan_out=False),
        most_workers(2, fan_out=False, one_step=True) + OVERSEERS,
    ),
    (chain_kernel(None), CHAIN_THREADS),
    *((kernel, DIRECT_THREADS) for kernel in (DIRECT_KERNEL, BARRIER_KERNEL)),
    (SENDRECV_KERNEL, SENDRECV_THREADS),
    (local_reduction_kernel(("float32", "sum")), REDUCTION_THREADS),
    (combine_kernel(("float32", "sum"), "float32"), COMBINE_THREADS),
    (epilogue_kernel("bfloat16", "float8_e4m3fn", FINISH), EPILOGUE_THREADS),
    (norm_kernel("float64", norm_options("float32", "float64")), NORM_THREADS),
    (PACK_KERNEL, PACK_THREADS),
    (counted_step_kernel(8), most_workers(8, fan_out=False, one_step=True) + OVERSEERS),
    (DISPATCH_KERNEL, DISPATCH_THREADS),
    (DISPATCH_FEW_KERNEL, DISPATCH_THREADS),
    (combine_experts_kernel("bfloat16", "float32", by_token=False, in_packets=False), SUM_THREADS),
    (quantize_experts_kernel("float32"), QUANTIZE_THREADS),
    (MESSAGE_KERNEL, MESSAGE_THREADS),
    (COPY, COPY_THREADS),
]


@pytest.mark.parametrize(("variant", "threads"), LARGEST_BLOCKS, ids=lambda value: getattr(value, "entry", None))
def test_the_largest_block_fits_on_every_gpu(variant: Variant, threads: int) -> None:
    # The assembler gives each thread of such a block only the registers that there are; otherwise a launch could fail.
    ptx = compile_kernel(variant.source, (99, 0), variant.options).decode(errors="replace")
    # NVRTC of CUDA 12 writes all three dimensions.
    assert re.search(rf"\.entry {variant.entry}\([^)]*\)\s*\.maxntid {threads}(, 1, 1)?\n", ptx)


def fences_of(variant: Variant) -> set[str]:
    """Return the scopes of the fences of a kernel. PTX names them, and NVRTC leaves PTX for newer devices."""
    ptx = compile_kernel(variant.source, (99, 0), variant.options).decode(errors="replace")
    return {found[0] or found[1] for found in re.findall(r"\n\s*(?:membar\.(\w+)|fence\.\w+\.(\w+));", ptx)}


# Before the first launches of a round packets are wiped, which takes a fence of the system in any case.
@pytest.mark.parametrize(
    "kernel",
    [
        *(partial(packet_kernel, None, 2, "sentinel", steps, fan_out=False) for steps in ("laps", "paced")),
        partial(chain_kernel, None),
    ],
)
def test_slots_in_memory_of_the_host_take_fences_of_the_whole_system(kernel: Callable[..., Variant]) -> None:
    assert fences_of(kernel()) & {"gl", "gpu"}
    assert fences_of(kernel(host_slots=True)) == {"sys"}


@pytest.mark.parametrize("capability", OF_EACH_KIND, ids=lambda capability: "sm_{}{}".format(*capability))
def test_kernels_of_one_source_compile_together(capability: tuple[int, int]) -> None:
    image = compile_kernel(MEET_KERNEL.source, capability, MEET_KERNEL.options)
    assert all(variant.entry.encode() in image for variant in (MEET_KERNEL, LOCK_KERNEL))


# As a user would: only the directory that the package names.
USERS = (f"-I{mpicomm.include_dir()}",)
FUNCTIONS = ROOT / "tests" / "kernels" / "device_functions.cu"
ALL_FUNCTIONS = ("-DGROUP=Block", "-DDTYPE=float16", "-DOPERATION=sum")


@pytest.mark.parametrize("capability", OF_EACH_KIND, ids=lambda capability: "sm_{}{}".format(*capability))
def test_public_header_compiles_in_kernels_of_a_user(capability: tuple[int, int]) -> None:
    for source, options, entry in (
        (ROOT / "examples" / "ring_sum.cu", (), b"ring_sum"),
        (ROOT / "examples" / "jacobi.cu", ("-fmad=false",), b"relax_all"),
        (FUNCTIONS, ALL_FUNCTIONS, b"reduce_all"),
    ):
        image = compile_kernel(source, capability, (*USERS, *options))
        assert image.startswith(b"\x7fELF")
        assert entry in image


def test_public_header_compiles_with_nvcc(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    command = [nvcc, "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", *USERS, *ALL_FUNCTIONS]
    result = subprocess.run(
        [*command, "-c", str(FUNCTIONS), "-o", str(tmp_path / "functions.o")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture
def functions_ptx() -> dict[str, str]:
    """Return the PTX of the kernels of device_functions.cu, by their names."""
    ptx = compile_kernel(FUNCTIONS, (99, 0), (*USERS, *ALL_FUNCTIONS)).decode(errors="replace")
    names = re.findall(r"\.visible \.entry (\w+)", ptx)
    return dict(zip(names, ptx.split(".visible .entry ")[1:], strict=True))


@pytest.mark.parametrize("name", ["put_around", "get_around", "reduce_all"])
def test_functions_for_users_move_words_of_sixteen_bytes(functions_ptx: dict[str, str], name: str) -> None:
    for access in ("ld", "st"):
        assert re.search(rf"\t{access}\.(global\.)?v4\.[bu]32", functions_ptx[name])


def test_flags_have_the_scope_that_the_user_names(functions_ptx: dict[str, str]) -> None:
    for name, scope in (("put_around", "sys"), ("meet", "sys"), ("between_blocks", "gpu")):
        found = re.findall(r"(acquire|release)\.(\w+)\.", functions_ptx[name])
        assert set(found) == {("acquire", scope), ("release", scope)}, name
