"""Each rank sends to the next rank what it receives, as it is or reduced with its own data."""
