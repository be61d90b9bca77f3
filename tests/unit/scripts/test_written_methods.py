"""The collective methods of a Communicator are up to date with the table of operations."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import ROOT, environment
from tests.helpers.jobs.pace import HANG_S


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/write_methods.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=HANG_S)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The script and the files that it writes."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/write_methods.py", tmp_path / "scripts")
    shutil.copytree(ROOT / "mpicomm/api", tmp_path / "mpicomm/api", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_methods_are_up_to_date() -> None:
    result = run(ROOT, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_methods_changed_by_hand_are_found_and_written_again(project: Path) -> None:
    names = ("blocking.py", "nonblocking.py", "persistent.py", "neighbors.py")
    texts = {project / "mpicomm/api" / name: (project / "mpicomm/api" / name).read_text() for name in names}
    changed = {path: text.replace(", recvbuf: Any,", ", recvbuf: Any = None,") for path, text in texts.items()}
    for path, text in changed.items():
        path.write_text(text)
    result = run(project, "--check")
    assert result.returncode == 1
    assert result.stdout.splitlines() == [f"{path}: differs from the table" for path in texts]
    assert {path: path.read_text() for path in texts} == changed
    assert run(project).returncode == 0
    assert {path: path.read_text() for path in texts} == texts


def test_a_method_above_the_line_is_not_written_again(project: Path) -> None:
    path = project / "mpicomm/api/nonblocking.py"
    text = path.read_text()
    by_hand = "    def Ibcast(self, *arguments: Any) -> MPI.Request: ...\n"
    path.write_text(text.replace("    def Iallreduce(", f"{by_hand}\n    def Iallreduce("))
    assert run(project).returncode == 0
    assert by_hand in path.read_text()
    assert path.read_text().count("def Ibcast(") == text.count("def Ibcast(") == 1
