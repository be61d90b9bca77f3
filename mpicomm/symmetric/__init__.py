"""SymmetricArray: the same memory on every rank, open to all ranks of the node; signals and events."""
