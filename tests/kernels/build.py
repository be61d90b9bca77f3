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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mpicomm import environment
from mpicomm.kernels.variant import KERNEL_DIR
from tests.helpers.inputs.kernel_sources import HEADERS, SOURCES
from tests.helpers.jobs.mpiexec import ROOT
from tests.kernels.launchers import Server
from tests.kernels.mistakes import Change, Changes, Mistake, shared, with_mistakes

SIMULATION = Path(__file__).parent / "simulation"

# A sum and a product may not become one rounding, as in the package's options for NVRTC. Kernels read packets through
# pointers to other types, so g++ may not assume that such pointers differ. A thread's stack has 16 KiB, and the next
# stack lies below it. Kernels throw nothing, and tables for it take the compiler a while.
_KERNEL = (
    *("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fno-exceptions", "-fno-asynchronous-unwind-tables"),
    "-Werror=frame-larger-than=4096",
)
# Most kernels compile for longer than they run: g++ is done sooner with -Og than with -O1. A kernel with changes runs
# for one test, and -O0 is done the soonest.
_OPTIMIZED, _CHANGED = ("-Og",), ("-O0",)
_LAUNCHER = ("-std=c++17", "-Wall", "-Wextra")
_SANITIZER = ("-fsanitize=thread",)
_LINES = ("-g1",)  # of a race, which is no surprise in a kernel with changes

_INCLUDE_DIRECTORY = KERNEL_DIR / "include"
_PUBLIC = {path.name: path for path in _INCLUDE_DIRECTORY.rglob("*.cuh")}
_OTHERS = (*(ROOT / "examples").glob("*.cu"), *Path(__file__).parent.glob("*.cu"))
_FILES = {**HEADERS, **SOURCES, **_PUBLIC, **{path.name: path for path in _OTHERS}}
_INCLUDE = re.compile(r'^#include ["<](?:[^">\n]*/)?([^">/\n]+\.cuh)[">]', re.MULTILINE)
_KERNEL_NAME = re.compile(r"^MPICOMM_KERNEL void (\w+)\(", re.MULTILINE)
_CONDITIONAL = re.compile(r"^#if.*?^#endif", re.MULTILINE | re.DOTALL)
_LOCKS = 64
_FIBERS_OF_SERVER = 400
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
class Kernel:
    """A compiled kernel as the launcher knows it."""

    binary: Path
    entry: str
    mistake: int = 0
    """The number of the mistake that it makes, of those of its binary."""


class Builds:
    """The builds in ``directory``, which processes share; for ThreadSanitizer if ``sanitize``."""

    def __init__(self, directory: Path, *, sanitize: bool = False) -> None:
        self.sanitize = sanitize
        self._directory = directory
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._servers: dict[int, Server] = {}
        for number in range(_LOCKS):
            (directory / f"lock-{number}").touch()
        _drop_unused(directory)

    @cached_property
    def launcher(self) -> Path:
        """The program that runs kernels."""
        sanitizer = _SANITIZER if self.sanitize else ()
        objects = [self._object("block", "-O2"), self._object("launcher", "-O0")]

        def build(directory: Path) -> Path:
            paths = [*map(str, objects), "-ldl", "-pthread", "-o", str(directory / "launcher")]
            _run("g++", *sanitizer, "-rdynamic", *paths)
            return directory / "launcher"

        return self._once("launcher", "", (sanitizer, [each.name for each in objects]), build)

    def _object(self, name: str, speed: str) -> Path:
        """Return a part of the launcher, which is not instrumented: see block.cpp."""

        def build(directory: Path) -> Path:
            made = directory / "made.o"
            _run("g++", *_LAUNCHER, speed, "-c", str(SIMULATION / f"{name}.cpp"), "-o", str(made))
            return made

        texts = [(SIMULATION / file).read_text() for file in ("block.hpp", "launch.hpp", f"{name}.cpp")]
        return self._once(name, ".o", (_LAUNCHER, speed, texts), build)

    def server(self, fibers: int) -> Server:
        """Return a process that runs kernels with so many fibers of ThreadSanitizer; `end` ends it.

        Each job takes the longer, the more fibers its server has made.
        """
        size = -(-fibers // _FIBERS_OF_SERVER)
        if size not in self._servers:
            self._servers[size] = Server(self.launcher)
        return self._servers[size]

    def end(self) -> None:
        for server in self._servers.values():
            server.end()

    def kernel(self, source: Path, entry: str, options: Sequence[str] = (), *, changes: Changes = ()) -> Kernel:
        """Return the kernel ``entry`` of ``source``, compiled with ``options`` and after ``changes``."""
        key = (source, entry, *options, *changes)
        if key not in self._kernels:
            mistakes = [change for change in changes if isinstance(change, Mistake)]
            assert len(mistakes) < 2
            binary = self._compiled(source, entry, options, [*changes])
            self._kernels[key] = Kernel(binary, f"enter_{entry}", *(each.number for each in mistakes))
        return self._kernels[key]

    def _compiled(self, source: Path, entry: str, options: Sequence[str], changes: Changes) -> Path:
        fixed = tuple(change for change in changes if isinstance(change, Change))
        switched = tuple(change for each in changes if isinstance(each, Mistake) for change in each.changes)
        files = _included(source, fixed, switched)
        entries = _entries(files[source.name], entry)
        changed = files != _included(source)  # a run may have kernels that the changes do not concern
        speed: tuple[str, ...] = _CHANGED if changed else _OPTIMIZED
        if self.sanitize:
            speed += _SANITIZER if changed else _SANITIZER + _LINES

        def build(directory: Path) -> Path:
            for name, text in files.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(text)
            made = "\n".join(f"CPU_ENTRY({each})" for each in entries)
            (directory / "entry.cpp").write_text(f'#include "{source.name}"\n{made}\n')
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

        content = entries, options, _KERNEL, speed, sorted(files.items()), self._language(speed).name
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


def one_build_of_many(changes: Iterable[Change]) -> list[Change | Mistake]:
    """Return each change as a mistake of a build that it shares with others, or as it is if it needs its own build."""
    return shared(changes, lambda change: _FILES[change.name].read_text())


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr


@functools.cache
def _included(source: Path, changes: tuple[Change, ...] = (), switched: tuple[Change, ...] = ()) -> dict[str, str]:
    """Return the texts after ``changes`` of ``source`` and of all files that it includes, by their names.

    The launcher switches on one of the changes that are ``switched``.
    """
    texts: dict[str, str] = {source.name: source.read_text()}

    def text_of(file: str) -> str:
        if file not in texts:
            texts[file] = _FILES[file].read_text()
        return texts[file]

    for change in changes:
        texts[change.name] = change.apply(text_of(change.name))
    for file in {change.name for change in switched}:
        texts[file] = with_mistakes(text_of(file), file, switched)
    found, ahead = {}, [source.name]
    while ahead:
        file = ahead.pop()
        public = file in _PUBLIC
        name = str(Path("include") / _PUBLIC[file].relative_to(_INCLUDE_DIRECTORY)) if public else file
        if name not in found:
            found[name] = text_of(file)
            ahead += _INCLUDE.findall(found[name])
    return found


def _entries(text: str, entry: str) -> Sequence[str]:
    """Return the kernels of a source that one build has: all that it has in any case, or only ``entry``."""
    always = _KERNEL_NAME.findall(_CONDITIONAL.sub("", text))
    return always if entry in always else [entry]


def _drop_unused(directory: Path) -> None:
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):  # another process drops it
            if time.time() - entry.stat().st_mtime > _KEPT_S and not entry.name.startswith("lock-"):
                shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
