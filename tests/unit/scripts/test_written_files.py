"""Files that scripts write are up to date: pictures, tables of results, and the stub of the collective methods."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import ROOT, run_command

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
        ("README.md", "<!-- figure: end -->"),
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
