"""Messages between two ranks in stream order, matched by kernels."""
