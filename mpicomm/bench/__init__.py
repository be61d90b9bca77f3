"""``python -m mpicomm.bench``: times the collectives, checks what they return, and compares with other libraries."""
