"""g++ builds of kernels and of the program that runs them; kernels also with deliberate mistakes.

A build is made once by its content: the compiler, its options, and the texts of all files that it includes. The cache
of the user keeps builds from run to run.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mpicomm import environment
from mpicomm.kernels.variant import SHARED
from tests.helpers.inputs.kernel_sources import HEADERS, SOURCES
from tests.kernels.launchers import Server

SIMULATION = Path(__file__).parent / "simulation"

# A sum and a product may not become one rounding, as in the package's options for NVRTC. Kernels read packets through
# pointers to other types, so g++ may not assume that such pointers differ. A thread's stack has 128 KiB, and the next
# stack lies below it.
_KERNEL = (
    *("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    "-Werror=frame-larger-than=65536",
)
# Most kernels compile for longer than they run: g++ is done sooner with -Og than with -O1. A kernel with changes runs
# for one test, and -O0 is done the soonest.
_OPTIMIZED, _CHANGED = ("-Og",), ("-O0",)
_LAUNCHER = ("-std=c++20", "-O2", "-Wall", "-Wextra")
_SANITIZER = ("-fsanitize=thread",)
_LINES = ("-g1",)  # of a race, which is no surprise in a kernel with changes

_INCLUDE_DIRECTORY = SHARED / "include"
_PUBLIC = {path.name: path for path in _INCLUDE_DIRECTORY.rglob("*.cuh")}
_INCLUDE = re.compile(r'^#include ["<](?:[^">\n]*/)?([^">/\n]+\.cuh)[">]', re.MULTILINE)
_LOCKS = 64
_KEPT_S = 30 * 24 * 3600  # for builds that no run uses


def missing() -> str | None:
    """Return the reason why this machine cannot build and run kernels, or None."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if platform.machine() != "x86_64":
        return "fibers are written for x86-64"
    return None


