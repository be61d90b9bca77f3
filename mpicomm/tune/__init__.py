"""``python -m mpicomm.tune``: times the algorithms of the collectives on this machine's GPUs and keeps the fastest."""
