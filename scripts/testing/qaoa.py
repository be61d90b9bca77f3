"""Simulate a quantum circuit by qokit on GPUs: `mpiexec -n 2 python -m mpicomm scripts/testing/qaoa.py`.

Its state vector is a device array of Numba on each rank, and Alltoall exchanges its parts in place. A plain MPI takes
no such array, so `python -m mpi4py` computes the same by one rank alone.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from types import ModuleType

import numpy as np
from mpi4py import MPI

package = find_spec("qokit")
assert package, "there is no qokit"
sys.modules["qokit"] = ModuleType("qokit")  # the package itself imports twenty others, which the simulators do not need
sys.modules["qokit"].__path__ = list(package.submodule_search_locations or [])
from qokit.fur.mpi_nbcuda.qaoa_simulator import QAOAFURXSimulatorGPUMPI  # noqa: E402
from qokit.fur.nbcuda.qaoa_simulator import QAOAFURXSimulatorGPU  # noqa: E402

WORLD = MPI.COMM_WORLD
QUBITS = 24


def main() -> None:
    """Print the expectation of all ranks or of one."""
    terms = [(0.5, (node, (node + step) % QUBITS)) for node in range(QUBITS) for step in (1, 5)]
    gammas, betas = np.linspace(0.1, 0.5, 8), np.linspace(0.6, 0.1, 8)
    ranks = WORLD.size if "mpicomm" in sys.modules else 1
    if WORLD.rank >= ranks:
        return
    simulator = (QAOAFURXSimulatorGPUMPI if ranks > 1 else QAOAFURXSimulatorGPU)(QUBITS, terms=terms)
    simulator.simulate_qaoa(gammas[:1], betas[:1])  # compiles
    began = time.perf_counter()
    state = simulator.simulate_qaoa(gammas, betas)
    expectation = simulator.get_expectation(state)
    took = time.perf_counter() - began
    if WORLD.rank == 0:
        sys.stdout.write(f"expectation {float(expectation):.6f}\n")
        sys.stderr.write(f"{took:.3f} s on {ranks} ranks\n")


main()
