"""Processes of the program of launcher.cpp, which carry out jobs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import selectors
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

MOST_CPU_S = 300  # of a job, because a kernel that loops without a memory access stops the time of kernels
_ADDR_NO_RANDOMIZE = 0x0040000  # of personality(2)
_CURRENT = 0xFFFFFFFF
_LIBC = ctypes.CDLL(None)
# A fiber of ThreadSanitizer has some 0.8 MB.
_MOST_FIBERS = 1500
# ThreadSanitizer takes longer than most kernels run to find the lines of a race, hence `_with_lines` does.
_TSAN_OPTIONS = 'halt_on_error=1 exitcode=66 symbolize=0 stack_trace_format="    #%n %m+%o"'


def run_together(launcher: Path, jobs: Sequence[str]) -> list[tuple[int, str]]:
    """Run each job in a process; when one fails, end the others. Return the exit code of each, and what it has said."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        running: list[subprocess.Popen[bytes]] = []

        def end() -> None:
            for process in running:
                process.kill()

        stack.callback(lambda: [process.communicate() for process in running])
        stack.callback(end)
        for job in jobs:
            process = _start(launcher, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            running.append(process)
            stdin = cast(IO[bytes], process.stdin)
            stdin.write(job.encode())
            stdin.close()
            process.stdin = None
            selector.register(cast(IO[bytes], process.stderr), selectors.EVENT_READ, process)
        said: dict[int, bytes] = {process.pid: b"" for process in running}
        while selector.get_map():
            for key, _ in selector.select():
                if text := os.read(key.fd, 1 << 16):
                    said[key.data.pid] += text
                    continue
                selector.unregister(key.fileobj)
                if key.data.wait():  # the others may wait for it for ever
                    end()
    return [(process.wait(), said[process.pid].decode(errors="replace")) for process in running]


class Server:
    """A process that forks one for each job, so that fibers of ThreadSanitizer are made once."""

    def __init__(self, launcher: Path) -> None:
        self._process = _start(launcher, "serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, job: str, fibers: int) -> tuple[int, str]:
        """Run a job whose blocks have so many threads in all. Return the exit code, and what it has said."""
        errors = os.memfd_create("mpicomm-test-errors")
        try:
            lines = [*job.splitlines(), f"errors {file_of(errors)}"]
            stdin, stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
            head = f"job {min(fibers, _MOST_FIBERS)} {len(lines)}"
            stdin.write("".join(f"{line}\n" for line in (head, lines[-1], *lines[:-1])).encode())
            stdin.flush()
            answer = stdout.readline()
            code = os.waitstatus_to_exitcode(int(answer)) if answer else -signal.SIGKILL
            said = os.pread(errors, os.fstat(errors).st_size, 0)
        finally:
            os.close(errors)
        return code, _with_lines(said.decode(errors="replace"))

    def end(self) -> None:
        """End the process, and with it a job that runs."""
        self._process.kill()
        self._process.communicate()


def _with_lines(said: str) -> str:
    """Replace the places in kernels that ThreadSanitizer reports by functions and lines."""
    for library in set(re.findall(r"#\d+ (\S+\.so)\+0x", said)):
        places = list(dict.fromkeys(re.findall(re.escape(library) + r"\+(0x[0-9a-f]+)", said)))
        command = ("addr2line", "--pretty-print", "--functions", "--demangle", "--basenames", "-e", library, *places)
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        for place, line in zip(places, lines, strict=True):
            said = said.replace(f"{library}+{place}\n", f"{line}\n")
    return said


def file_of(fd: int) -> str:
    """Return the name of the file of a descriptor of this process for others."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _start(launcher: Path, *arguments: str, **pipes: int) -> subprocess.Popen[bytes]:
    variables = {**os.environ, "TSAN_OPTIONS": _TSAN_OPTIONS}
    with _fixed_addresses():
        process: subprocess.Popen[bytes] = subprocess.Popen([str(launcher), *arguments], env=variables, **pipes)  # type: ignore[call-overload]
    # A process that this one forks has the same limit, and a time of its own.
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
    return process


@contextlib.contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Let programs that this thread starts have the same addresses in every run.

    Many versions of Linux spread addresses widely (vm.mmap_rnd_bits, which only root may read). Then ThreadSanitizer
    does not start, and a library may lie at the addresses of the ranks' memory. A container may forbid the call, which
    then changes nothing.
    """
    before = _LIBC.personality(_CURRENT)
    _LIBC.personality(before | _ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        _LIBC.personality(before)
