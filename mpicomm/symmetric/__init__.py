"""SymmetricArray: the same memory on every rank, open to all ranks of its node; signals and events."""
