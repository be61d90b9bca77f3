"""Expressions of the user: text that becomes CUDA C++ for kernels and NumPy for host arrays, with the same meaning."""
