"""``python -m mpicomm.trace``: puts the traces of ranks together, and says which rank waited for which. Without MPI."""
