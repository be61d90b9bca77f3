"""The programs in the documents of users that import PyTorch run as they stand."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.programs.document_programs import programs, require_programs_run

CHOSEN = [program for program in programs() if program.needs == {"torch"}]
ON_HOST = {"MPICOMM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
DEVICES = {"cpu": ON_HOST, "cuda": {}} if torch.cuda.is_available() else {"cpu": ON_HOST}


@pytest.mark.parametrize("device", DEVICES)
def test_programs_run(device: str) -> None:
    require_programs_run(2, CHOSEN, **DEVICES[device])
