"""NVRTC compiles the kernels for GPUs that are not here."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable
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
from mpicomm.devices.cuda.compile import compile_kernel
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
_UPDATES += [
    accumulate_kernel((f"pair_{of}", LOCATING[number % 2]), 0)
    for number, of in enumerate(("f4", "f8", "i8", "i4", "i2"))
]
_UPDATES += [accumulate_kernel(("any", MOVING[number % 2]), nbytes) for number, nbytes in enumerate((1, 2, 4, 8, 16))]
_UPDATES += [*map(swap_kernel, SWAPPED_SIZES), MEET_KERNEL, LOCK_KERNEL]
UPDATES = [(variant, CAPABILITIES[number % len(CAPABILITIES)]) for number, variant in enumerate(_UPDATES)]
WIDEST = ("complex128", "prod")
# Large messages go through these. Of each kind those are here that come near to the registers that they may have: the
# widest type, a type whose elements are converted, and the most ranks for which a block has so many threads.
BANDWIDTH = [exchange_kernel(reduction) for reduction in (("bfloat16", "avg"), ("float8_e4m3fn", "sum"), WIDEST)]
PLAIN_WAYS: list[tuple[Steps, int, bool]] = [
    *(("laps", 2, False), ("laps", 4, False), ("laps", 4, True)),
    *(("few", 4, True), ("few", 8, True), ("one", 4, False), ("paced", 2, False)),
]
BANDWIDTH += [packet_kernel(WIDEST, size, "sentinel", steps, fan_out=fan_out) for steps, size, fan_out in PLAIN_WAYS]
BANDWIDTH += [packet_kernel(("bfloat16", "avg"), 4, "sentinel", "laps", fan_out=False)]
MOVES: list[tuple[Steps, int, str]] = [
    *(("paced", 4, "even"), ("paced", 1, "counted"), ("paced", 4, "counted")),
    *(("paced", 2, "strided"), ("paced", 4, "strided"), ("one", 8, "strided")),
]
BANDWIDTH += [
    packet_kernel(None, size, "sentinel", steps, fan_out=False, counted=kind == "counted", strided=kind == "strided")
    for steps, size, kind in MOVES
]
BANDWIDTH += [counted_step_kernel(size) for size in (4, 8)]
BANDWIDTH += [
    packet_kernel(
        *(("bfloat16", "sum"), 8, "sentinel", "laps"),
        fan_out=fan_out,
        wire=wire_options("int8", moves=False, codes_result=True, alike=not fan_out),
    )
    for fan_out in (False, True)
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
BANDWIDTH += [packet_kernel(("complex128", "tree"), 4, "sentinel", "laps", fan_out=False)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def compiled(variant: Variant, text: str = "") -> tuple[str, str]:
    """Return the PTX of a kernel, or of ``text`` in place of its source, and the assembler's messages on sm_90."""
    status, program = nvrtc.nvrtcCreateProgram((text or variant.source.read_text()).encode(), b"kernel.cu", 0, [], [])
    assert int(status) == 0
    arguments = ["-arch=sm_90", "-std=c++17", *INCLUDES, "--ptxas-options=-v", *variant.options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [argument.encode() for argument in arguments])
    assert int(status) == 0
    said = []
    for part in ("PTX", "ProgramLog"):
        said.append(bytearray(getattr(nvrtc, f"nvrtcGet{part}Size")(program)[1]))
        getattr(nvrtc, f"nvrtcGet{part}")(program, said[-1])
    nvrtc.nvrtcDestroyProgram(program)
    ptx, log = (each.decode(errors="replace") for each in said)
    return ptx, log


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


@pytest.mark.parametrize(
    ("newest", "dtype", "text"),
    [
        (True, "float64", "min(ceil(a), floor(b)) + exp(a) ** 0.5 - log(abs(b)) * sqrt(a) / tanh(b) + 0.1"),
        (False, "bfloat16", "max(a, exp(b), log(a), sqrt(b), tanh(a) ** b, 2.5 / abs(a), -ceil(a), floor(b) ** -3)"),
        (True, "int64", "a // b % 3 + (a << b) - (a >> 2) ** 5 if a < b <= abs(a) or not a else ~a & b | a ^ -b"),
        (False, "uint8", "where(a >= b and a > 2, max(a, b, 7), 255) * (a == b) + (a != b)"),
        (True, "complex64", "a * 2 - conj(b) ** 3 + (a == b) if a else -b"),
        (False, "bool", "(a & b | a ^ b) if a < b else True and not b"),
    ],
)
def test_expressions_compile(newest: bool, dtype: str, text: str) -> None:
    variant = combine_kernel((dtype, text), dtype)
    assert compile_kernel(variant.source, CAPABILITIES[-1 if newest else 0], variant.options).startswith(b"\x7fELF")


