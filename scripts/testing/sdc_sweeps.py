"""Solve pySDC's heat equation with a collocation node on each rank.

Run `mpiexec -n 2 python -m mpicomm scripts/testing/sdc_sweeps.py`. With --gpu the arrays are CuPy's, and the
Communicator stands where pySDC takes its wrapper of NCCL. `python -m mpi4py` in place of `python -m mpicomm` then takes
that wrapper.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--gpu", action="store_true")
parser.add_argument("--points", type=int, default=64, help="along each side of the square")
options = parser.parse_args()
GPU, POINTS = options.gpu, options.points


def communicator() -> Any:
    """Return what pySDC sends arrays with."""
    if not GPU or "mpicomm" in sys.modules:
        return WORLD
    from pySDC.helpers.NCCL_communicator import NCCLComm

    return NCCLComm(WORLD)


def main() -> None:
    """Solve, and print the error, which is that of any number of ranks with these nodes."""
    # Not above, so that --help needs no pySDC.
    from pySDC.implementations.controller_classes.controller_nonMPI import controller_nonMPI
    from pySDC.implementations.problem_classes.HeatEquation_ND_FD import heatNd_forced
    from pySDC.implementations.sweeper_classes.imex_1st_order_MPI import imex_1st_order_MPI

    if GPU:
        import cupy

        cupy.cuda.Device(WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    description = {
        "problem_class": heatNd_forced,
        "problem_params": {
            "nvars": (POINTS, POINTS),
            "freq": (2, 2),
            "bc": "periodic",
            "nu": 0.1,
            "useGPU": GPU,
            "solver_type": "CG",
        },
        "sweeper_class": imex_1st_order_MPI,
        "sweeper_params": {
            "num_nodes": WORLD.size,
            "quad_type": "RADAU-RIGHT",
            "QI": "MIN-SR-S",
            "QE": "PIC",
            "comm": communicator(),
        },
        "level_params": {"dt": 0.05, "restol": 1e-9},
        "step_params": {"maxiter": 20},
    }
    controller = controller_nonMPI(1, {"logger_level": 40}, description)
    problem = controller.MS[0].levels[0].prob
    began = time.perf_counter()
    result, _ = controller.run(problem.u_exact(0.0), 0.0, 0.25)
    took = time.perf_counter() - began
    error = float(abs(result - problem.u_exact(0.25)))
    norm = float(np.sqrt(float((result * result).sum())))
    if WORLD.rank == 0:
        sys.stdout.write(f"norm {norm:.9e}, error {error:.5e}\n")
        sys.stderr.write(f"{took:.2f} s by {type(communicator()).__name__}\n")


main()
