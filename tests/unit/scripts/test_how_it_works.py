"""The picture is the one that its script draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.jobs.mpiexec import ROOT


def test_the_picture_is_up_to_date(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, str(ROOT / "scripts/documents/how_it_works.py"), str(drawn)], check=True)
    assert drawn.read_text() == (ROOT / "mpicomm/docs/how_it_works.svg").read_text()
