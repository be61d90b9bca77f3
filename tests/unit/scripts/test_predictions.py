"""The published predictions are up to date with the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.jobs.mpiexec import ROOT, environment

NAMES = ("scripts/results/predicted-8-h200.json", "scripts/results/predicted-against-runs-h100.json")


def test_the_predictions_equal_the_models(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, str(tmp_path / "scripts/measuring/predict.py")], env=environment(), check=True, timeout=60
    )
    new, published = ([table for name in NAMES for table in _tables(root / name)] for root in (tmp_path, ROOT))
    for table, known in zip(new, published, strict=True):
        for field in ("title", "text", "columns", "rows", "hardware"):
            assert table[field] == known[field]
        assert known["title"].startswith("Predicted: ")
        assert known["text"].startswith("**Predicted, not measured")


def _tables(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    return found if isinstance(found, list) else [found]
