"""One GPU: CuPy arrays over memory that the CUDA driver shares between processes."""
