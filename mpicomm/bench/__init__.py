"""``python -m mpicomm.bench``: times the collectives, checks their results, and compares with other libraries."""
