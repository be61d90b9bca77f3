"""The pictures of the documents are those that their scripts draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import ROOT

SCRIPTS, DOCS = ROOT / "scripts/documents", ROOT / "mpicomm/docs"


@pytest.mark.parametrize(
    ("script", "target", "names"),
    [
        ("chart.py", "allreduce.svg", ["allreduce.svg"]),
        ("how_it_works.py", "how_it_works.svg", ["how_it_works.svg"]),
        ("architecture.py", ".", ["rooms.svg", "way_of_a_call.svg"]),
    ],
)
def test_the_pictures_are_up_to_date(tmp_path: Path, script: str, target: str, names: list[str]) -> None:
    subprocess.run([sys.executable, str(SCRIPTS / script), str(tmp_path / target)], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()
