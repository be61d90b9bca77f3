"""The programs in README.md and in the documents run as they stand, and tables have a row for all that there is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from mpicomm import environment
from mpicomm.doctor.checks import CHECKS
from tests.helpers.jobs.mpiexec import ROOT, run_job
from tests.helpers.programs.document_programs import DOCUMENTS, programs, require_programs_run

UNFREED = "always:<mpicomm.:ResourceWarning"  # Python hides these warnings by default
LANGUAGES = {"python", "yaml", ""}


def test_programs_run_on_the_host() -> None:
    chosen = [program for program in programs() if not program.needs]
    assert require_programs_run(2, chosen, MPICOMM_DEVICE="cpu", PYTHONWARNINGS=UNFREED) == ""


def test_programs_that_need_gpus_compile() -> None:
    chosen = [program for program in programs() if program.needs]
    assert {need for program in chosen for need in program.needs} == {"cupy", "torch"}
    for program in chosen:
        program.compiled()


def test_the_first_program_of_the_readme_runs_on_numpy_as_it_says(tmp_path: Path) -> None:
    sentence = re.search(r"On a machine without GPUs, write `(import numpy as cp)`", (ROOT / "README.md").read_text())
    assert sentence
    path = tmp_path / "program.py"
    path.write_text(next(programs()).source.replace("import cupy as cp", sentence[1]))
    job = run_job(2, "-m", "mpi4py", str(path), MPICOMM_DEVICE="cpu")
    assert job.returncode == 0 and job.stdout.count("on cpu: [3. 3. 3.") == 2, job.stdout + job.stderr


def test_the_test_of_the_guide_runs_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "test_sum.py"
    (program,) = (each for each in programs() if "import pytest" in each.source)
    path.write_text(program.source)
    job = run_job(2, "-m", "mpi4py", "-m", "pytest", "--with-mpi", f"--rootdir={tmp_path}", str(path))
    assert job.returncode == 0 and job.stdout.count("1 passed") == 2, job.stdout + job.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_no_program_hides(document: Path) -> None:
    """A fence that is indented, or names another language, would keep its program from the tests above."""
    opening = re.findall(r"^( *)```(\w*)\n.*?^ *```$", document.read_text(), re.MULTILINE | re.DOTALL)
    assert {language for _, language in opening} <= LANGUAGES and not any(indent for indent, _ in opening)


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


DOCS = ROOT / "mpicomm/docs"


def test_each_check_of_the_doctor_has_a_row_with_its_fix() -> None:
    _, _, table = (DOCS / "troubles.md").read_text().rpartition("| symptom | fix |\n|---|---|\n")
    assert [row.partition(" | ")[2] for row in table.splitlines()] == [f"{check.fix} |" for check in CHECKS]


def test_each_environment_variable_has_a_row() -> None:
    rows = re.findall(r"^\| `(MPICOMM_\w+)` \|", (DOCS / "variables.md").read_text(), re.MULTILINE)
    assert rows == list(environment.NAMES)


def test_the_page_of_numbers_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts/measuring/measure_numbers.py"))
    assert script["page"]() == (DOCS / "numbers.md").read_text()


def test_extras_are_installed_from_the_checkout() -> None:
    files = [path for path in (ROOT / "mpicomm").rglob("*") if path.suffix in (".py", ".md")]
    assert [path for path in files if "mpicomm[" in path.read_text()] == []  # no index has the package
