"""NVRTC compiles the kernels for GPUs that are not here."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import nvrtc

import mpicomm
from mpicomm.collectives.gpu.algorithms.chain.plan import chain_kernel
from mpicomm.collectives.gpu.algorithms.chunks.plan import exchange_kernel
from mpicomm.collectives.gpu.algorithms.copies.plan import local_reduction_kernel
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    Steps,
    device_counts_step_kernel,
    packet_kernel,
    wire_options,
)
from mpicomm.kernels.epilogue import epilogue_options, norm_options
from mpicomm.kernels.experts import DISPATCH_FEW_KERNEL, DISPATCH_KERNEL, combine_experts_kernel
from mpicomm.kernels.reductions import combine_kernel
from mpicomm.kernels.variant import Variant
from mpicomm.kernels.window import (
    LOCATING,
    LOCK_KERNEL,
    MOVING,
    SWAPPED_SIZES,
    SYNCHRONISE_KERNEL,
    accumulate_kernel,
    swap_kernel,
)
from tests.helpers.inputs.kernel_sources import INCLUDES, SOURCES, compile_kernel
from tests.helpers.jobs.mpiexec import ROOT

WANTED = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SUPPORTED = nvrtc.nvrtcGetSupportedArchs()[1]
CAPABILITIES = [(major, minor) for major, minor in WANTED if 10 * major + minor in SUPPORTED]

# Kernels ask only whether a device is at least of 8.0 or of 9.0, so these two compile all lines.
OLDEST_AND_NEWEST = CAPABILITIES[:: len(CAPABILITIES) - 1]

# A type of each size, and those for which GPUs have instructions, with architectures in turns. Unit tests compile all
# types and operations, without a kernel, and test_accumulate.py runs updates of all types.
_INTEGERS = (("int8", "sum"), ("int32", "sum"), ("uint32", "band"), ("int64", "bor"), ("uint64", "bxor"))
_FLOATS = (("float16", "prod"), ("float32", "sum"), ("float64", "sum"), ("complex64", "avg"), ("complex128", "sum"))
_UPDATES = [accumulate_kernel(reduction, 0) for reduction in (*_INTEGERS, *_FLOATS)]
_UPDATES += [accumulate_kernel((f"pair_{of}", op), 0) for of, op in zip(("f4", "i2"), LOCATING, strict=True)]
_UPDATES += [accumulate_kernel(("any", MOVING[number % 2]), nbytes) for number, nbytes in enumerate((1, 4, 16))]
_UPDATES += [*map(swap_kernel, SWAPPED_SIZES[:: len(SWAPPED_SIZES) - 1]), SYNCHRONISE_KERNEL, LOCK_KERNEL]
UPDATES = [(variant, CAPABILITIES[number % len(CAPABILITIES)]) for number, variant in enumerate(_UPDATES)]
WIDEST = ("complex128", "prod")
BF16, FP8 = "bfloat16", "float8_e4m3fn"


def packets(
    reduction: tuple[str, str] | None, size: int, steps: Steps, *, fan_out: bool = False, **more: Any
) -> Variant:
    return packet_kernel(reduction, size, "sentinel", steps, fan_out=fan_out, **more)


# Of the kernels that move much, those are here that come nearest to the registers that they may have: the widest
# type, types whose elements are converted, and the most ranks for which a block has so many threads.
BANDWIDTH = [
    exchange_kernel((BF16, "avg")),
    packets(WIDEST, 4, "laps"),
    packets(WIDEST, 4, "few", fan_out=True),
    packets(WIDEST, 2, "paced"),
    packets((BF16, "avg"), 4, "laps"),
    *(packets(None, 4, "paced", **kind) for kind in ({"device_counts": True}, {"strided": True})),
    device_counts_step_kernel(4),
    packets(
        (BF16, "sum"),
        8,
        "laps",
        fan_out=True,
        wire=wire_options("int8", moves=False, quantizes_result=True, same_to_all=False),
    ),
    # The loads of a type, not the stores, need the registers.
    *(combine_experts_kernel("float16", BF16, by_token=way, in_packets=way) for way in (False, True)),
    local_reduction_kernel((FP8, "sum")),
    # The state of a tree has several sums.
    exchange_kernel(("float32", "tree")),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@functools.cache
def compiled(variant: Variant, text: str = "", arch: str = "sm_90") -> tuple[str, str]:
    """Return the PTX of a kernel, or of ``text`` in place of its source, and the messages of the assembler, if any."""
    status, program = nvrtc.nvrtcCreateProgram((text or variant.source.read_text()).encode(), b"kernel.cu", 0, [], [])
    assert int(status) == 0
    arguments = [f"-arch={arch}", "-std=c++17", *INCLUDES, "--ptxas-options=-v", *variant.options]
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
LAYER_NORM = norm_options(FP8, BF16, ("CENTRED", "BIAS", "LINEAR_BIAS"), FP8, ("float32", 0))
FINISHES = [
    packets(("float32", "sum"), 4, "few", fan_out=True, epilogue=epilogue_options(FINISH, None)),
    # Between more than 4 ranks a thread that ends rows of all shards lacks registers. Its turns are long then.
    packets((BF16, "sum"), 4, "laps", fan_out=True, epilogue=LAYER_NORM),
]


NEAR_THE_LIMIT = [*BANDWIDTH, *FINISHES, device_counts_step_kernel(8), chain_kernel(WIDEST)]
NEAR_THE_LIMIT += [DISPATCH_KERNEL, DISPATCH_FEW_KERNEL]


@pytest.mark.parametrize("variant", NEAR_THE_LIMIT, ids=lambda each: f"{each.entry} {each.options[1:]}"[:150])
def test_kernel_has_the_registers_it_needs(variant: Variant) -> None:
    assert spills(compiled(variant)[1], variant.entry) == [0, 0]


def test_every_kernel_bounds_its_threads() -> None:
    """The assembler gives each thread only the registers that the threads of such a block can have.

    test_arguments.py compares the constants with the host's.
    """
    for path in SOURCES.values():
        text = path.read_text()
        for name in re.findall(r"^MPICOMM_KERNEL void (\w+)\(", text, re.MULTILINE):
            bound = re.search(rf"__launch_bounds__\((mpicomm::k\w*Threads|1)(, [^)]*)?\)\s+{name}\(", text)
            assert bound or path.name == "signal.cu", name  # whose kernels have one thread


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
@pytest.mark.parametrize("kernel", [partial(packets, None, 2, "paced"), partial(chain_kernel, None)])
def test_slots_in_memory_of_the_host_take_fences_of_the_whole_system(kernel: Callable[..., Variant]) -> None:
    assert fences_of(kernel()) & {"gl", "gpu"}
    assert fences_of(kernel(host_slots=True)) == {"sys"}


# As a user would: only the directory that the package names.
USERS = (f"-I{mpicomm.include_dir()}",)
FUNCTIONS = ROOT / "tests" / "kernels" / "device_functions.cu"
ALL_FUNCTIONS = ("-DGROUP=Block", "-DDTYPE=float16", "-DOPERATION=sum")


@pytest.mark.parametrize("capability", OLDEST_AND_NEWEST, ids=lambda capability: "sm_{}{}".format(*capability))
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
