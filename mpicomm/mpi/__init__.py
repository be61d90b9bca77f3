"""The meaning of mpi4py's arguments: buffers, datatypes, operations, requests."""
