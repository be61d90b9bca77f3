"""Tests on GPUs. Without a GPU each file of them is skipped, because pytest imports this package first."""

import pytest

from mpicomm.devices.cuda.driver import visible_devices
from mpicomm.errors import BackendUnavailableError

try:
    DEVICES = visible_devices()
except BackendUnavailableError as unavailable:
    pytest.skip(f"no GPU to test on: {unavailable}", allow_module_level=True)
