"""``python -m mpicomm.trace``: joins the traces of ranks, and tells which rank waited for which rank. Without MPI."""
