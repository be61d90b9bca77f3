"""The documents are those that the package writes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomm import environment
from mpicomm.doctor.report import CHECKS
from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.jobs.mpiexec import environment as variables

SCRIPT = "scripts/documents/write_documents.py"


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, env=variables(), timeout=60)


def test_the_documents_are_up_to_date() -> None:
    result = run(ROOT, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["troubles.md", "variables.md"])
def test_a_document_changed_by_hand_is_found_and_written_again(name: str, tmp_path: Path) -> None:
    (tmp_path / SCRIPT).parent.mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    shutil.copytree(ROOT / "mpicomm/docs", tmp_path / "mpicomm/docs")
    path = tmp_path / "mpicomm/docs" / name
    written = path.read_text()
    path.write_text(written.replace(" | ", " | perhaps ", 1))
    result = run(tmp_path, "--check")
    assert (result.returncode, result.stdout) == (1, f"{path}: differs from the package\n")
    assert run(tmp_path).returncode == 0
    assert path.read_text() == written


def test_extras_are_installed_from_the_checkout() -> None:
    files = [path for path in (ROOT / "mpicomm").rglob("*") if path.suffix in (".py", ".md")]
    assert [path for path in files if "mpicomm[" in path.read_text()] == []  # no index has the package


def test_each_check_and_each_variable_has_a_row() -> None:
    troubles, listed = ((ROOT / "mpicomm/docs" / name).read_text() for name in ("troubles.md", "variables.md"))
    assert all(f"| {check.symptom} | {check.fix} |" in troubles for check in CHECKS)
    assert all(f"| `{name}` |" in listed for name in environment.NAMES)
