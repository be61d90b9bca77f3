"""A process of the program of launcher.cpp, which carries out jobs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

MOST_CPU_S = 300  # of a job, because a kernel that loops without a memory access stops the time of kernels
_ADDR_NO_RANDOMIZE = 0x0040000  # of personality(2)
_CURRENT = 0xFFFFFFFF
_LIBC = ctypes.CDLL(None)
# ThreadSanitizer takes longer than most kernels run to find the lines of a race, hence `_with_lines` does.
_TSAN_OPTIONS = 'halt_on_error=1 exitcode=66 symbolize=0 stack_trace_format="    #%n %m+%o"'


class Server:
    """A process of the launcher, which forks one for each job, so that fibers of ThreadSanitizer are made once."""

    def __init__(self, launcher: Path) -> None:
        variables = {**os.environ, "TSAN_OPTIONS": _TSAN_OPTIONS}
        with _fixed_addresses():
            self._process = subprocess.Popen(
                [str(launcher)], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        # A process that this one forks has the same limit, and a time of its own.
        resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))

    def run(self, jobs: Sequence[str], fibers: int = 0) -> list[tuple[int, str]]:
        """Run jobs whose blocks have so many threads in all; when one fails, end the others.

        Return the exit code of each, and what it has said.
        """
        with contextlib.ExitStack() as stack:
            errors = [os.memfd_create("mpicomm-test-errors") for _ in jobs]
            for fd in errors:
                stack.callback(os.close, fd)
            text = f"jobs {len(jobs)} {fibers}\n".encode()
            for job, fd in zip(jobs, errors, strict=True):
                lines = f"errors {file_of(fd)}\n{job}\n".encode()
                text += f"job {len(lines)}\n".encode() + lines
            stdin, stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
            stdin.write(text)
            stdin.flush()
            statuses = [int(status) for status in stdout.readline().split()] or [int(signal.SIGKILL)] * len(jobs)
            said = (os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace") for fd in errors)
            codes = map(os.waitstatus_to_exitcode, statuses)
            return [(code, _with_lines(each)) for code, each in zip(codes, said, strict=True)]

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
