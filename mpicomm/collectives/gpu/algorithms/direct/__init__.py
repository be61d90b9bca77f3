"""Kernels store straight into the symmetric output of the peers; also the barrier of streams."""
