"""The tables of the documents have a row for all that the package has."""

from __future__ import annotations

import re
import runpy

from mpicomm import environment
from mpicomm.doctor.checks import CHECKS
from tests.helpers.jobs.mpiexec import ROOT

DOCUMENTS = ROOT / "mpicomm/docs"


def test_each_check_of_the_doctor_has_a_row_with_its_fix() -> None:
    _, _, table = (DOCUMENTS / "troubles.md").read_text().rpartition("| symptom | fix |\n|---|---|\n")
    assert [row.partition(" | ")[2] for row in table.splitlines()] == [f"{check.fix} |" for check in CHECKS]


def test_each_environment_variable_has_a_row() -> None:
    rows = re.findall(r"^\| `(MPICOMM_\w+)` \|", (DOCUMENTS / "variables.md").read_text(), re.MULTILINE)
    assert rows == list(environment.NAMES)


def test_the_page_of_numbers_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts/measuring/measure_numbers.py"))
    assert script["page"]() == (DOCUMENTS / "numbers.md").read_text()


def test_extras_are_installed_from_the_checkout() -> None:
    files = [path for path in (ROOT / "mpicomm").rglob("*") if path.suffix in (".py", ".md")]
    assert [path for path in files if "mpicomm[" in path.read_text()] == []  # no index has the package
