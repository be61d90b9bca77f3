"""What a collective does to its result before it stores it, as the arguments of a call say it."""
