"""Each script says how to call it, and does nothing else, when it is started with --help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.jobs.mpiexec import ROOT, environment

SCRIPTS = ROOT / "scripts"
COMMANDS = [[str(path)] for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)]
PROGRAMS = [
    [sys.executable, str(path)] for path in SCRIPTS.rglob("*.py") if "argparse.ArgumentParser(" in path.read_text()
]


def test_each_script_answers_help_and_writes_nothing(tmp_path: Path) -> None:
    assert len(COMMANDS) == 5 and len(PROGRAMS) > 15
    jobs = {
        command[-1]: subprocess.Popen(
            [*command, "--help"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in (*COMMANDS, *PROGRAMS)
    }
    answers = {script: (*job.communicate(timeout=100), job.returncode) for script, job in jobs.items()}
    for script, (said, complaint, code) in answers.items():
        name = Path(script).relative_to(ROOT)
        assert (code, complaint) == (0, ""), script
        assert str(name) in said or name.stem in said, script
    assert list(tmp_path.iterdir()) == []
