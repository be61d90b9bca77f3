"""The command ``python -m mpicomm.bench experts``: times and checks dispatch and combine of a mixture of experts."""
