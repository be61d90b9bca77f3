"""Scripts answer --help, and files that scripts write are up to date."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT, run_command

SCRIPTS = ROOT / "scripts"
COMMANDS = [path for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)]
WITH_HELP = re.compile(r"description=__doc__|measuring_parser\(__doc__")
PROGRAMS = [path for path in SCRIPTS.rglob("*.py") if WITH_HELP.search(path.read_text())]


def require_names_itself(script: Path, said: str) -> None:
    name = script.relative_to(ROOT)
    assert str(name) in said or name.stem in said, script


def test_each_command_answers_help_and_writes_nothing(tmp_path: Path) -> None:
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        job = run_command(command, "--help", cwd=tmp_path)
        assert (job.returncode, job.stderr) == (0, ""), command
        require_names_itself(command, job.stdout)
    assert list(tmp_path.iterdir()) == []


def test_each_program_answers_help_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PROGRAMS) > 15
    monkeypatch.chdir(tmp_path)
    job, ended = run_in_turn(1, *((program, "--help") for program in PROGRAMS))
    assert (job.returncode, job.stderr) == (0, "")
    for program, (said, code) in zip(PROGRAMS, ended, strict=True):
        assert code == 0, program
        require_names_itself(program, said)
    assert list(tmp_path.iterdir()) == []


DOCS = ROOT / "mpicomm/docs"


@pytest.mark.parametrize(
    ("script", "target", "names", "options"),
    [
        ("chart.py", "allreduce.svg", ["allreduce.svg"], []),
        ("chart.py", "strided.svg", ["strided.svg"], ["--strided", "scripts/results/strided-2-h200.json"]),
        ("how_it_works.py", "how_it_works.svg", ["how_it_works.svg"], []),
        ("architecture.py", ".", ["rooms.svg", "way_of_a_call.svg"], []),
    ],
)
def test_the_pictures_are_up_to_date(
    tmp_path: Path, script: str, target: str, names: list[str], options: list[str]
) -> None:
    assert run_command(sys.executable, f"scripts/documents/{script}", tmp_path / target, *options).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()


@pytest.mark.parametrize("script", ["scripts/results/tables.py", "scripts/write_stub.py"])
def test_the_files_are_up_to_date(script: str) -> None:
    result = run_command(sys.executable, script, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("changed", "marker"),
    [
        ("README.md", "<!-- headline table: end -->"),
        ("scripts/results/README.md", "## Overview"),
    ],
)
def test_a_figure_typed_by_hand_is_found(changed: str, marker: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts/results", tmp_path / "scripts/results")
    shutil.copy(ROOT / "README.md", tmp_path)
    path = tmp_path / changed
    changed_text = path.read_text().replace(marker, f"| 1 KiB | 0.01 |\n{marker}", 1)
    path.write_text(changed_text)
    result = run_command(sys.executable, tmp_path / "scripts/results/tables.py", "--check")
    assert (result.returncode, result.stdout) == (1, f"{path}: differs from the JSON files\n")
    assert path.read_text() == changed_text


def test_a_stub_changed_by_hand_is_found_and_written_again(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mpicomm", tmp_path / "mpicomm", ignore=shutil.ignore_patterns("__pycache__"))
    stub = tmp_path / "mpicomm/api/collectives.pyi"
    text = stub.read_text()
    stub.write_text(text.replace(", recvbuf: Any,", ", recvbuf: Any = None,"))
    result = run_command(sys.executable, "scripts/write_stub.py", "--check", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1 and result.stdout.startswith(f"{stub}: differs from the table")
    assert run_command(sys.executable, "scripts/write_stub.py", PYTHONPATH=str(tmp_path)).returncode == 0
    assert stub.read_text() == text
