from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mpicomm import environment
from mpicomm.errors import InvalidUsageError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MPICOMM_")]:
        monkeypatch.delenv(name)


def test_the_table_has_the_variables_that_the_functions_read() -> None:
    source = Path(environment.__file__).read_text()
    read = re.findall(r'(?:environ\.get\(|environ\[|_chosen\(|_one_of\()"(MPICOMM_[A-Z_]+)"', source)
    assert {*read} == {*environment.NAMES}


def test_unknown_names_have_the_nearest_name_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.unknown() == {}
    monkeypatch.setenv("MPICOMM_TIMOUT", "3")
    monkeypatch.setenv("MPICOMM_TIMEOUT", "3")
    monkeypatch.setenv("MPICOMM_debug_file", "log")
    monkeypatch.setenv("MPICOM_DEVICE", "cpu")
    assert environment.unknown() == {"MPICOMM_TIMOUT": "MPICOMM_TIMEOUT", "MPICOMM_debug_file": "MPICOMM_DEBUG_FILE"}


@pytest.mark.parametrize("argument", ["auto", "cpu", 0, 7])
def test_device_argument(argument: int | str) -> None:
    assert environment.device(argument) == argument


@pytest.mark.parametrize(("text", "device"), [("auto", "auto"), ("cpu", "cpu"), ("0", 0), ("12", 12)])
def test_device_variable(monkeypatch: pytest.MonkeyPatch, text: str, device: int | str) -> None:
    monkeypatch.setenv("MPICOMM_DEVICE", text)
    assert environment.device("auto") == device


@pytest.mark.parametrize("argument", [-1, True, 1.5, "gpu", "0", "", None])
def test_device_argument_that_is_none(argument: Any) -> None:
    expected = re.escape(f'device={argument!r} is no device: use "auto", "cpu" or a device ordinal')
    with pytest.raises(InvalidUsageError, match=f"^{expected}"):
        environment.device(argument)


@pytest.mark.parametrize("text", ["", "gpu", "-1", "1.0", "CPU", "0,1", "²"])
def test_device_variable_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_DEVICE", text)
    expected = re.escape(f'MPICOMM_DEVICE={text!r} is no device: use "auto", "cpu" or a device ordinal')
    with pytest.raises(InvalidUsageError, match=expected):
        environment.device("auto")


