"""The script that measures PyTorch's backends writes the data for scripts/results/tables.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.jobs.mpiexec import ROOT, environment, run_job


def test_the_tables_have_both_backends_and_the_version_of_pytorch(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts/results", tmp_path / "scripts/results")
    shutil.copy(ROOT / "README.md", tmp_path)
    file = tmp_path / "scripts/results/torch-here.json"
    script = str(ROOT / "scripts/measuring/measure_torch.py")
    result = run_job(2, script, "--kib=4", "--rounds=1", f"--json={file}", CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stderr) == (0, "")
    calls, training = json.loads(file.read_text())
    assert [row[0] for row in calls["rows"]] == ["4 KiB"] and all(value > 0 for value in calls["rows"][0][1:])
    assert [row[0] for row in training["rows"]][:2] == ["gloo", "mpicomm"]
    assert "torch" in calls["versions"]
    subprocess.run([sys.executable, "scripts/results/tables.py"], cwd=tmp_path, env=environment(), check=True)
    assert "[torch-here.json](torch-here.json)" in (tmp_path / "scripts/results/README.md").read_text()
