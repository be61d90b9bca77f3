"""Run mpi4py's tests on windows of device memory: `python -m mpicomm scripts/testing/device_windows.py MAIN [OPTIONS]`.

MAIN is main.py in mpi4py's folder of tests. The tests make windows of host memory by `MPI.Win.Create`. Here each of
them becomes a window of as many bytes of device memory. On plain mpi4py the windows stay as they are.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI


def on_device(cls: Any, memory: Any, disp_unit: int, info: MPI.Info, comm: MPI.Intracomm) -> MPI.Win:
    """Make a window in the place of `MPI.Win.Create`, all zero as the memory of the tests."""
    import mpicomm

    nbytes = 0 if memory is None else len(memory)
    win = mpicomm.Win.Allocate(nbytes, disp_unit, info, comm, place="device")
    win.tomemory()[...] = 0
    win.Fence()  # no rank accesses a part that its rank has yet to fill
    win.Fence(MPI.MODE_NOSUCCEED)
    return win


if "mpicomm" in sys.modules:  # the runner is `python -m mpicomm`
    from mpicomm.mpi.request_lists import replace

    replace(MPI.Win, "Create", classmethod(on_device))
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
