"""The mpi4py face of the package: `Communicator`, and the methods it has by kind of call."""