@pytest.mark.parametrize("text", ["cpu", "3", "nonsense"])
def test_device_argument_wins(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_DEVICE", text)
    assert environment.device(0) == 0
    assert environment.device("cpu") == "cpu"


@pytest.mark.parametrize("kind", ["auto", "ipc", "fd", "fabric", "staged"])
def test_handle(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert environment.handle(kind) == kind
    monkeypatch.setenv("MPICOMM_HANDLE", kind)
    assert environment.handle("auto") == kind


@pytest.mark.parametrize("kind", ["", "IPC", "memfd", "cuda", "ipc,fd"])
def test_handle_that_is_none(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    way_out = "is no handle kind: use one of auto, ipc, fd, fabric, staged"
    with pytest.raises(InvalidUsageError, match=f"^handle='{kind}' {way_out}"):
        environment.handle(kind)
    monkeypatch.setenv("MPICOMM_HANDLE", kind)
    with pytest.raises(InvalidUsageError, match=f"^MPICOMM_HANDLE='{kind}' {way_out}"):
        environment.handle("auto")


@pytest.mark.parametrize("text", ["fd", "nonsense"])
def test_handle_argument_wins(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_HANDLE", text)
    assert environment.handle("ipc") == "ipc"


def test_timeout_is_the_default_if_nothing_says_otherwise() -> None:
    assert environment.timeout_s(None) == environment.DEFAULT_TIMEOUT_S == 30.0


@pytest.mark.parametrize("seconds", [5, 2.5, 1e-3, environment.LONGEST_TIMEOUT_S])
def test_timeout_argument(seconds: float) -> None:
    assert environment.timeout_s(seconds) == seconds


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("2.5", 2.5), ("1e2", 100.0)])
def test_timeout_variable(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("MPICOMM_TIMEOUT", text)
    assert environment.timeout_s(None) == environment.usable_timeout_s(None) == seconds


@pytest.mark.parametrize("argument", [0, -1.0, 1.1e6, float("nan"), float("inf"), True, "3"])
def test_timeout_argument_that_is_none(argument: Any) -> None:
    expected = re.escape(f"timeout_s={argument!r}: use a positive number of seconds")
    with pytest.raises(InvalidUsageError, match=f"^{expected}"):
        environment.timeout_s(argument)
    assert environment.usable_timeout_s(argument) == environment.DEFAULT_TIMEOUT_S


@pytest.mark.parametrize("text", ["", "soon", "30s", "0", "-1", "nan", "inf"])
def test_timeout_variable_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_TIMEOUT", text)
    with pytest.raises(InvalidUsageError, match=f"^MPICOMM_TIMEOUT='{text}': use a positive number of seconds"):
        environment.timeout_s(None)


@pytest.mark.parametrize("text", ["5", "nonsense"])
def test_timeout_argument_wins(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_TIMEOUT", text)
    assert environment.timeout_s(7.0) == 7.0


@pytest.mark.parametrize(("text", "nbytes"), [(None, None), ("", None), ("512M", 512 << 20), ("1t", 1 << 40), ("7", 7)])
def test_memory(monkeypatch: pytest.MonkeyPatch, text: str | None, nbytes: int | None) -> None:
    if text is not None:
        monkeypatch.setenv("MPICOMM_MEMORY", text)
    assert environment.most_nbytes() == nbytes


@pytest.mark.parametrize("text", ["much", "0", "-1", "1.5G", "512MB"])
def test_memory_that_is_no_size(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_MEMORY", text)
    with pytest.raises(InvalidUsageError, match=f"^MPICOMM_MEMORY: '{text}' is no size: use bytes above 0, with K"):
        environment.most_nbytes()


@pytest.mark.parametrize(("text", "host_id"), [(None, None), ("", None), ("left rack", "left rack")])
def test_host_id(monkeypatch: pytest.MonkeyPatch, text: str | None, host_id: str | None) -> None:
    if text is not None:
        monkeypatch.setenv("MPICOMM_HOSTID", text)
    assert environment.host_id() == host_id


@pytest.mark.parametrize(("text", "bind"), [(None, False), ("0", False), ("1", True)])
def test_bind_cpu(monkeypatch: pytest.MonkeyPatch, text: str | None, bind: bool) -> None:
    if text is not None:
        monkeypatch.setenv("MPICOMM_BIND_CPU", text)
    assert environment.bind_cpu() is bind


@pytest.mark.parametrize("text", ["", "yes", "2", "true"])
def test_bind_cpu_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_BIND_CPU", text)
    with pytest.raises(InvalidUsageError, match=f"^MPICOMM_BIND_CPU='{text}': use 1 to bind, 0 not to"):
        environment.bind_cpu()


@pytest.mark.parametrize(
    ("text", "level"), [(None, "WARN"), ("WARN", "WARN"), ("INFO", "INFO"), ("TRACE", "TRACE"), ("info", "INFO")]
)
def test_debug(monkeypatch: pytest.MonkeyPatch, text: str | None, level: str) -> None:
    if text is not None:
        monkeypatch.setenv("MPICOMM_DEBUG", text)
    assert environment.debug() == level


@pytest.mark.parametrize("text", ["", "1", "debug"])
def test_debug_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MPICOMM_DEBUG", text)
    with pytest.raises(InvalidUsageError, match=f"^MPICOMM_DEBUG='{text}': use WARN, INFO or TRACE"):
        environment.debug()


@pytest.mark.parametrize(("text", "path"), [(None, None), ("", None), ("log.%h.%p.%r", "log.%h.%p.%r")])
def test_debug_file(monkeypatch: pytest.MonkeyPatch, text: str | None, path: str | None) -> None:
    if text is not None:
        monkeypatch.setenv("MPICOMM_DEBUG_FILE", text)
    assert environment.debug_file() == path


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


@pytest.mark.parametrize("name", ["auto", *environment.INTERNODE], ids="engine {}".format)  # pytest-mpi skips mpi
def test_internode(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert environment.internode() == "auto"
    monkeypatch.setenv("MPICOMM_INTERNODE", name)
    assert environment.internode() == name


def test_internode_by_its_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOMM_INTERNODE", "staged")
    assert environment.internode() == "pinned"


@pytest.mark.parametrize("name", ["", "NCCL", "ucx", "nccl,mpi"])
def test_internode_that_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MPICOMM_INTERNODE", name)
    expected = re.escape(f"MPICOMM_INTERNODE={name!r}: use mapped, nccl, mpi, pinned or auto")
    with pytest.raises(InvalidUsageError, match=expected):
        environment.internode()


@pytest.mark.parametrize(
    ("variables", "recording"),
    [
        ({}, None),
        ({"MPICOMM_STATS": "0", "MPICOMM_TRACE": ""}, None),
        ({"MPICOMM_STATS": "1"}, environment.Recording(None, stats=True)),
        ({"MPICOMM_TRACE": "trace-%r.json"}, environment.Recording("trace-%r.json", stats=False)),
    ],
)
def test_recording(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], recording: environment.Recording | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.recording() == recording


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("MPICOMM_STATS", "yes", "MPICOMM_STATS='yes': use 1"),
        (
            "MPICOMM_TRACE",
            "traces/",
            "MPICOMM_TRACE='traces/' names a folder: name a file, as in \"traces/trace-%r.json\"",
        ),
    ],
)
def test_recording_that_is_none(monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidUsageError, match=f"^{re.escape(said)}"):
        environment.recording()
