"""The programs in the documents of users run on GPUs, with a rank on each GPU or with ranks that share one."""

from __future__ import annotations

import pytest

from tests.helpers.programs.document_programs import programs, require_programs_run


@pytest.mark.parametrize("nprocs", [2, 4])
def test_programs_run_on_gpus(nprocs: int) -> None:
    chosen = [program for program in programs() if "torch" not in program.needs]
    assert "using the cpu" not in require_programs_run(nprocs, chosen)
