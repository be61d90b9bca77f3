"""Collectives on host arrays through mapped shared memory."""
