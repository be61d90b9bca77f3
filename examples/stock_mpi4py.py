"""The largest eigenvalue of a matrix that is spread over ranks: `mpirun -np 4 python examples/stock_mpi4py.py`.

This is a program for mpi4py and NumPy. Only the two marked lines are mpicomm's: the import and the communicator.
"""

import numpy as np
from mpi4py import MPI

import mpicomm  # <- added

comm = mpicomm.Communicator(MPI.COMM_WORLD)  # <- was: comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

# Rank 0 makes the problem: a symmetric matrix with the known eigenvalues 1, 1/2, 1/3, ...
n = 120 * size
matrix = None
guess = np.empty(n)
if rank == 0:
    rng = np.random.default_rng(seed=1)
    basis, _ = np.linalg.qr(rng.standard_normal((n, n)))
    matrix = (basis / np.arange(1, n + 1)) @ basis.T
    guess[:] = rng.standard_normal(n)

# Every rank receives its rows of the matrix and the first guess of the eigenvector.
rows = np.empty((n // size, n))
comm.Scatter(matrix, rows, root=0)
comm.Bcast(guess, root=0)

# Power iteration: multiply, normalise, and stop when the vector stays the same.
mine = slice(rank * (n // size), (rank + 1) * (n // size))
eigenvalue, change, steps = np.zeros(1), np.ones(1), 0
while change[0] > 1e-10 and steps < 200:
    product = rows @ guess
    norm = np.empty(1)
    comm.Allreduce(np.array([product @ product]), norm, op=MPI.SUM)
    comm.Allreduce(np.array([guess[mine] @ product]), eigenvalue, op=MPI.SUM)
    product /= np.sqrt(norm[0])
    comm.Allreduce(np.array([abs(product - guess[mine]).max()]), change, op=MPI.MAX)
    comm.Allgather(product, guess)
    steps += 1

# Rank 0 gathers the parts of the eigenvector.
eigenvector = np.empty(n) if rank == 0 else None
comm.Gather(guess[mine], eigenvector, root=0)
if matrix is not None:
    residual = np.linalg.norm(matrix @ eigenvector - eigenvalue[0] * eigenvector)
    print(f"{size} ranks: eigenvalue {eigenvalue[0]:.9f} after {steps} steps, residual {residual:.1e}")