def cache() -> Path | None:
    """Return this user's directory of builds; None if there is none that only this user writes and programs run in."""
    base = environment.cache_directory()
    if base is None:
        return None
    directory = base / "kernels-on-cpus"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
        noexec = os.statvfs(directory).f_flag & os.ST_NOEXEC
    except OSError:
        return None
    private = facts.st_uid == os.geteuid() and facts.st_mode & 0o022 == 0
    return directory if private and not noexec and os.access(directory, os.W_OK) else None


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
    """The builds in ``directory``, which processes share; for ThreadSanitizer if ``sanitize``."""

    def __init__(self, directory: Path, *, sanitize: bool = False) -> None:
        self.sanitize = sanitize
        self._directory = directory
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        for number in range(_LOCKS):
            (directory / f"lock-{number}").touch()
        _drop_unused(directory)

    @cached_property
    def launcher(self) -> Path:
        """The program that runs kernels."""
        sanitizer = _SANITIZER if self.sanitize else ()

        def build(directory: Path) -> Path:
            objects = []
            for name in ("block", "launcher"):  # not instrumented: see block.cpp
                objects.append(str(directory / f"{name}.o"))
                _run("g++", *_LAUNCHER, "-c", str(SIMULATION / f"{name}.cpp"), "-o", objects[-1])
            _run("g++", *sanitizer, "-rdynamic", *objects, "-ldl", "-pthread", "-o", str(directory / "launcher"))
            return directory / "launcher"

        texts = [(SIMULATION / name).read_text() for name in (*_LANGUAGE, "block.cpp", "launcher.cpp", "launch.hpp")]
        return self._once("launcher", "", (_LAUNCHER, sanitizer, texts), build)

    @cached_property
    def server(self) -> Server:
        """A process that runs kernels under ThreadSanitizer; `end` ends it."""
        return Server(self.launcher)

    def end(self) -> None:
        if "server" in self.__dict__:
            self.server.end()

    def kernel(
        self, source: Path, entry: str, options: Sequence[str] = (), *, changes: Sequence[Change] = ()
    ) -> Kernel:
        """Return the kernel ``entry`` of ``source``, compiled with ``options`` and after ``changes``."""
        key = (source, entry, *options, *changes)
        if key not in self._kernels:
            self._kernels[key] = Kernel(self._compiled(source, entry, options, changes), f"enter_{entry}")
        return self._kernels[key]

    def _compiled(self, source: Path, entry: str, options: Sequence[str], changes: Sequence[Change]) -> Path:
        files = _included(source, tuple(changes))
        changed = files != _included(source)  # a run may have kernels that the changes do not concern
        speed: tuple[str, ...] = _CHANGED if changed else _OPTIMIZED
        if self.sanitize:
            speed += _SANITIZER if changed else _SANITIZER + _LINES

        def build(directory: Path) -> Path:
            for name, text in files.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(text)
            (directory / "entry.cpp").write_text(f'#include "{source.name}"\nCPU_ENTRY({entry})\n')
            # The launcher has all libraries, so the kernel saves the time to link them.
            paths = (
                f"-I{directory}",
                f"-I{directory / 'include'}",
                "-include",
                str(self._language(speed).with_suffix("")),
            )
            _run(
                *("g++", *_KERNEL, *speed, *paths, *options, "-shared", "-nodefaultlibs"),
                *(str(directory / "entry.cpp"), "-o", str(directory / "kernel.so")),
            )
            return directory / "kernel.so"

        content = entry, options, _KERNEL, speed, sorted(files.items()), self._language(speed).name
        return self._once(source.stem, ".so", content, build)

    def _language(self, speed: Sequence[str]) -> Path:
        """Return the header cuda.hpp of every kernel, compiled."""

        def build(directory: Path) -> Path:
            header = ("-x", "c++-header", str(SIMULATION / "cuda.hpp"), "-o", str(directory / "cuda.hpp.gch"))
            _run("g++", *_KERNEL, *speed, *header)
            return directory / "cuda.hpp.gch"

        texts = [(SIMULATION / name).read_text() for name in _LANGUAGE]
        return self._once("cuda", ".hpp.gch", (_KERNEL, speed, texts), build)

    def _once(self, stem: str, suffix: str, content: object, build: Callable[[Path], Path]) -> Path:
        """Return the file of that content, which the first process that asks for it builds, while others wait."""
        key = hashlib.sha256(repr((_compiler(), content)).encode()).hexdigest()
        made = self._directory / f"{stem}-{key[:32]}{suffix}"
        with (self._directory / f"lock-{int(key, 16) % _LOCKS}").open() as lock:
            if not made.exists():
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                # A process that is killed here leaves no half of a build under the name.
                with tempfile.TemporaryDirectory(prefix="making-", dir=self._directory) as directory:
                    build(Path(directory)).replace(made)
        os.utime(made)
        return made


_LANGUAGE = ("cuda.hpp", "block.hpp")


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr


@functools.cache
def _included(source: Path, changes: tuple[Change, ...] = ()) -> dict[str, str]:
    """Return the texts after ``changes`` of ``source`` and of all files that it includes, by their names."""
    paths = {**HEADERS, **SOURCES, **_PUBLIC, source.name: source}
    texts: dict[str, str] = {}

    def text_of(file: str) -> str:
        if file not in texts:
            texts[file] = paths[file].read_text()
        return texts[file]

    for change in changes:
        file = Path(change.file).name
        text = text_of(file)
        # A change that fits nowhere would make no mistake, and a change that fits twice would make another mistake.
        if text.count(change.old) != 1:  # no AssertionError, which tests of changed kernels expect
            raise ValueError(f"{change.file} has {text.count(change.old)} of: {change.old}")
        texts[file] = text.replace(change.old, change.new)
    found, ahead = {}, [source.name]
    while ahead:
        file = ahead.pop()
        public = file in _PUBLIC
        name = str(Path("include") / _PUBLIC[file].relative_to(_INCLUDE_DIRECTORY)) if public else file
        if name not in found:
            found[name] = text_of(file)
            ahead += _INCLUDE.findall(found[name])
    return found


def _drop_unused(directory: Path) -> None:
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):  # another process drops it
            if time.time() - entry.stat().st_mtime > _KEPT_S and not entry.name.startswith("lock-"):
                shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
