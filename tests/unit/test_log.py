"""Each test is a process: logging is set up once per process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomm import InvalidUsageError
from mpicomm.log import open_file

ROOT = Path(__file__).parents[2]

LOG = """
import logging
from mpicomm import log
log.configure(3)
log.configure(4)
log.logger.warning("a %s", "warning")
log.logger.info("an info")
log.logger.debug("a debug line")
log.logger.log(log.TRACE, "a trace")
"""


def run(code: str, **variables: str) -> tuple[int, str]:
    """Run Python code; return its pid and its output on stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MPICOMM_")}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | variables, stderr=subprocess.PIPE, text=True
    ) as process:
        _, said = process.communicate()
    assert process.returncode == 0, said
    return process.pid, said


def lines(pid: int, *records: str) -> str:
    return "".join(f"{socket.gethostname()}:{pid}:3 mpicomm {record}\n" for record in records)


@pytest.mark.parametrize(
    ("variables", "records"),
    [
        ({}, ["WARNING a warning"]),
        ({"MPICOMM_DEBUG": "WARN"}, ["WARNING a warning"]),
        ({"MPICOMM_DEBUG": "info"}, ["WARNING a warning", "INFO an info"]),
        ({"MPICOMM_DEBUG": "TRACE"}, ["WARNING a warning", "INFO an info", "DEBUG a debug line", "TRACE a trace"]),
    ],
)
def test_the_level_decides_what_goes_to_stderr(variables: dict[str, str], records: list[str]) -> None:
    pid, said = run(LOG, **variables)
    assert said == lines(pid, *records)


def test_a_file_gets_the_lines_instead_under_a_name_of_host_pid_and_rank(tmp_path: Path) -> None:
    pid, said = run(LOG, MPICOMM_DEBUG_FILE=f"{tmp_path}/%r-%h-%p-%p.log")
    assert said == ""
    (path,) = tmp_path.iterdir()
    assert path.name == f"3-{socket.gethostname()}-{pid}-{pid}.log"
    assert path.read_text() == lines(pid, "WARNING a warning")


def test_a_file_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    code = """
import sys
from mpicomm import log
from mpicomm.errors import InvalidUsageError
try:
    log.configure(3)
except InvalidUsageError as error:
    sys.stderr.write(str(error))
"""
    _, said = run(code, MPICOMM_DEBUG_FILE=f"{tmp_path}/none/%r.log")
    reason = "No such file or directory: name a file that this user can write"
    assert said == f"MPICOMM_DEBUG_FILE='{tmp_path}/none/3.log' cannot be opened: {reason}"


@pytest.mark.needs_root
def test_no_file_is_written_through_a_link_of_another_user(tmp_path: Path) -> None:
    target, link, own = tmp_path / "target", tmp_path / "link", tmp_path / "own"
    for each in (link, own):
        each.symlink_to(target)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(InvalidUsageError, match="symbolic link of another user"):
        open_file("MPICOMM_DEBUG_FILE", str(link), "a")
    assert not target.exists()
    open_file("MPICOMM_DEBUG_FILE", str(own), "w").close()
    assert target.exists()


def test_a_handler_of_the_program_gets_the_records_and_nothing_is_written_twice(tmp_path: Path) -> None:
    code = """
import logging
logger = logging.getLogger("mpicomm")
logger.addHandler(logging.StreamHandler())
logger.setLevel(logging.INFO)
"""
    _, said = run(code + LOG, MPICOMM_DEBUG="TRACE", MPICOMM_DEBUG_FILE=f"{tmp_path}/file")
    assert said == "a warning\nan info\n"
    assert list(tmp_path.iterdir()) == []


def test_a_handler_of_the_root_logger_writes_nothing_twice() -> None:
    pid, said = run("import logging; logging.basicConfig()" + LOG)
    assert said == lines(pid, "WARNING a warning")


@pytest.mark.parametrize(
    "own_handler", ["", "import logging; logging.getLogger('mpicomm').addHandler(logging.StreamHandler())\n"]
)
def test_rank_0_names_variables_that_are_not_read_once(own_handler: str) -> None:
    code = f"{own_handler}from mpicomm import log\nfor _ in range(2): log.configure(RANK)"
    misspelt = {"MPICOMM_TIMOUT": "3", "MPICOMM_STAT": "1", "MPICOMM_STATS": "0"}
    _, said = run(code.replace("RANK", "0"), **misspelt)
    assert said.count("\n") == 1 and said.endswith(
        "mpicomm does not read MPICOMM_STAT (the nearest name that it reads is MPICOMM_STATS), MPICOMM_TIMOUT (the "
        "nearest name that it reads is MPICOMM_TIMEOUT): correct the name, or unset it\n"
    )
    assert run(code.replace("RANK", "1"), **misspelt)[1] == ""
