"""Collectives on host arrays through shared memory that the ranks of a node map."""
