"""Hosts on one machine: namespaces with a network between them, and MPI jobs that MPICH's Hydra starts across them.

A host has its own network, host name, /dev/shm, System V memory and process numbers. It shares the file system and the
kernel with the other hosts, so all ranks find the results and the package at the same paths. All hosts hang on one
bridge in separate namespaces, where mpiexec runs. Nothing changes in the network of the machine.

Nothing outlives the test. The first process of a host reads from a pipe of this process and ends with it, however this
process ends. The kernel then kills the other processes of the host, and its namespaces and links go with them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers.jobs.mpiexec import environment, mpiexec_command, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S

# Over UCX and TCP, MPICH 5.0.2 waits for ever in receives from MPI.ANY_SOURCE of messages of another host. It also
# crashes if it sends to a rank that has died.
_VARIABLES = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
_SWITCH_ADDRESS = "10.0.0.254"
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")

# The first process of a host. It reads its own number in /proc of the machine, then mounts /proc of the host. UCX reads
# the names of network interfaces in /sys.
_BOOT = """
set -e
read number rest </proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
echo "$1" >/proc/sys/kernel/hostname
ip link set lo up
echo "$number"
"""
_STAY = "exec cat"
_TRY_LINKS = """
ip link add type veth
ip link add type bridge
"""

# Hydra takes it for ssh. It gets options, a host, and words for a shell on that host.
_ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
read number <"$(dirname "$0")/$1"
shift
exec nsenter --target "$number" %s sh -c "$*"
"""


@functools.cache
def why_not() -> str:
    """Return why this machine can have no hosts; "" if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}: install util-linux and iproute2"
    if "HYDRA" not in _output([mpiexec_command(1)[0], "-info"]):
        return "mpiexec is not Hydra, which comes with MPICH"
    # Containers often forbid a part of this also to root.
    probe = subprocess.run(
        _unshare(_BOOT + _TRY_LINKS, "probe"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return f"root may not make hosts here: {probe.stderr.strip()}" if probe.returncode else ""


class Hosts:
    """``count`` hosts, named host0, host1 and so on, with the addresses 10.0.0.1 and up; closed at the end of `hosts`.

    ``directory`` is an empty directory for files of the launcher.
    """

    def __init__(self, directory: Path, count: int, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._launcher = directory / "enter"
        self._launcher.write_text(_ENTER % " ".join(_NAMESPACES))
        self._launcher.chmod(0o755)
        self._stack = stack
        self._switch = self._boot("switch")
        self._ip(self._switch, "link add hosts type bridge")
        self._ip(self._switch, f"address add {_SWITCH_ADDRESS}/24 dev hosts")
        self._ip(self._switch, "link set hosts up")
        self.names = [f"host{index}" for index in range(count)]
        for index, name in enumerate(self.names):
            number = self._boot(name)
            self._ip(self._switch, f"link add {name} type veth peer name eth0 netns {number}")
            self._ip(self._switch, f"link set {name} master hosts up")
            self._ip(number, f"address add 10.0.0.{index + 1}/24 dev eth0")
            self._ip(number, "link set eth0 up")

    def start(self, placement: Sequence[int], output: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start this Python with ``arguments`` on ranks whose hosts ``placement`` tells, in the order of the ranks.

        Their output goes to the file ``output``.
        """
        mpiexec, *rest = mpiexec_command(len(placement), *arguments)
        used = ",".join(self.names[: max(placement) + 1])
        command = [
            *("nsenter", "--target", str(self._switch), "--net", "--uts"),
            *(mpiexec, "-localhost", _SWITCH_ADDRESS, "-hosts", used, "-rankmap", ",".join(map(str, placement))),
            *("-launcher", "ssh", "-launcher-exec", str(self._launcher)),
            *rest,
        ]
        variables = {**sharing_of_cores(len(placement)), **environment(**{**_VARIABLES, **variables})}
        with output.open("w") as file:
            job = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, text=True
            )
        return self._stack.enter_context(_ended_at_exit(job))

    def run(self, placement: Sequence[int], *arguments: str, **variables: str) -> str:
        """Run a job as `start` does and return its output; raises `AssertionError` if it fails."""
        output = self._directory / "output"
        job = self.start(placement, output, *arguments, **variables)
        try:
            code = job.wait(HANG_S)
        except subprocess.TimeoutExpired:
            code = None
        text = output.read_text(errors="replace")
        assert code == 0, f"the job ended with {code}:\n{text[-5000:]}"
        return text

    def cut_off(self, name: str) -> None:
        """Pull the cable of a host out of the bridge."""
        self._ip(self._switch, f"link set {name} down")

    def _boot(self, name: str) -> int:
        """Start the first process of a host and return its number."""
        first = subprocess.Popen(
            _unshare(_BOOT + _STAY, name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stack.enter_context(first)  # closes its standard input, so that it ends, and waits for the end
        assert first.stdout is not None
        number = first.stdout.readline().strip()
        assert number, f"{name} did not start"
        (self._directory / name).write_text(f"{number}\n")
        return int(number)

    def _ip(self, number: int, arguments: str) -> None:
        """Run the program ip in the network of a host."""
        command = ["nsenter", "--target", str(number), "--net", "ip", *shlex.split(arguments)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=HANG_S)


@contextlib.contextmanager
def hosts(directory: Path, count: int) -> Iterator[Hosts]:
    """Give `Hosts`, and end them with all that runs on them."""
    with contextlib.ExitStack() as stack:
        yield Hosts(directory, count, stack)


@contextlib.contextmanager
def _ended_at_exit(job: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield job
    finally:
        job.kill()  # its ranks end with their hosts
        job.wait()


def _unshare(script: str, name: str) -> list[str]:
    """Return the command that runs a script as the first process of a host of that name."""
    return ["unshare", *_NAMESPACES, "--fork", "sh", "-c", script, "-", name]


def _output(command: list[str]) -> str:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S).stdout
