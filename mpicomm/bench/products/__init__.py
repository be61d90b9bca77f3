"""``python -m mpicomm.bench matmul``: products that overlap with a collective, beside their parts and other libraries.

On GPUs PyTorch multiplies, on the host NumPy.
"""