FINISH = "fn::add(fn::multiply(v,fn::number<State>(w.real(0))),fn::element<State>(w.array<dtype::float16>(1),i))"
PLAIN, TO_FP8, TO_DOUBLE = (epilogue_options(FINISH, result) for result in (None, "float8_e4m3fn", "float64"))
FINISHES = [
    packet_kernel(("float32", "sum"), 4, "sentinel", "few", fan_out=True, epilogue=PLAIN),
    packet_kernel(("bfloat16", "sum"), 2, "flagged", "one", fan_out=False, epilogue=TO_FP8),
    packet_kernel(("bfloat16", "sum"), 8, "sentinel", "few", fan_out=True, epilogue=TO_DOUBLE),
    epilogue_kernel("bfloat16", "float8_e4m3fn", FINISH),
]
OF_ROWS: list[tuple[str, str, str, int]] = [
    ("float64", "float32", "float64", 2),
    ("float8_e5m2", "float64", "float16", 8),
]
FINISHES += [
    packet_kernel((dtype, "sum"), size, "sentinel", "laps", fan_out=False, epilogue=norm_options(result, weight))
    for dtype, result, weight, size in OF_ROWS
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
# Between more than 4 ranks a thread that ends rows of all shards lacks registers. Its turns are long then.
OF_SHARDS: list[tuple[Steps, tuple[str, ...]]]
OF_SHARDS = [("laps", LAYER_NORM), ("laps", (*NVFP4, *ALIGNED_NORM[2:])), ("few", ALIGNED_NORM)]
FINISHES += [
    packet_kernel(("bfloat16", "sum"), 4, "sentinel", steps, fan_out=True, epilogue=options)
    for steps, options in OF_SHARDS
]
FINISHES += [
    norm_kernel("bfloat16", norm_options("bfloat16", "float32")),
    norm_kernel("float64", norm_options("float32", "float64", centred=True, bias=True, linear_bias=True)),
]


# Each kernel, and the most threads of a block of its launches.
LARGEST_BLOCKS = {
    BANDWIDTH[0]: THREADS,
    packet_kernel(None, 2, "sentinel", "one", fan_out=False): most_workers(2, fan_out=False, one_step=True) + OVERSEERS,
    counted_step_kernel(8): most_workers(8, fan_out=False, one_step=True) + OVERSEERS,
    chain_kernel(WIDEST): CHAIN_THREADS,
    **dict.fromkeys((DIRECT_KERNEL, BARRIER_KERNEL), DIRECT_THREADS),
    SENDRECV_KERNEL: SENDRECV_THREADS,
    local_reduction_kernel(WIDEST): REDUCTION_THREADS,
    combine_kernel(WIDEST, WIDEST[0]): COMBINE_THREADS,
    epilogue_kernel("bfloat16", "float8_e4m3fn", FINISH): EPILOGUE_THREADS,
    norm_kernel("bfloat16", norm_options("bfloat16", "float32")): NORM_THREADS,
    PACK_KERNEL: PACK_THREADS,
    **dict.fromkeys((DISPATCH_KERNEL, DISPATCH_FEW_KERNEL), DISPATCH_THREADS),
    combine_experts_kernel("bfloat16", "float32", by_token=True, in_packets=True): SUM_THREADS,
    quantize_experts_kernel("bfloat16"): QUANTIZE_THREADS,
    MESSAGE_KERNEL: MESSAGE_THREADS,
    COPY: COPY_THREADS,
}
KERNELS = [*dict.fromkeys((*BANDWIDTH, *FINISHES, *LARGEST_BLOCKS))]


@pytest.mark.parametrize(
    "variant", KERNELS, ids=lambda variant: f"{variant.entry} {' '.join(variant.options[1:])}"[:150]
)
def test_kernel_has_the_registers_it_needs(variant: Variant) -> None:
    """The assembler gives each thread of the largest block only the registers that there are, so the block fits."""
    ptx, log = compiled(variant)
    assert spills(log, variant.entry) == [0, 0]
    if threads := LARGEST_BLOCKS.get(variant):
        # NVRTC of CUDA 12 writes all three dimensions.
        assert re.search(rf"\.entry {variant.entry}\([^)]*\)\s*\.maxntid {threads}(, 1, 1)?\n", ptx)


def test_kernel_without_enough_registers_is_found() -> None:
    variant = exchange_kernel(("float32", "sum"))
    text = (variant.source).read_text()
    bounds = "__launch_bounds__(mpicomm::kThreads)"
    assert text.count(bounds) == 1
    # As many blocks on one multiprocessor leave each thread 32 registers.
    text = text.replace(bounds, "__launch_bounds__(mpicomm::kThreads, 4)")
    stored, loaded = spills(compiled(variant, text)[1], variant.entry)
    assert stored > 0 and loaded > 0


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


@functools.cache
def functions_ptx() -> dict[str, str]:
    """Return the PTX of the kernels of device_functions.cu, by their names."""
    ptx = compile_kernel(FUNCTIONS, (99, 0), (*USERS, *ALL_FUNCTIONS)).decode(errors="replace")
    names = re.findall(r"\.visible \.entry (\w+)", ptx)
    return dict(zip(names, ptx.split(".visible .entry ")[1:], strict=True))


@pytest.mark.parametrize("name", ["put_around", "get_around", "reduce_all"])
def test_functions_for_users_move_words_of_sixteen_bytes(name: str) -> None:
    for access in ("ld", "st"):
        assert re.search(rf"\t{access}\.(global\.)?v4\.[bu]32", functions_ptx()[name])


def test_flags_have_the_scope_that_the_user_names() -> None:
    for name, scope in (("put_around", "sys"), ("meet", "sys"), ("between_blocks", "gpu")):
        found = re.findall(r"(acquire|release)\.(\w+)\.", functions_ptx()[name])
        assert set(found) == {("acquire", scope), ("release", scope)}, name
