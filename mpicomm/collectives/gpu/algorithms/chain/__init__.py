"""Each rank sends the data that it receives to the next rank, unchanged or reduced with its own data."""
