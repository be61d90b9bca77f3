"""The published predictions are those of the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.mpiexec import ROOT, environment

NAME = "scripts/results/predicted-8-h200.json"


def test_the_predictions_are_those_of_the_model(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, str(tmp_path / "scripts/predict.py")], env=environment(), check=True, timeout=60)
    new, published = (json.loads((root / NAME).read_text()) for root in (tmp_path, ROOT))
    for table, known in zip(new, published, strict=True):
        for field in ("title", "text", "columns", "rows", "hardware"):
            assert table[field] == known[field]
        assert known["title"].startswith("Predicted: ")
        assert known["text"].startswith("**Predicted, not measured")
