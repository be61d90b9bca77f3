"""Each rank sends to the next rank the data that it receives, as it is or reduced with its own data."""
