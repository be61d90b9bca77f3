"""Windows: one-sided calls on memory that all ranks of the communicator have mapped."""
