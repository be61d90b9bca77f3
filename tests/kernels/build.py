"""g++ builds of kernels and of the program that runs them; kernels also with deliberate mistakes."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mpicomm.kernels.variant import SHARED, include_dir
from tests.helpers.inputs.kernel_sources import HEADERS, SOURCES

SIMULATION = Path(__file__).parent / "simulation"

# A sum and a product may not become one rounding, as in the package's options for NVRTC. Kernels read packets through
# pointers to other types, so g++ may not assume that such pointers differ. A thread's stack has 128 KiB, and the next
# stack lies below it. g++ is done sooner with -Og than with -O1, and most tests compile for longer than they run.
_KERNEL = (
    *("-std=c++17", f"-I{SIMULATION}", "-Og", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    "-Werror=frame-larger-than=65536",
)
_LAUNCHER = ("-std=c++20", f"-I{SIMULATION}", "-O2", "-Wall", "-Wextra")
# ThreadSanitizer names the lines of a race.
_SANITIZER = ("-fsanitize=thread", "-g1")


def missing() -> str | None:
    """Return the reason why this machine cannot build and run kernels, or None."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if platform.machine() != "x86_64":
        return "fibers are written for x86-64"
    return None


@dataclass(frozen=True)
class Change:
    """Replace ``old``, which must occur exactly once in a file of the kernels, by ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel as the launcher knows it."""

    binary: Path
    entry: str


class Builds:
    """The builds in ``directory``, which several processes share and make once; for ThreadSanitizer if ``sanitize``."""

    def __init__(self, directory: Path, *, sanitize: bool = False) -> None:
        self.sanitize = sanitize
        self._directory = directory
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._sanitizer = _SANITIZER if sanitize else ()
        directory.mkdir(exist_ok=True)

    @cached_property
    def launcher(self) -> Path:
        """The program that runs kernels."""

        def build(directory: Path) -> None:
            objects = []
            for name in ("block", "launcher"):  # not instrumented: see block.cpp
                objects.append(str(directory / f"{name}.o"))
                source = str(SIMULATION / f"{name}.cpp")
                _run("g++", *_LAUNCHER, "-c", source, "-o", objects[-1])
            _run("g++", *self._sanitizer, "-rdynamic", *objects, "-ldl", "-pthread", "-o", str(directory / "launcher"))

        return self._once("launcher", build) / "launcher"

    def kernel(
        self, source: Path, entry: str, options: Sequence[str] = (), *, changes: Sequence[Change] = ()
    ) -> Kernel:
        """Return the kernel ``entry`` of ``source``, compiled with ``options`` and after ``changes``."""
        key = (source, entry, *options, *changes)
        if key not in self._kernels:
            self._kernels[key] = self._compiled(source, entry, options, changes)
        return self._kernels[key]

    def _compiled(self, source: Path, entry: str, options: Sequence[str], changes: Sequence[Change]) -> Kernel:
        def build(directory: Path) -> None:
            own = _changed(directory, source, changes) if changes else source
            text = f'#include "{own}"\nCPU_ENTRY({entry})\n'
            (directory / "entry.cpp").write_text(text)
            directories = (own.parent, own.parent / "include") if changes else (own.parent, SHARED, include_dir())
            paths = (*(f"-I{each}" for each in directories), "-include", str(self._language))
            # The launcher has all libraries, so the kernel saves the time to link them.
            _run(
                *("g++", *_KERNEL, *self._sanitizer, *paths, *options, "-shared", "-nodefaultlibs"),
                *(str(directory / "entry.cpp"), "-o", str(directory / "kernel.so")),
            )

        name = hashlib.sha256(repr((source, entry, *options, *changes)).encode()).hexdigest()
        return Kernel(self._once(f"{source.stem}-{name}", build) / "kernel.so", f"enter_{entry}")

    @cached_property
    def _language(self) -> Path:
        """The header cuda.hpp of every kernel, compiled."""

        def build(directory: Path) -> None:
            header = ("-x", "c++-header", str(SIMULATION / "cuda.hpp"), "-o", str(directory / "cuda.hpp.gch"))
            _run("g++", *_KERNEL, *self._sanitizer, *header)

        return self._once("language", build) / "cuda.hpp"

    def _once(self, name: str, build: Callable[[Path], None]) -> Path:
        """Return the directory of that name, in which the first who asks for it builds, while others wait."""
        directory = self._directory / name
        with (self._directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                directory.mkdir()
                try:
                    build(directory)
                except BaseException:
                    shutil.rmtree(directory)
                    raise
        return directory


def _changed(directory: Path, source: Path, changes: Sequence[Change]) -> Path:
    """Copy all kernels and their headers into one directory, change them, and return the copy of ``source``."""
    copy = directory / "kernels"
    shutil.copytree(include_dir(), copy / "include")
    for original in (*HEADERS.values(), *SOURCES.values(), source):
        shutil.copy(original, copy / original.name)
    for change in changes:
        text = (copy / change.file).read_text()
        # A change that fits nowhere would make no mistake, and a change that fits twice would make another mistake.
        if text.count(change.old) != 1:  # no AssertionError, which tests of changed kernels expect
            raise ValueError(f"{change.file} has {text.count(change.old)} of: {change.old}")
        (copy / change.file).write_text(text.replace(change.old, change.new))
    return copy / source.name


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
