"""Environment variables, and the log that they set up."""

from __future__ import annotations

import io
import logging
import os
import re
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpicomm import environment, log
from mpicomm.environment import DEFAULT_TIMEOUT_S, HANDLES, INTERNODE, LONGEST_TIMEOUT_S, Recording
from mpicomm.errors import InvalidUsageError
from mpicomm.log import open_file


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(environment.PREFIX)]:
        monkeypatch.delenv(name)


def test_the_table_has_the_variables_that_the_functions_read() -> None:
    source = Path(environment.__file__).read_text()
    read = re.findall(r'(?:environ\.get\(|environ\[|_chosen\(|_one_of\()"(MPICOMM_[A-Z_]+)"', source)
    assert {*read} == {*environment.NAMES}


class Variable(NamedTuple):
    """A variable, and the argument that wins over it."""

    read: Callable[..., Any]
    values: dict[str | None, Any]
    """What texts of the variable mean; None is no variable."""
    wrong: tuple[str, ...] = ()
    said: str = ""
    """The error of a wrong text, after the name of the variable; {} is the text."""
    argument: str = ""
    """The name of the argument, and what leaves the choice to the variable."""
    unset: Any = None
    right_arguments: tuple[Any, ...] = ()
    wrong_arguments: tuple[Any, ...] = ()


NO_DEVICE = '={!r} is no device: use "auto", "cpu" or a device ordinal'
NO_HANDLE = "={!r} is no handle kind: use one of auto, ipc, fd, fabric, staged"
NO_TIMEOUT = "={!r}: use a positive number of seconds"
VARIABLES = {
    "MPICOMM_DEVICE": Variable(
        environment.device,
        {None: "auto", "auto": "auto", "cpu": "cpu", "0": 0, "12": 12},
        ("", "gpu", "-1", "1.0", "CPU", "0,1", "²"),
        NO_DEVICE,
        *("device", "auto", ("cpu", 0, 7), (-1, True, 1.5, "gpu", "0", "", None)),
    ),
    "MPICOMM_HANDLE": Variable(
        environment.handle,
        {None: "auto", **{kind: kind for kind in HANDLES}},
        ("", "IPC", "memfd", "cuda", "ipc,fd"),
        NO_HANDLE,
        *("handle", "auto", HANDLES[1:], ("", "IPC", "memfd", "cuda", "ipc,fd")),
    ),
    "MPICOMM_TIMEOUT": Variable(
        environment.timeout_s,
        {None: DEFAULT_TIMEOUT_S, "5": 5.0, "2.5": 2.5, "1e2": 100.0},
        ("", "soon", "30s", "0", "-1", "nan", "inf"),
        NO_TIMEOUT,
        *("timeout_s", None, (5, 2.5, 1e-3, LONGEST_TIMEOUT_S), (0, -1.0, 1.1e6, float("nan"), True, "3")),
    ),
    "MPICOMM_REDUCTIONS": Variable(
        environment.reductions,
        {None: "auto", "auto": "auto", "ordered": "ordered"},
        ("", "any"),
        "={!r}: use auto (the fastest way) or ordered",
        *("reductions", "auto", ("ordered",), ("mpi", "")),
    ),
    "MPICOMM_ORDER": Variable(
        environment.stream_order,
        {None: False, "complete": False, "stream": True},
        ("", "Stream"),
        "={!r}: use complete (calls are complete on return) or stream",
        *("stream_order", None, (True, False), ("stream", 1)),
    ),
    "MPICOMM_MEMORY": Variable(
        environment.memory_limit_nbytes,
        {None: None, "": None, "512M": 512 << 20, "1t": 1 << 40, "7": 7},
        ("much", "0", "-1", "1.5G", "512MB"),
        ": {!r} is no size: use bytes above 0, with K",
    ),
    "MPICOMM_HOSTID": Variable(environment.host_id, {None: None, "": None, "left rack": "left rack"}),
    "MPICOMM_TUNING": Variable(environment.tuning, {None: None, "": None, "off": "off"}),
    "MPICOMM_DEBUG_FILE": Variable(environment.debug_file, {None: None, "": None, "log.%h.%p.%r": "log.%h.%p.%r"}),
    "MPICOMM_BIND_CPU": Variable(
        environment.bind_cpu,
        {None: False, "0": False, "1": True},
        ("", "yes", "2", "true"),
        "={!r}: use 1 to bind, 0 not to",
    ),
    "MPICOMM_DEBUG": Variable(
        environment.debug,
        {None: "WARN", "WARN": "WARN", "INFO": "INFO", "TRACE": "TRACE", "info": "INFO"},
        ("", "1", "debug"),
        "={!r}: use WARN, INFO or TRACE",
    ),
    "MPICOMM_INTERNODE": Variable(
        environment.internode,
        {None: "auto", "auto": "auto", "staged": "pinned", **{name: name for name in INTERNODE}},
        ("", "NCCL", "ucx", "nccl,mpi"),
        "={!r}: use mapped, nccl, mpi, pinned or auto",
    ),
    "MPICOMM_STATS": Variable(
        environment.recording, {None: None, "0": None, "1": Recording(None, stats=True)}, ("yes",), "={!r}: use 1"
    ),
    "MPICOMM_TRACE": Variable(
        environment.recording,
        {None: None, "": None, "trace-%r.json": Recording("trace-%r.json", stats=False)},
        ("traces/",),
        '={!r} names a folder: name a file, as in "traces/trace-%r.json"',
    ),
}


def test_every_variable_is_tested() -> None:
    assert {*VARIABLES} == {*environment.NAMES}


