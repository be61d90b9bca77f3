"""Users other than root may have as many descriptors in flight between processes as a process may open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ORDINARY_USER = """
import errno, os, resource, socket, time
from concurrent.futures import ThreadPoolExecutor
from mpicomm.errors import HandleError
from tests.helpers.rigs.fd_exchanges import SOON_S, listening, names_of_others, swap, swap_all

if os.geteuid() == 0:
    os.setuid(65534)
# This process sends more descriptors than the limit of the test. So the test does not depend on the descriptors of
# other processes of this user, which the kernel counts too, and which may land at any time.
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
into, out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    while True:
        socket.send_fds(into, [b"another job's"], [0] * 10)
except OSError as error:
    assert error.errno == errno.ETOOMANYREFS, error
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
"""

SWAPS_LATER = """
with listening(3) as exchanges, ThreadPoolExecutor(1) as pool:
    swapped = pool.submit(swap_all, exchanges)
    # The swap need not wait so long: another job of this user may take descriptors out of flight meanwhile.
    time.sleep(0.2)
    out.close()
    assert swapped.result() == names_of_others(3)
"""

NAMES_THE_LIMIT = """
with listening(2) as (exchange, peer):
    try:
        swap(exchange, 0, [exchange.address, peer.address], SOON_S)
    except HandleError as error:
        print(error)
"""


def output_of(code: str) -> str:
    command = [sys.executable, "-c", ORDINARY_USER + code]
    result = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")  # nor does a rank take another for a stranger
    return result.stdout


def test_a_swap_waits_until_fewer_descriptors_are_in_flight() -> None:
    assert output_of(SWAPS_LATER) == ""


def test_too_many_descriptors_in_flight_are_an_error_that_names_the_limit() -> None:
    said = output_of(NAMES_THE_LIMIT)
    assert "cannot send a descriptor to local ranks [1] in time" in said
    assert "this user may have 100 descriptors in flight between processes: raise the limit (ulimit -n)" in said
