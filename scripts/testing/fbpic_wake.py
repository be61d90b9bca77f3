"""Run FBPIC's laser wake on all ranks, and print its fields.

Run `mpiexec -n 2 python -m mpicomm scripts/testing/fbpic_wake.py`. Each rank has a part of the plasma, and exchanges
guard cells and particles with its neighbours. FBPIC takes a GPU if Numba finds one. FBPIC_ENABLE_GPUDIRECT=1 makes it
pass GPU arrays to MPI.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from fbpic.lpa_utils.laser import add_laser
from fbpic.main import Simulation
from fbpic.utils.cuda import cuda_installed
from mpi4py import MPI
from scipy.constants import c

STEPS = 400 if cuda_installed else 10


def main() -> None:
    """Step the simulation, and print the norm of each field of all ranks."""
    np.random.seed(MPI.COMM_WORLD.rank)  # the angles of the particles
    cells, length = 400, 40e-6
    simulation = Simulation(
        *(cells, 20e-6, 50, 20e-6, 2, length / cells / c),  # Nz, zmax, Nr, rmax, Nm, dt
        *(0.0, 500e-6, 0.0, 18e-6, 2, 2, 4, 4e24),  # the plasma: p_zmin, p_zmax, p_rmin, p_rmax, p_nz, p_nr, p_nt, n_e
        zmin=-20e-6,
        n_order=32,
        boundaries={"z": "open", "r": "reflective"},
        use_cuda=cuda_installed,
        verbose_level=0,
    )
    add_laser(simulation, 2.0, 5e-6, 5e-15 * c, 10e-6, lambda0=0.8e-6, zf=0.0)
    simulation.set_moving_window(v=c)
    simulation.step(4, show_progress=False)  # compiles
    began = time.perf_counter()
    simulation.step(STEPS, show_progress=False)
    took = time.perf_counter() - began
    for name in ("Er", "Et", "Ez", "Br", "Bt", "Bz", "rho"):
        mine = sum(float(np.sum(np.abs(getattr(grid, name)) ** 2)) for grid in simulation.fld.interp)
        norm = MPI.COMM_WORLD.allreduce(mine) ** 0.5
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{name} {norm:.4e}\n")
    if MPI.COMM_WORLD.rank == 0:
        sys.stderr.write(f"{STEPS} steps in {took:.2f} s on {'a GPU' if cuda_installed else 'the host'}\n")


main()
