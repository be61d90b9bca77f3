"""Copy engines move the data between barriers of the ranks."""
