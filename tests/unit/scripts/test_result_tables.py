"""The tables of the READMEs are up to date with the JSON files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/results/tables.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_files_are_up_to_date() -> None:
    result = check(ROOT)
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
    result = check(tmp_path)
    assert result.returncode == 1
    assert result.stdout.splitlines() == [f"{path}: differs from the JSON files"]
    assert path.read_text() == changed_text