@pytest.mark.parametrize("name", VARIABLES)
def test_values_of_the_variable_and_of_the_argument_which_wins(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variable = VARIABLES[name]
    unset = (variable.unset,) if variable.argument else ()
    for text, value in variable.values.items():
        if text is not None:
            monkeypatch.setenv(name, text)
        assert variable.read(*unset) == value
    for text in variable.wrong:
        monkeypatch.setenv(name, text)
        with pytest.raises(InvalidUsageError, match=f"^{re.escape(name + variable.said.format(text))}"):
            variable.read(*unset)
    for argument in variable.right_arguments:
        assert variable.read(argument) == argument
    for argument in variable.wrong_arguments:
        said = variable.said.format(argument) if name != "MPICOMM_ORDER" else f"={argument!r}: use True, False or None"
        with pytest.raises(InvalidUsageError, match=f"^{re.escape(variable.argument + said)}"):
            variable.read(argument)


def test_a_wrong_timeout_leaves_a_deadline_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.usable_timeout_s(0) == DEFAULT_TIMEOUT_S
    monkeypatch.setenv("MPICOMM_TIMEOUT", "2.5")
    assert environment.usable_timeout_s(None) == 2.5


def test_unknown_names_have_the_nearest_name_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.unknown() == {}
    monkeypatch.setenv("MPICOMM_TIMOUT", "3")
    monkeypatch.setenv("MPICOMM_TIMEOUT", "3")
    monkeypatch.setenv("MPICOMM_debug_file", "log")
    monkeypatch.setenv("MPICOM_DEVICE", "cpu")
    assert environment.unknown() == {"MPICOMM_TIMOUT": "MPICOMM_TIMEOUT", "MPICOMM_debug_file": "MPICOMM_DEBUG_FILE"}


def test_a_processs_number_on_its_machine_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment._LOCAL_IDS:
        monkeypatch.delenv(name, raising=False)
    assert environment.local_id() == 0
    for text in ("-1", "", "two"):
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", text)
        assert environment.local_id() == 0
    monkeypatch.setenv("SLURM_LOCALID", "4")
    assert environment.local_id() == 4
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "12")
    assert environment.local_id() == 12


WHO = f"{socket.gethostname()}:{os.getpid()}:3 mpicomm "
Configure = Callable[..., str]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Configure:
    """Sets up the log with variables, as a new process does twice; gives what four records become on stderr."""
    monkeypatch.setattr(log, "_warn_of_unknown_variables", cache(log._warn_of_unknown_variables.__wrapped__))

    def configure(rank: int = 3, /, *handlers: logging.Handler, **variables: str) -> str:
        monkeypatch.setattr(log, "logger", logging.Logger("mpicomm", logging.INFO))
        log.logger.handlers[:] = handlers
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for _ in range(2):
            log.configure(rank)
        log.logger.warning("a %s", "warning")
        log.logger.info("an info")
        log.logger.debug("a debug line")
        log.logger.log(log.TRACE, "a trace")
        return capsys.readouterr().err

    return configure


def lines(*records: str) -> str:
    return "".join(f"{WHO}{record}\n" for record in records)


def test_the_level_decides_what_goes_to_stderr_or_to_a_file(configured: Configure, tmp_path: Path) -> None:
    assert configured() == lines("WARNING a warning")
    assert not log.logger.propagate  # or a handler of the root logger would write all twice
    assert configured(MPICOMM_DEBUG="info") == lines("WARNING a warning", "INFO an info")
    every = lines("WARNING a warning", "INFO an info", "DEBUG a debug line", "TRACE a trace")
    assert configured(MPICOMM_DEBUG="TRACE") == every
    assert configured(MPICOMM_DEBUG_FILE=f"{tmp_path}/%r-%h-%p-%p.log") == ""
    (path,) = tmp_path.iterdir()
    assert path.name == f"3-{socket.gethostname()}-{os.getpid()}-{os.getpid()}.log"
    assert path.read_text() == every
    log.logger.handlers[0].close()


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


def test_a_file_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    reason = "No such file or directory: name a file that this user can write"
    said = f"MPICOMM_DEBUG_FILE='{tmp_path}/none/3.log' cannot be opened: {reason}"
    with pytest.raises(InvalidUsageError, match=f"^{re.escape(said)}$"):
        open_file("MPICOMM_DEBUG_FILE", f"{tmp_path}/none/3.log", "a")


def test_a_handler_of_the_program_gets_the_records_and_nothing_is_written_twice(
    configured: Configure, tmp_path: Path
) -> None:
    said = io.StringIO()
    assert configured(3, logging.StreamHandler(said), MPICOMM_DEBUG="TRACE", MPICOMM_DEBUG_FILE=f"{tmp_path}/a") == ""
    assert said.getvalue() == "a warning\nan info\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own_handler", [False, True])
def test_rank_0_names_variables_that_are_not_read_once(configured: Configure, own_handler: bool) -> None:
    handlers = [logging.StreamHandler()] if own_handler else []
    misspelt = {"MPICOMM_TIMOUT": "3", "MPICOMM_STAT": "1", "MPICOMM_STATS": "0"}
    assert "does not read" not in configured(1, *handlers, **misspelt)
    said = configured(0, *handlers)
    assert (
        said.count("does not read") == 1
        and (
            "mpicomm does not read MPICOMM_STAT (the nearest name that it reads is MPICOMM_STATS), MPICOMM_TIMOUT (the "
            "nearest name that it reads is MPICOMM_TIMEOUT): correct the name, or unset it\n"
        )
        in said
    )
