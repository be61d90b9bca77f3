"""The mpi4py interface of the package: `Communicator`, and its methods by kind of call."""
