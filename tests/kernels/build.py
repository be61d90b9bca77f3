"""g++ builds of kernels and of the program that runs them; kernels also with deliberate mistakes."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mpicomm

KERNELS = Path(mpicomm.__file__).parent / "kernels"
SIMULATION = Path(__file__).parent / "simulation"

_COMMON = ("-std=c++20", "-g1", f"-I{SIMULATION}")
# A sum and a product may not become one rounding (as in the package's options for NVRTC), and packets are read through
# pointers to other types, which g++ has to be told of.
_KERNEL = ("-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing")


def missing() -> str | None:
    """Return what keeps this machine from building and running kernels, None if nothing does."""
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
    """A compiled kernel: what the launcher has to be told of it."""

    binary: Path
    entry: str


class Builds:
    """What was built in ``directory``, each thing once; all of it for ThreadSanitizer if ``sanitize``."""

    def __init__(self, directory: Path, *, sanitize: bool = False) -> None:
        self.sanitize = sanitize
        self._directory = directory
        self._sanitizer = ("-fsanitize=thread",) if sanitize else ()
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    @cached_property
    def launcher(self) -> Path:
        """The program that runs kernels."""
        target = self._directory / "launcher"
        objects = []
        for name in ("block", "launcher"):  # not instrumented: see block.cpp
            objects.append(str(self._directory / f"{name}.o"))
            source = str(SIMULATION / f"{name}.cpp")
            _run("g++", *_COMMON, "-O2", "-Wall", "-Wextra", "-c", source, "-o", objects[-1])
        _run("g++", *self._sanitizer, "-rdynamic", *objects, "-ldl", "-pthread", "-o", str(target))
        return target

    def kernel(
        self, source: Path, entry: str, options: Sequence[str] = (), *, changes: Sequence[Change] = ()
    ) -> Kernel:
        """Return the kernel ``entry`` of ``source``, compiled with ``options`` and after ``changes``."""
        key = (source, entry, *options, *changes)
        if key not in self._kernels:
            directory = Path(tempfile.mkdtemp(prefix=f"{source.stem}-", dir=self._directory))
            headers = _changed(directory, source, changes) if changes else KERNELS
            text = f'#include "{headers / source.name if changes else source}"\nCPU_ENTRY({entry})\n'
            (directory / "entry.cpp").write_text(text)
            library = directory / "kernel.so"
            paths = (f"-I{headers}", f"-I{headers / 'include'}", "-include", str(self._language))
            _run(
                *("g++", *_COMMON, *_KERNEL, *self._sanitizer, *paths, *options),
                *("-shared", str(directory / "entry.cpp"), "-o", str(library)),
            )
            self._kernels[key] = Kernel(library, f"enter_{entry}")
        return self._kernels[key]

    @cached_property
    def _language(self) -> Path:
        """What every kernel includes: cuda.hpp, which the compiler finds compiled."""
        target = self._directory / "cuda.hpp"
        header = ("-x", "c++-header", str(SIMULATION / target.name), "-o", f"{target}.gch")
        _run("g++", *_COMMON, *_KERNEL, *self._sanitizer, *header)
        return target


def _changed(directory: Path, source: Path, changes: Sequence[Change]) -> Path:
    copy = directory / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    shutil.copy(source, copy / source.name)
    for change in changes:
        text = (copy / change.file).read_text()
        # A change that fits nowhere would leave a kernel without a mistake, one that fits twice another mistake.
        assert text.count(change.old) == 1, f"{change.file} has {text.count(change.old)} of: {change.old}"
        (copy / change.file).write_text(text.replace(change.old, change.new))
    return copy


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
