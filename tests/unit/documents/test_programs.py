"""The programs in README.md and in the documents of users run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import ROOT
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_no_program_hides(document: Path) -> None:
    """A fence that is indented, or names another language, would keep its program from the tests above."""
    opening = re.findall(r"^( *)```(\w*)\n.*?^ *```$", document.read_text(), re.MULTILINE | re.DOTALL)
    assert {language for _, language in opening} <= LANGUAGES and not any(indent for indent, _ in opening)


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140
