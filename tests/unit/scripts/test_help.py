"""Each script says how to call it, and does nothing else, when it is started with --help."""

from __future__ import annotations

import os
import re
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
