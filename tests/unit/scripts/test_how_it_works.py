"""The picture is up to date with its script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_the_picture_is_up_to_date(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, str(SCRIPTS / "how_it_works.py"), str(drawn)], check=True)
    assert drawn.read_text() == (SCRIPTS / "how_it_works.svg").read_text()
