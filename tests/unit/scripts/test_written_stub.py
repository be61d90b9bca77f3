"""The stub of the collective methods is up to date with the table of operations."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.jobs.mpiexec import ROOT, run_command


def run(*options: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_command(sys.executable, "scripts/write_stub.py", *options, PYTHONPATH=str(root))


def test_the_stub_is_up_to_date() -> None:
    result = run("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_stub_changed_by_hand_is_found_and_written_again(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mpicomm", tmp_path / "mpicomm", ignore=shutil.ignore_patterns("__pycache__"))
    stub = tmp_path / "mpicomm/api/collectives.pyi"
    text = stub.read_text()
    stub.write_text(text.replace(", recvbuf: Any,", ", recvbuf: Any = None,"))
    result = run("--check", root=tmp_path)
    assert result.returncode == 1 and result.stdout.startswith(f"{stub}: differs from the table")
    assert run(root=tmp_path).returncode == 0
    assert stub.read_text() == text
